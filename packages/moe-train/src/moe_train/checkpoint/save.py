"""Saving: everything into a temporary folder, made durable, then one rename. A kill at any moment leaves old or new."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from moe_memory.data_parallel import StateTensor
from moe_train.checkpoint.format import INDEX, CheckpointError, Index, StoredBox, StoredFile, StoredTensor

_COMPLETE = "step-"
_UNFINISHED = ".unfinished-"
_READ_BYTES = 2**20


def checkpoint_name(step: int) -> str:
    return f"{_COMPLETE}{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first; what a dead run left unfinished is not among them."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.startswith(_COMPLETE) and (path / INDEX).exists())


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Iterable[StateTensor],
    state: dict[str, Any],
    *,
    keep: int | None = None,
    shard_bytes: int = 2 * 2**30,
) -> Path:
    """Write `<directory>/step-<step>` and return it; it exists only once it is complete and on the disk.

    Args:
        tensors: the parts that this process owns; each name at most once.
        state: all other state, JSON values.
        keep: number of complete checkpoints that stay, the newest ones; None keeps all.
        shard_bytes: a shard is closed when it holds at least this much.

    Raises:
        CheckpointError: the step was saved before, a name occurs twice, or the state is not JSON. Nothing is left.
    """
    final = directory / checkpoint_name(step)
    if final.exists():
        raise CheckpointError(f"{final} exists already; a checkpoint is never overwritten")
    directory.mkdir(parents=True, exist_ok=True)
    remove_unfinished(directory)
    working = directory / f"{_UNFINISHED}{final.name}"
    working.mkdir()
    try:
        _write(working, tensors, state, shard_bytes)
        os.rename(working, final)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    _sync(directory)
    if keep is not None:
        for old in complete_checkpoints(directory)[:-keep]:
            # Renamed first: half of a checkpoint must never have the name of a whole one.
            doomed = directory / f"{_UNFINISHED}{old.name}"
            os.rename(old, doomed)
            shutil.rmtree(doomed)
    return final


def remove_unfinished(directory: Path) -> None:
    """Delete what interrupted saves left behind."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


def _write(working: Path, tensors: Iterable[StateTensor], state: dict[str, Any], shard_bytes: int) -> None:
    table: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        name = f"rank-00000-{number:05d}.safetensors"
        content: dict[str, Tensor] = {}
        for part in shard:
            if part.name in table:
                raise CheckpointError(f"the tensor {part.name} was given twice; a process owns one box of it")
            content[part.name] = part.tensor.detach().contiguous()
            table[part.name] = StoredTensor(
                shape=part.global_shape,
                dtype=str(part.tensor.dtype).removeprefix("torch."),
                boxes=(StoredBox(file=name, key=part.name, box=part.box),),
            )
        save_file(content, working / name)
        files[name] = describe_file(working / name)
    (working / INDEX).write_text(Index(tensors=table, files=files, state=state).to_json(), encoding="utf-8")
    for path in (*working.iterdir(), working):
        _sync(path)


def _shards(tensors: Iterable[StateTensor], shard_bytes: int) -> Iterator[list[StateTensor]]:
    shard: list[StateTensor] = []
    size = 0
    for part in tensors:
        shard.append(part)
        size += part.tensor.numel() * part.tensor.element_size()
        if size >= shard_bytes:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return StoredFile(size_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
