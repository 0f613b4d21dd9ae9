"""The index: what it gives back, and what it refuses."""

import ast
import json
import math
import struct
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_parallel import Box
from moe_train.checkpoint.format import (
    INDEX,
    CheckpointError,
    Index,
    StoredBox,
    StoredFile,
    StoredTensor,
    intersection,
    read_index,
)


def stored(shape, *boxes, dtype="float32"):
    """A tensor of these boxes, each (offset, shape)."""
    placed = tuple(StoredBox(file="a", key="w", box=Box(offset, size)) for offset, size in boxes)
    return StoredTensor(shape=shape, dtype=dtype, boxes=placed)


def index_of(tensor=None, state=None):
    tensors = {} if tensor is None else {"w": tensor}
    return Index(tensors=tensors, files={"a": StoredFile(size_bytes=3, sha256="5")}, state=state or {})


def round_trip(tmp_path, index):
    (tmp_path / INDEX).write_text(index.to_json())
    return read_index(tmp_path)


def test_everything_comes_back_as_it_was(tmp_path):
    boxes = [((0, 0), (2, 5)), ((2, 0), (1, 5)), ((3, 0), (0, 5))]
    index = index_of(stored((3, 5), *boxes), {"a": [1, None, True, "ü\n\ud800"], "b": {"c": 2**80, "d": {}, "e": []}})
    found = round_trip(tmp_path, index)
    assert found == index
    assert [type(value) for value in found.state["a"]] == [int, type(None), bool, str]


def test_floats_of_the_state_come_back_bit_for_bit(tmp_path):
    floats = [0.1, -0.0, 1 / 3, 5e-324, 2.0**-1022, 1.7976931348623157e308, -1e16, 123456789.123456789, math.pi]
    found = round_trip(tmp_path, index_of(state={"x": floats})).state["x"]
    assert [struct.pack("<d", value) for value in found] == [struct.pack("<d", value) for value in floats]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [0.0, math.nan]}}, r"state\.a\.b\[1\] is nan"),
        ({"lr": -math.inf}, r"state\.lr is -inf"),
        ({"pair": (1, 2)}, r"state\.pair is a tuple"),
        ({"counts": {3: 1}}, r"state\.counts has the key 3"),
        ({"path": Path("x")}, r"state\.path is a .*Path"),
        ({"set": {1}}, r"state\.set is a set"),
    ],
)
def test_what_json_would_not_give_back_is_refused(state, message):
    with pytest.raises(CheckpointError, match=message):
        index_of(state=state).to_json()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (stored((4, 5), ((0, 0), (2, 5)), ((1, 0), (2, 5))), r"two boxes of the tensor w overlap at \(1, 0\)"),
        (stored((4, 5), ((0, 0), (4, 2)), ((0, 1), (4, 4))), r"overlap at \(0, 1\)"),
        (stored((4, 5), ((0, 0), (4, 5)), ((1, 1), (1, 1))), r"overlap at \(1, 1\)"),
        (stored((), ((), ()), ((), ())), "overlap"),
        (stored((4, 5), ((0, 0), (4, 3)), ((0, 0), (2, 5))), "overlap"),
        (stored((4, 5), ((0, 0), (2, 5)), ((3, 0), (1, 5))), "the boxes of the tensor w hold 15 of 20 elements"),
        (stored((4, 5)), "hold 0 of 20 elements"),
        (stored(()), "hold 0 of 1 elements"),
        (stored((4, 5), ((0, 0), (5, 4))), r"leaves its shape \(4, 5\)"),
        (stored((4, 5), ((0,), (20,))), "leaves its shape"),
        (stored((20,), ((0, 0), (4, 5))), "leaves its shape"),
    ],
)
def test_boxes_that_do_not_tile_their_tensor_are_refused(tensor, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        round_trip(tmp_path, index_of(tensor))
    assert str(tmp_path / INDEX) in str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        stored((4, 6), ((2, 0), (2, 3)), ((0, 0), (2, 6)), ((2, 3), (2, 3))),
        stored((4, 6), ((0, 0), (4, 1)), ((0, 1), (1, 5)), ((1, 1), (3, 5))),
        stored((3,), ((0,), (1,)), ((1,), (0,)), ((1,), (2,)), ((3,), (0,))),
        stored((0, 3), ((0, 0), (0, 3)), ((0, 0), (0, 3))),
        stored((0, 3)),
        stored((), ((), ())),
        stored((2000, 2), *(((row, 0), (1, 2)) for row in range(2000))),
    ],
)
def test_boxes_that_tile_their_tensor_are_accepted(tensor, tmp_path):
    assert round_trip(tmp_path, index_of(tensor)).tensors["w"] == tensor


