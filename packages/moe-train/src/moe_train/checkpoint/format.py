"""The checkpoint format: safetensors shards, and an `index.json` that says what is in them and whether they are whole.

    step-00000040/
        index.json                 table of tensors, size and sha256 of every file, all other state, its own sha256,
                               versions of the format and of the program that wrote it
        rank-00000-00000.safetensors

A tensor is global: a name, a shape, a dtype, and boxes that tile it exactly, each stored under a key of a file. So any
layout of ranks can read what any other wrote. Nothing is ever read with pickle.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

from moe_parallel import Box
from moe_train._version import __version__
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
    """The contents of `index.json`; `written_by` is for people, and nothing is decided by it."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    state: dict[str, Any]
    written_by: str = f"moe-train {__version__}"

    def to_json(self) -> str:
        """Serialised, with the hash of the rest; what is read back is equal, floats bit for bit.

        Raises:
            CheckpointError: the state holds something that JSON does not give back as it was.
        """
        check_state(self.state)
        content = {
            "version": FORMAT_VERSION,
            "written_by": self.written_by,
            "tensors": table_to_json(self.tensors),
            "files": {name: vars(file) for name, file in self.files.items()},
            "state": self.state,
        }
        return json.dumps({"sha256": _hash(content), **content}, allow_nan=False, indent=1)


def table_to_json(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """A table of tensors as JSON values; `table_from_json` is its inverse."""
    return {
        name: {
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "boxes": [
                {"file": b.file, "key": b.key, "offset": b.box.offset, "shape": b.box.shape} for b in tensor.boxes
            ],
        }
        for name, tensor in tensors.items()
    }


def table_from_json(content: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """A table of tensors from JSON values.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: they are no such table.
    """
    return {name: _tensor(entry) for name, entry in content.items()}


def files_from_json(content: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Files from JSON values; `vars` of each is its inverse. Raises as `table_from_json`."""
    return {name: StoredFile(size_bytes=e["size_bytes"], sha256=e["sha256"]) for name, e in content.items()}


def merge_tables(tables: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The table of all ranks from that of each: the boxes of a tensor together.

    Raises:
        CheckpointError: ranks disagree on the shape or dtype of a tensor.
    """
    merged: dict[str, StoredTensor] = {}
    for table in tables:
        for name, tensor in table.items():
            known = merged.setdefault(name, replace(tensor, boxes=()))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                found = f"{known.shape} {known.dtype} and {tensor.shape} {tensor.dtype}"
                raise CheckpointError(f"ranks disagree on the tensor {name}: {found}")
            merged[name] = replace(known, boxes=known.boxes + tensor.boxes)
    return merged


def check_state(value: object, where: str = "state") -> None:
    """Refuse what JSON does not give back as it was.

    Raises:
        CheckpointError: it names the place of a value that is not finite, of a tuple, a key that is no text, a tensor.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; keys of the state are text")
            check_state(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_state(item, f"{where}[{index}]")
    elif isinstance(value, float):
        if not isfinite(value):
            raise CheckpointError(f"{where} is {value}; numbers of the state are finite")
    elif value is not None and not isinstance(value, (bool, int, str)):
        raise CheckpointError(f"{where} is a {type(value).__name__}; the state holds JSON values, in dicts and lists")


def read_index(path: Path) -> Index:
    """Read the index of a checkpoint folder and check that it is as it was written and its table is sound.

    Raises:
        CheckpointError: the file is missing, cut off, changed, malformed or of another version, or the boxes of a
            tensor do not tile it.
    """
    file = path / INDEX
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        version, written = content.pop("version"), content.pop("sha256")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{file} has format version {version!r}, this release reads {FORMAT_VERSION}; "
                f"it was written by {content.get('written_by')}"
            )
        if written != _hash({"version": version, **content}):
            raise CheckpointError(f"{file} was changed after it was written: its hash is wrong")
        index = Index(
            tensors=table_from_json(content["tensors"]),
            files=files_from_json(content["files"]),
            state=dict(content["state"]),
            written_by=str(content["written_by"]),
        )
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is malformed: {type(error).__name__}: {error}") from error
    for name in index.files:
        if Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{file}: {name!r} is no name of a file in this folder")
    for name, tensor in index.tensors.items():
        _check_tiling(file, name, tensor)
        for stored in tensor.boxes:
            if stored.file not in index.files:
                raise CheckpointError(f"{file}: the tensor {name} lies in {stored.file}, which is not listed")
    return index


def _hash(content: dict[str, Any]) -> str:
    """Of the content and not of the text, so that the file may hold it."""
    text = json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    boxes = tuple(
        StoredBox(file=str(b["file"]), key=str(b["key"]), box=Box(_sizes(b["offset"]), _sizes(b["shape"])))
        for b in entry["boxes"]
    )
    return StoredTensor(shape=_sizes(entry["shape"]), dtype=str(entry["dtype"]), boxes=boxes)


def _sizes(values: list[Any]) -> tuple[int, ...]:
    if any(not isinstance(value, int) or value < 0 for value in values):
        raise ValueError(f"{values} are no sizes")
    return tuple(values)


def _check_tiling(file: Path, name: str, tensor: StoredTensor) -> None:
    boxes = sorted((stored.box for stored in tensor.boxes), key=lambda box: box.offset)
    for box in boxes:
        if not fits(box, tensor.shape):
            raise CheckpointError(f"{file}: a box of the tensor {name} at {box.offset} leaves its shape {tensor.shape}")
    # Boxes come in the order of dim 0, so a box can only overlap those that reach its start there: with one row of
    # boxes per rank this is a pass, not all pairs.
    reaching: list[Box] = []
    for box in boxes:
        reaching = [other for other in reaching if _ends(other)[:1] >= box.offset[:1]]
        for other in reaching:
            common = intersection(box, other)
            if common is not None:
                raise CheckpointError(f"{file}: two boxes of the tensor {name} overlap at {common.offset}")
        reaching.append(box)
    covered = sum(prod(box.shape) for box in boxes)
    if covered != prod(tensor.shape):
        raise CheckpointError(f"{file}: the boxes of the tensor {name} hold {covered} of {prod(tensor.shape)} elements")


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(box.offset, box.shape, strict=True))


def fits(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box lies within a tensor of this shape."""
    return len(box.shape) == len(shape) and all(map(operator.le, _ends(box), shape))


def intersection(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of one tensor; None where they have no element in common."""
    starts = tuple(map(max, zip(first.offset, second.offset, strict=True)))
    ends = tuple(map(min, zip(_ends(first), _ends(second), strict=True)))
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
