"""moe-kernels: the mathematics of a Mixture-of-Experts layer on one device."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_kernels._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_kernels.activation import gated_activation as gated_activation
    from moe_kernels.capacity import (
        CapacityGroup as CapacityGroup,
        drop_beyond_capacity as drop_beyond_capacity,
        expert_capacity as expert_capacity,
        keep_choices as keep_choices,
        kept_choices as kept_choices,
    )
    from moe_kernels.config import (
        CapacityConfig as CapacityConfig,
        KernelsConfig as KernelsConfig,
        RouterConfig as RouterConfig,
        YarnConfig as YarnConfig,
    )
    from moe_kernels.counter_random import TokenRandom as TokenRandom
    from moe_kernels.dtypes import internal_dtype as internal_dtype
    from moe_kernels.errors import MoeKernelsError as MoeKernelsError
    from moe_kernels.expert_bias import update_expert_bias as update_expert_bias
    from moe_kernels.experts import ExpertCompute as ExpertCompute, GroupedExperts as GroupedExperts
    from moe_kernels.forced_balance import balanced_choices as balanced_choices
    from moe_kernels.graphs import GraphedStep as GraphedStep, GraphPool as GraphPool
    from moe_kernels.grouped_gemm import (
        GROUPED_GEMM as GROUPED_GEMM,
        GroupedGemm as GroupedGemm,
        KernelSpec as KernelSpec,
        select_grouped_gemm as select_grouped_gemm,
    )
    from moe_kernels.losses import (
        balance_loss as balance_loss,
        global_balance_loss as global_balance_loss,
        inject_gradient as inject_gradient,
        plain_choices as plain_choices,
        z_loss as z_loss,
    )
    from moe_kernels.norm import (
        RMSNorm as RMSNorm,
        rms_norm as rms_norm,
        rms_norm_residual as rms_norm_residual,
    )
    from moe_kernels.permute import RowMap as RowMap
    from moe_kernels.registry import Installed as Installed, PluginError as PluginError, Registry as Registry
    from moe_kernels.replay import ReplaySlot as ReplaySlot, RouterReplay as RouterReplay
    from moe_kernels.rope import (
        apply_rope as apply_rope,
        rope_tables as rope_tables,
        yarn_softmax_factor as yarn_softmax_factor,
    )
    from moe_kernels.routing import (
        Routing as Routing,
        route as route,
        scores as scores,
    )
    from moe_kernels.sinkhorn import sinkhorn_choices as sinkhorn_choices
    from moe_kernels.top_k import stable_top_k as stable_top_k

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
# The functions of `permute`, `cross_entropy`, `jitter` and `grouped_gemm` come from their modules, of which some share
# the name.
_MODULE_OF = {
    "apply_rope": "rope",
    "balance_loss": "losses",
    "balanced_choices": "forced_balance",
    "CapacityConfig": "config",
    "CapacityGroup": "capacity",
    "drop_beyond_capacity": "capacity",
    "expert_capacity": "capacity",
    "ExpertCompute": "experts",
    "gated_activation": "activation",
    "global_balance_loss": "losses",
    "GraphedStep": "graphs",
    "GraphPool": "graphs",
    "GROUPED_GEMM": "grouped_gemm",
    "GroupedExperts": "experts",
    "GroupedGemm": "grouped_gemm",
    "inject_gradient": "losses",
    "Installed": "registry",
    "internal_dtype": "dtypes",
    "keep_choices": "capacity",
    "kept_choices": "capacity",
    "KernelsConfig": "config",
    "KernelSpec": "grouped_gemm",
    "MoeKernelsError": "errors",
    "plain_choices": "losses",
    "PluginError": "registry",
    "Registry": "registry",
    "ReplaySlot": "replay",
    "RMSNorm": "norm",
    "rms_norm": "norm",
    "rms_norm_residual": "norm",
    "rope_tables": "rope",
    "route": "routing",
    "RouterConfig": "config",
    "RouterReplay": "replay",
    "Routing": "routing",
    "RowMap": "permute",
    "scores": "routing",
    "select_grouped_gemm": "grouped_gemm",
    "sinkhorn_choices": "sinkhorn",
    "stable_top_k": "top_k",
    "TokenRandom": "counter_random",
    "update_expert_bias": "expert_bias",
    "yarn_softmax_factor": "rope",
    "YarnConfig": "config",
    "z_loss": "losses",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
