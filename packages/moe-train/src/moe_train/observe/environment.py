"""What a run ran on: versions, machine, command. The parts that need torch load it."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

DISTRIBUTIONS = (
    *("moe-stack-parallel", "moe-stack-kernels", "moe-stack-comm", "moe-stack-memory", "moe-stack-train"),
    *("torch", "numpy", "pydantic", "rich", "safetensors"),
)


def versions() -> dict[str, str | None]:
    """Installed versions by distribution, and Python's; None where a distribution is missing."""
    return {"python": platform.python_version(), **{name: _version(name) for name in DISTRIBUTIONS}}


def accelerators() -> list[str]:
    """One line per CUDA device that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{found.name}, {found.total_memory / 2**30:.0f} GiB" for found in properties]


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity.


def environment(*, recipe: str, command: str, seed: int, nproc: int = 1) -> dict[str, Any]:
    """The contents of env.json.

    Args:
        nproc: ranks, if all are on this machine.
    """
    return {
        "recipe": recipe,
        "command": command,
        "nproc": nproc,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "versions": versions(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "cores": cores(),
        "accelerators": accelerators(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


# Variables that change speed or bits. Others may hold secrets and are nobody's business.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
