"""Saving: everything into a temporary folder, made durable, then one rename. A kill at any moment leaves old or new."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_memory.data_parallel import StateTensor
from moe_parallel import gather_json, together
from moe_train.checkpoint.format import (
    INDEX,
    CheckpointError,
    Index,
    StoredBox,
    StoredFile,
    StoredTensor,
    check_state,
    files_from_json,
    merge_tables,
    read_index,
    table_from_json,
    table_to_json,
)

_COMPLETE = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of complete checkpoints by step; what a dead run left unfinished is not among them."""
    if not directory.is_dir():
        return []
    steps = {
        path: int(match[1])
        for path in directory.iterdir()
        if (match := _COMPLETE.fullmatch(path.name)) and (path / INDEX).is_file()
    }
    return sorted(steps, key=steps.__getitem__)


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Iterable[StateTensor],
    state: dict[str, Any],
    *,
    keep: int | None = None,
    shard_bytes: int = 2 * 2**30,
    rank: int = 0,
) -> Path:
    """Write `<directory>/step-<step>` and return it; it exists only once it is complete and on the disk.

    Collective: every rank writes its own parts, the first one the rest; the directory must be on a file system that
    all ranks share. One run at a time may save into a directory. Tensors are read where they are, without a copy on a
    CPU; when this returns, changing them changes no file.

    Args:
        tensors: the parts that are here, each name at most once; those that this rank owns are written.
        state: all other state, JSON values.
        keep: number of complete checkpoints that stay, those of the highest steps; None keeps all. The one written here
            stays in any case.
        shard_bytes: a shard is closed when it holds at least this much.
        rank: of this process in the world.

    Raises:
        CheckpointError: the step was saved before, a name occurs twice, the boxes do not tile their tensors, the state
            is not JSON, or the disk fails. What was there before is untouched, and nothing else is left.
        RankError: one of these happened on another rank.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep = {keep}: at least one checkpoint has to stay")
    check_state(state)
    final = directory / checkpoint_name(step)
    working = directory / f"{_UNFINISHED}{final.name}"
    first = rank == 0
    with _together(final):
        if first:
            _begin(directory, working, final)
    try:
        with _together(final):
            if not working.is_dir():
                raise CheckpointError(f"rank {rank} cannot see {working}: {directory} must be shared by all ranks")
            owned = (tensor for tensor in tensors if tensor.owned)
            table, files = write_shards(working, owned, rank=rank, shard_bytes=shard_bytes)
        parts = gather_json({"tensors": table_to_json(table), "files": {n: vars(file) for n, file in files.items()}})
        with _together(final):
            if first:
                tables = merge_tables(table_from_json(part["tensors"]) for part in parts)
                all_files = {name: file for part in parts for name, file in files_from_json(part["files"]).items()}
                write_index(working, Index(tensors=tables, files=all_files, state=state))
                os.rename(working, final)
    except BaseException:
        if first:
            shutil.rmtree(working, ignore_errors=True)
        raise
    with _together(final):
        if first:
            _sync(directory)
            if keep is not None:
                _prune(directory, keep, final)
    return final


@contextmanager
def _together(final: Path) -> Iterator[None]:
    """What fails in the body on one rank fails on all."""
    with together():
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{final} cannot be written: {error}") from error


def _begin(directory: Path, working: Path, final: Path) -> None:
    """Make an empty working folder, and the directory where it is missing."""
    if final.exists():
        raise CheckpointError(f"{final} exists already; a checkpoint is never overwritten")
    if not directory.is_dir():
        directory.mkdir(parents=True)
        _sync(directory.parent)
    remove_unfinished(directory)
    working.mkdir()


def remove_unfinished(directory: Path) -> None:
    """Delete what interrupted saves left behind."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        _remove(path)


def write_shards(
    folder: Path, tensors: Iterable[StateTensor], *, rank: int, shard_bytes: int
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Write the files of one rank and make them durable; returns its part of the table of tensors, and the files."""
    table: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        file = folder / f"rank-{rank:05d}-{number:05d}.safetensors"
        content: dict[str, Tensor] = {}
        for part in shard:
            if part.name in table:
                raise CheckpointError(f"the tensor {part.name} was given twice; a process owns one box of it")
            if tuple(part.tensor.shape) != part.box.shape:
                raise CheckpointError(
                    f"the tensor {part.name} has shape {tuple(part.tensor.shape)}, its box {part.box.shape}"
                )
            content[part.name] = part.tensor.detach().contiguous()
            table[part.name] = StoredTensor(
                shape=tuple(part.global_shape),
                dtype=str(part.tensor.dtype).removeprefix("torch."),
                boxes=(StoredBox(file=file.name, key=part.name, box=part.box),),
            )
        try:
            save_file(content, file)
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{file} cannot be written: {' '.join(str(error).split())}") from error
        _sync(file)
        files[file.name] = describe_file(file)
    return table, files


def write_index(folder: Path, index: Index) -> None:
    """Write the index last, make it and the names in the folder durable, and read it back."""
    (folder / INDEX).write_text(index.to_json(), encoding="utf-8")
    _sync(folder / INDEX)
    _sync(folder)
    # Boxes that do not tile their tensors must fail here, not when the checkpoint is needed.
    read_index(folder)


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is."""
    with path.open("rb") as stream:
        return StoredFile(size_bytes=path.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


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


def _prune(directory: Path, keep: int, written: Path) -> None:
    for old in complete_checkpoints(directory)[:-keep]:
        if old == written:
            continue
        # Renamed first, durably: half of a checkpoint must never have the name of a whole one.
        doomed = directory / f"{_UNFINISHED}{old.name}"
        try:
            os.rename(old, doomed)
            _sync(directory)
            _remove(doomed)
        except OSError as error:
            raise CheckpointError(f"{written} is complete, but {old} cannot be removed: {error}") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
