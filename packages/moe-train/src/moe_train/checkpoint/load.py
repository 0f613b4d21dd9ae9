"""Loading: everything is checked before anything is changed, and nothing is held twice."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_memory.data_parallel import StateTensor
from moe_parallel import Box, gather_json, together
from moe_train.checkpoint.format import (
    CheckpointError,
    Index,
    StoredBox,
    fits,
    intersection,
    read_index as read_index,
)
from moe_train.checkpoint.save import complete_checkpoints, describe_file

# Names in one message.
_SHOWN_NAMES = 5


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def verify(path: Path) -> Index:
    """Read the index and check every file against it.

    Raises:
        CheckpointError: a file is missing, cut off or changed; the message names it and what lies in it.
    """
    index = read_index(path)
    _check_files(path, index, index.files)
    return index


def load_tensors(path: Path, targets: Iterable[StateTensor]) -> None:
    """Fill the targets, whatever boxes of the tensors they are, from a checkpoint of any layout.

    Collective: every rank reads the parts that it needs. Files are hashed first, then mapped one after another and
    copied box by box: nothing is held besides the targets.

    Raises:
        CheckpointError: damage, a tensor that is missing here or there, another shape or dtype. No target was changed,
            on any rank.
        RankError: one of these was found on another rank.
    """
    targets = list(targets)
    # A rank that owns nothing of a tensor does not name it: what the model has is what all ranks have together.
    everywhere = set().union(*gather_json([target.name for target in targets]))
    with together():
        pieces = _checked_pieces(path, targets, everywhere)
    # A file with the right hash and header has nothing left that could fail.
    with torch.no_grad():
        for name, inside in pieces.items():
            with _opened(path / name) as file:
                for piece in inside:
                    values = file.get_slice(piece.stored.key)[_slices(piece.common, piece.stored.box)]
                    piece.target.tensor[_slices(piece.common, piece.target.box)].copy_(values)


def _checked_pieces(path: Path, targets: list[StateTensor], everywhere: set[str]) -> "dict[str, list[_Piece]]":
    """What is to be copied from each file, after everything that can be wrong with it was looked for."""
    index = read_index(path)
    _check_targets(path, index, targets, everywhere)
    pieces: dict[str, list[_Piece]] = {}
    for target in targets:
        for stored in index.tensors[target.name].boxes:
            common = intersection(stored.box, target.box)
            if common is not None:
                pieces.setdefault(stored.file, []).append(_Piece(target, stored, common))
    _check_files(path, index, pieces)
    for name, inside in pieces.items():
        with _opened(path / name) as file:
            for piece in inside:
                _check_header(path / name, file, piece)
    return pieces


@dataclass(frozen=True)
class _Piece:
    """What one stored box has in common with one target."""

    target: StateTensor
    stored: StoredBox
    common: Box


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(box.offset, inside.offset, box.shape, strict=True)
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_header(path: Path, file: Any, piece: _Piece) -> None:
    """Compare shape and dtype of what is in a file with the index, without reading it."""
    key, box = piece.stored.key, piece.stored.box
    content = file.get_slice(key)
    shape = tuple(content.get_shape())
    dtype = content[() if not shape else slice(0, 0)].dtype
    if shape != box.shape or dtype != piece.target.tensor.dtype:
        raise CheckpointError(
            f"{path}: {key} is {shape} {dtype}, the index says {box.shape} {piece.target.tensor.dtype}"
        )


def _check_files(path: Path, index: Index, names: Collection[str]) -> None:
    """Missing and cut-off files first: they are found without reading anything."""
    for name in names:
        file, expected = path / name, index.files[name]
        try:
            size_bytes = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} is missing: {error}; it holds {_contents(index, name)}") from error
        if size_bytes != expected.size_bytes:
            raise CheckpointError(
                f"{file} has {size_bytes} bytes, not {expected.size_bytes}; it holds {_contents(index, name)}"
            )
    for name in names:
        file = path / name
        try:
            found = describe_file(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}; it holds {_contents(index, name)}") from error
        if found != index.files[name]:
            raise CheckpointError(f"{file} was changed: its hash is wrong; it holds {_contents(index, name)}")


def _check_targets(path: Path, index: Index, targets: list[StateTensor], everywhere: set[str]) -> None:
    # Dtypes first: with another one for moments the checkpoint may also lack their scales, or have some.
    for target in targets:
        dtype = str(target.tensor.dtype).removeprefix("torch.")
        if target.name in index.tensors and index.tensors[target.name].dtype != dtype:
            raise CheckpointError(
                f"{path}: the tensor {target.name} has dtype {index.tensors[target.name].dtype}, this run needs "
                f"{dtype}; nothing is converted: memory.compute_dtype and the dtypes of optim must be as they were"
            )
    missing, unexpected = sorted(everywhere - index.tensors.keys()), sorted(index.tensors.keys() - everywhere)
    if missing or unexpected:
        found = []
        if missing:
            guesses = {name: difflib.get_close_matches(name, unexpected, n=1) for name in missing[:_SHOWN_NAMES]}
            hints = [f"{name} (did you mean {close[0]}?)" if close else name for name, close in guesses.items()]
            found.append(f"it lacks {_listed(hints, len(missing))}")
        if unexpected:
            found.append(f"this model lacks {_listed(unexpected, len(unexpected))}")
        raise CheckpointError(f"{path} does not fit this model: {'; '.join(found)}")
    for target in targets:
        stored = index.tensors[target.name]
        if stored.shape != tuple(target.global_shape):
            raise CheckpointError(
                f"{path}: the tensor {target.name} has shape {stored.shape}, this model needs {target.global_shape}"
            )
        if tuple(target.tensor.shape) != target.box.shape:
            raise CheckpointError(
                f"the target {target.name} has shape {tuple(target.tensor.shape)}, its box {target.box.shape}"
            )
        if not fits(target.box, stored.shape):
            raise CheckpointError(f"the target {target.name} at {target.box.offset} leaves its shape {stored.shape}")


def _contents(index: Index, file: str) -> str:
    names = [name for name, tensor in index.tensors.items() if any(box.file == file for box in tensor.boxes)]
    return _listed(names, len(names)) if names else "no tensor"


def _listed(names: list[str], total: int) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown} and {total - _SHOWN_NAMES} more" if total > _SHOWN_NAMES else shown
