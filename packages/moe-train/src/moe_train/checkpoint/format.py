"""The checkpoint format: safetensors shards, and one `index.json` that says what is in them and how to know it is whole.

    step-00000040/
        index.json                 version, table of tensors, size and sha256 of every file, all other state
        rank-00000-00000.safetensors

A tensor is global: a name, a shape, a dtype, and boxes that tile it exactly, each stored under a key of a file. So any
layout of ranks can read what any other wrote. Nothing is ever read with pickle.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from moe_parallel import Box
from moe_train.errors import MoeTrainError

FORMAT_VERSION = 1
INDEX = "index.json"


class CheckpointError(MoeTrainError):
    """A checkpoint is damaged, incomplete or does not fit; the message names the file, and the tensor if known."""


@dataclass(frozen=True, kw_only=True)
class StoredBox:
    """Where one box of a tensor lies."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One global tensor. `dtype` is torch's name without `torch.`."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What a file must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of `index.json`."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    state: dict[str, Any]

    def to_json(self) -> str:
        """Serialised; floats come back bit for bit.

        Raises:
            CheckpointError: the state holds a NaN, an infinity, or something that is no JSON value.
        """
        content = {
            "version": FORMAT_VERSION,
            "tensors": {
                name: {
                    "shape": tensor.shape,
                    "dtype": tensor.dtype,
                    "boxes": [
                        {"file": b.file, "key": b.key, "offset": b.box.offset, "shape": b.box.shape}
                        for b in tensor.boxes
                    ],
                }
                for name, tensor in self.tensors.items()
            },
            "files": {name: vars(file) for name, file in self.files.items()},
            "state": self.state,
        }
        try:
            return json.dumps(content, allow_nan=False, indent=1)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state cannot be written as JSON: {error}") from error


def read_index(path: Path) -> Index:
    """Read the index of a checkpoint folder and check that its table is sound.

    Raises:
        CheckpointError: the file is missing, cut off, malformed, of another version, or its boxes tile no tensor.
    """
    file = path / INDEX
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        version = content["version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{file} has format version {version}, this release reads {FORMAT_VERSION}")
        index = Index(
            tensors={name: _tensor(entry) for name, entry in content["tensors"].items()},
            files={
                name: StoredFile(size_bytes=entry["size_bytes"], sha256=entry["sha256"])
                for name, entry in content["files"].items()
            },
            state=dict(content["state"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is malformed: {type(error).__name__}: {error}") from error
    for name, tensor in index.tensors.items():
        _check_tiling(file, name, tensor)
        for stored in tensor.boxes:
            if stored.file not in index.files:
                raise CheckpointError(f"{file}: the tensor {name} lies in {stored.file}, which is not listed")
    return index


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    boxes = tuple(
        StoredBox(file=b["file"], key=b["key"], box=Box(tuple(map(int, b["offset"])), tuple(map(int, b["shape"]))))
        for b in entry["boxes"]
    )
    return StoredTensor(shape=tuple(map(int, entry["shape"])), dtype=str(entry["dtype"]), boxes=boxes)


def _check_tiling(file: Path, name: str, tensor: StoredTensor) -> None:
    boxes = [stored.box for stored in tensor.boxes]
    for box in boxes:
        ends = [offset + size for offset, size in zip(box.offset, box.shape, strict=True)]
        outside = len(ends) != len(tensor.shape) or min(box.offset, default=0) < 0
        if outside or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise CheckpointError(f"{file}: a box of the tensor {name} at {box.offset} leaves its shape {tensor.shape}")
    for i, first in enumerate(boxes):
        for second in boxes[:i]:
            common = intersection(first, second)
            if common is not None and prod(common.shape) > 0:
                raise CheckpointError(f"{file}: two boxes of the tensor {name} overlap at {common.offset}")
    covered = sum(prod(box.shape) for box in boxes)
    if covered != prod(tensor.shape):
        raise CheckpointError(f"{file}: the boxes of the tensor {name} hold {covered} of {prod(tensor.shape)} elements")


def intersection(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of one tensor; None where there is none in some dim."""
    starts = tuple(map(max, zip(first.offset, second.offset, strict=True)))
    ends = tuple(
        min(a + n, b + m) for a, n, b, m in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
