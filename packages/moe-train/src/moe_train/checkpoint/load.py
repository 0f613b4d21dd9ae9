"""Loading: everything is checked before anything is changed."""

import difflib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_memory.data_parallel import StateTensor
from moe_parallel import Box
from moe_train.checkpoint.format import CheckpointError, Index, StoredTensor, intersection, read_index as read_index
from moe_train.checkpoint.save import complete_checkpoints, describe_file


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
    for name, expected in index.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; it holds {_contents(index, name)}")
        found = describe_file(file)
        if found.size_bytes != expected.size_bytes:
            raise CheckpointError(
                f"{file} has {found.size_bytes} bytes, not {expected.size_bytes}; it holds {_contents(index, name)}"
            )
        if found.sha256 != expected.sha256:
            raise CheckpointError(f"{file} was changed: its hash is wrong; it holds {_contents(index, name)}")
    return index


def load_tensors(path: Path, targets: Iterable[StateTensor]) -> None:
    """Fill the targets, whatever boxes of the tensors they are, from a checkpoint of any layout.

    Raises:
        CheckpointError: damage, a tensor that is missing here or there, another shape or dtype. No target was changed.
    """
    targets = list(targets)
    index = verify(path)
    _check_names(path, index, {target.name for target in targets})
    for target in targets:
        stored = index.tensors[target.name]
        if stored.shape != target.global_shape:
            raise CheckpointError(
                f"{path}: the tensor {target.name} has shape {stored.shape}, this model needs {target.global_shape}"
            )
        dtype = str(target.tensor.dtype).removeprefix("torch.")
        if stored.dtype != dtype:
            raise CheckpointError(f"{path}: the tensor {target.name} has dtype {stored.dtype}, this run needs {dtype}")
    # Read all of it before the first copy: a file that cannot be parsed must not leave half of the targets changed.
    loaded = [(target, _read(path, index.tensors[target.name], target.box)) for target in targets]
    with torch.no_grad():
        for target, pieces in loaded:
            for box, values in pieces:
                target.tensor[_slices(box, target.box)].copy_(values)


def _read(path: Path, stored: StoredTensor, wanted: Box) -> list[tuple[Box, Tensor]]:
    pieces = []
    for part in stored.boxes:
        common = intersection(part.box, wanted)
        if common is None:
            continue
        try:
            with safe_open(path / part.file, framework="pt") as file:
                values = file.get_tensor(part.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path / part.file}: the tensor {part.key} cannot be read: {error}") from error
        if tuple(values.shape) != part.box.shape or str(values.dtype) != f"torch.{stored.dtype}":
            raise CheckpointError(
                f"{path / part.file}: {part.key} is {tuple(values.shape)} {values.dtype}, the index says "
                f"{part.box.shape} {stored.dtype}"
            )
        pieces.append((common, values[_slices(common, part.box)]))
    return pieces


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(box.offset, inside.offset, box.shape, strict=True)
    )


def _check_names(path: Path, index: Index, wanted: set[str]) -> None:
    missing, unexpected = sorted(wanted - index.tensors.keys()), sorted(index.tensors.keys() - wanted)
    if not missing and not unexpected:
        return
    lines = []
    for name in missing:
        close = difflib.get_close_matches(name, unexpected, n=1)
        lines.append(f"missing there: {name}" + (f" (it has {close[0]})" if close else ""))
    lines += [f"unknown here: {name}" for name in unexpected]
    raise CheckpointError(f"{path} does not fit this model: " + "; ".join(lines))


def _contents(index: Index, file: str) -> str:
    names = [name for name, tensor in index.tensors.items() if any(box.file == file for box in tensor.boxes)]
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more tensors" if len(names) > 5 else shown or "no tensor"