def test_intersection():
    assert intersection(Box((0, 2), (4, 4)), Box((3, 0), (4, 3))) == Box((3, 2), (1, 1))
    assert intersection(Box((0, 2), (4, 4)), Box((4, 2), (1, 4))) is None
    assert intersection(Box((0,), (4,)), Box((2,), (0,))) is None
    assert intersection(Box((), ()), Box((), ())) == Box((), ())


def test_a_changed_byte_anywhere_is_noticed_or_means_nothing(tmp_path):
    index = index_of(stored((3, 5), ((0, 0), (3, 5))), {"lr": 0.1, "name": "x", "counts": [1, 23]})
    text = index.to_json().encode()
    unnoticed = 0
    for position in range(len(text)):
        (tmp_path / INDEX).write_bytes(text[:position] + bytes([text[position] ^ 1]) + text[position + 1 :])
        try:
            found = read_index(tmp_path)
        except CheckpointError as error:
            message = str(error)
        else:
            assert found == index
            message = INDEX
            unnoticed += 1
        assert INDEX in message
    # White space: no more than the indentation.
    assert unnoticed <= text.count(b" ") + text.count(b"\n")


@pytest.mark.parametrize("length", [0, 1, 40, -40, -1])
def test_a_truncated_index_is_noticed(length, tmp_path):
    text = index_of(stored((3, 5), ((0, 0), (3, 5)))).to_json()
    (tmp_path / INDEX).write_text(text[:length])
    with pytest.raises(CheckpointError, match=INDEX):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "garbage",
    [b"\x80\x04garbage", b"[1, 2]", b"null", b"{}", b'{"version": 1}', b"[" * 100_000, b"\xff\xfe{}", b'"text"'],
)
def test_garbage_is_noticed(garbage, tmp_path):
    (tmp_path / INDEX).write_bytes(garbage)
    with pytest.raises(CheckpointError, match=INDEX):
        read_index(tmp_path)


def test_a_missing_index_is_noticed(tmp_path):
    with pytest.raises(CheckpointError, match=INDEX):
        read_index(tmp_path)


def test_another_version_is_refused_and_both_are_named(tmp_path):
    content = json.loads(index_of().to_json()) | {"version": 2, "written_by": "moe-train 0.7.3"}
    (tmp_path / INDEX).write_text(json.dumps(content))
    message = r"index\.json has format version 2, this release reads 1; it was written by moe-train 0\.7\.3"
    with pytest.raises(CheckpointError, match=message):
        read_index(tmp_path)


def test_a_tensor_in_a_file_that_is_not_listed_is_refused(tmp_path):
    index = replace(index_of(stored((3,), ((0,), (3,)))), files={})
    with pytest.raises(CheckpointError, match="w lies in a, which is not listed"):
        round_trip(tmp_path, index)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "b/a", "..", ""])
def test_files_outside_the_folder_are_refused(name, tmp_path):
    index = replace(index_of(), files={name: StoredFile(size_bytes=1, sha256="0")})
    with pytest.raises(CheckpointError, match="no name of a file"):
        round_trip(tmp_path, index)


@pytest.mark.parametrize("package", ["moe_parallel", "moe_kernels", "moe_comm", "moe_memory", "moe_train"])
def test_nothing_is_read_with_pickle(package):
    """No module imports pickle or calls torch.load or torch.save, under whatever name.

    Forked ranks hand their results to the process that forked them by pickle, as `multiprocessing` does; no file.
    """
    folder = Path(find_spec(package).origin).parent
    files = [file for file in folder.rglob("*.py") if (package, file.name) != ("moe_parallel", "forked.py")]
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = [f"{node.value.id}.{node.attr}"]
            for name in names:
                assert name.split(".")[0] not in {"pickle", "cPickle", "dill", "cloudpickle", "joblib"}, file
                assert name not in {"torch.load", "torch.save", "np.load", "numpy.load"}, file
