"""Saving: exact, complete or absent, and nothing that is not needed stays or goes."""

import json
import os

import pytest
import torch

from moe_memory.data_parallel import StateTensor
from moe_parallel import Box
from moe_train._version import __version__
from moe_train.checkpoint import save as save_module
from moe_train.checkpoint.format import INDEX, CheckpointError, read_index
from moe_train.checkpoint.load import latest_checkpoint, load_tensors, verify
from moe_train.checkpoint.save import checkpoint_name, complete_checkpoints, save_checkpoint


def part(name, tensor, box=None, global_shape=None):
    shape = tuple(tensor.shape)
    return StateTensor(name=name, global_shape=global_shape or shape, box=box or Box.whole(shape), tensor=tensor)


def parts(tensors):
    return [part(name, tensor) for name, tensor in tensors.items()]


def read_back(path, like):
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    load_tensors(path, parts(found))
    return found


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.dim() else bits(tensor.view(1))


def every_kind_of_tensor():
    flat = torch.randn(64)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    return {
        "fp32": torch.randn(3, 5),
        "bf16": torch.randn(2, 7).bfloat16(),
        "fp16": torch.randn(4).half(),
        "fp64": torch.randn(2, 3, 2, dtype=torch.float64),
        "int64": torch.tensor([-(2**62), 0, 2**62 + 1]),
        "int32": torch.arange(3, dtype=torch.int32),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([[True, False], [False, False]]),
        "scalar": torch.randn(()),
        "int scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "empty inside": torch.zeros(2, 0, 3, dtype=torch.bfloat16),
        "special": special,
        "view/a": flat[:12].view(3, 4),
        "view/b": flat[16:17].view(()),
        "view/c": flat[32:62].view(5, 6),
        "transposed": torch.randn(3, 4).t(),
        "strided": torch.randn(10)[::3],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


@pytest.mark.parametrize("shard_bytes", [1, 100, 2**30])
def test_every_kind_of_tensor_comes_back_bit_for_bit(shard_bytes, tmp_path):
    tensors = every_kind_of_tensor()
    path = save_checkpoint(tmp_path, 3, parts(tensors), {"step": 3}, shard_bytes=shard_bytes)
    assert path == tmp_path / checkpoint_name(3)
    found = read_back(path, {name: tensor.detach() for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert bits(found[name]) == bits(tensor.detach()), name
    assert verify(path).state == {"step": 3}


@pytest.mark.parametrize(
    ("shard_bytes", "expected"),
    [(1, [["a"], ["b"], ["c"], ["d"]]), (80, [["a", "b"], ["c", "d"]]), (81, [["a", "b", "c"], ["d"]]), (10**6, None)],
)
def test_the_shard_size_splits_files(shard_bytes, expected, tmp_path):
    tensors = {name: torch.randn(10) for name in "abcd"}
    index = read_index(save_checkpoint(tmp_path, 1, parts(tensors), {}, shard_bytes=shard_bytes))
    files = {}
    for name, tensor in index.tensors.items():
        files.setdefault(tensor.boxes[0].file, []).append(name)
    assert list(files.values()) == (expected or [["a", "b", "c", "d"]])
    assert list(files) == list(index.files) == [f"rank-00000-{i:05d}.safetensors" for i in range(len(files))]


def test_parts_are_taken_shard_by_shard(tmp_path, monkeypatch):
    """An engine may make its parts one by one; those of one shard are alive together, not all."""
    events = []
    inner = save_module.save_file

    def save_file(content, file):
        events.append("file")
        inner(content, file)

    def one_by_one():
        for number in range(4):
            events.append(number)
            yield part(str(number), torch.zeros(10))

    monkeypatch.setattr(save_module, "save_file", save_file)
    save_checkpoint(tmp_path, 1, one_by_one(), {}, shard_bytes=80)
    assert events == [0, 1, "file", 2, 3, "file"]


def test_r100_changing_a_tensor_after_the_save_changes_no_file(tmp_path):
    weight = torch.ones(4)
    state = {"seen": [1]}
    path = save_checkpoint(tmp_path, 1, [part("w", weight)], state)
    weight.fill_(2)
    state["seen"].append(2)
    assert read_back(path, {"w": weight})["w"].tolist() == [1.0] * 4
    assert read_index(path).state == {"seen": [1]}


def test_no_tensor_at_all_is_a_checkpoint_too(tmp_path):
    path = save_checkpoint(tmp_path, 1, [], {"a": 1})
    assert verify(path).state == {"a": 1}
    load_tensors(path, [])


def tree(directory):
    return {path.relative_to(directory): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def interrupted():
    yield part("a", torch.zeros(3))
    raise KeyboardInterrupt("by hand")


@pytest.mark.parametrize(
    ("tensors", "state", "error", "message"),
    [
        ([part("a", torch.zeros(3))], {"x": float("nan")}, CheckpointError, "state.x is nan"),
        ([part("a", torch.zeros(3))], {"x": torch.zeros(1)}, CheckpointError, "state.x is a Tensor"),
        ([part("a", torch.zeros(3)), part("a", torch.zeros(3))], {}, CheckpointError, "a was given twice"),
        ([part("a", torch.zeros(3), Box((0,), (2,)))], {}, CheckpointError, r"a has shape \(3,\), its box \(2,\)"),
        ([part("a", torch.zeros(3), Box((0,), (3,)), (4,))], {}, CheckpointError, "a hold 3 of 4 elements"),
        ([part("a", torch.zeros(3), Box((2,), (3,)), (4,))], {}, CheckpointError, "a at .* leaves its shape"),
        (None, {}, KeyboardInterrupt, "by hand"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [1, 10**6])
def test_a_save_that_fails_leaves_nothing_behind(tensors, state, error, message, shard_bytes, tmp_path):
    tensors = interrupted() if tensors is None else tensors
    save_checkpoint(tmp_path, 1, [part("w", torch.ones(2))], {})
    before = tree(tmp_path)
    with pytest.raises(error, match=message):
        save_checkpoint(tmp_path, 2, tensors, state, shard_bytes=shard_bytes)
    assert tree(tmp_path) == before


def test_two_names_of_one_memory_are_refused(tmp_path):
    weight = torch.randn(4)
    with pytest.raises(
        CheckpointError, match=r"rank-00000-00000\.safetensors cannot be written: Some tensors share memory"
    ):
        save_checkpoint(tmp_path, 1, [part("a", weight), part("b", weight)], {})
    assert tree(tmp_path) == {}


def test_a_full_disk_is_an_error_that_names_the_checkpoint(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be written: .*No space left on device"):
        save_checkpoint(tmp_path, 1, [part("a", torch.zeros(3))], {})
    assert tree(tmp_path) == {}


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step-00000001 cannot be written"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, [], {})


def test_a_step_is_never_saved_twice(tmp_path):
    save_checkpoint(tmp_path, 5, [part("w", torch.ones(2))], {})
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="step-00000005 exists already"):
        save_checkpoint(tmp_path, 5, [part("w", torch.zeros(2))], {})
    assert tree(tmp_path) == before


def saved_steps(directory):
    return [path.name for path in complete_checkpoints(directory)]


@pytest.mark.parametrize(("keep", "expected"), [(1, [9]), (2, [4, 9]), (3, [3, 4, 9]), (None, [1, 3, 4, 9])])
def test_keep_removes_the_oldest(keep, expected, tmp_path):
    for step in (1, 3, 4, 9):
        save_checkpoint(tmp_path, step, [part("w", torch.full((2,), float(step)))], {}, keep=keep)
        assert latest_checkpoint(tmp_path) == tmp_path / checkpoint_name(step)
    assert saved_steps(tmp_path) == [checkpoint_name(step) for step in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == saved_steps(tmp_path)
    for step in expected:
        assert read_back(tmp_path / checkpoint_name(step), {"w": torch.zeros(2)})["w"].tolist() == [float(step)] * 2


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep, tmp_path):
    save_checkpoint(tmp_path, 1, [], {})
    with pytest.raises(CheckpointError, match="at least one checkpoint has to stay"):
        save_checkpoint(tmp_path, 2, [], {}, keep=keep)
    assert saved_steps(tmp_path) == [checkpoint_name(1)]


def test_pruning_never_removes_the_checkpoint_just_written(tmp_path):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, [], {})
    path = save_checkpoint(tmp_path, 5, [part("w", torch.ones(1))], {}, keep=1)
    assert verify(path)
    assert saved_steps(tmp_path) == [checkpoint_name(5), checkpoint_name(20)]


def test_nothing_is_removed_before_the_new_checkpoint_is_durable(tmp_path, monkeypatch):
    """In order: files, index, their folder, the rename, the directory; only then does the old one lose its name."""
    save_checkpoint(tmp_path, 1, [part("w", torch.ones(1))], {})
    events = []
    real = {"fsync": os.fsync, "rename": os.rename}

    def fsync(descriptor):
        events.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        real["fsync"](descriptor)

    def rename(old, new):
        events.append(f"rename {old.name} {new.name}")
        real["rename"](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(save_module.shutil, "rmtree", lambda path: events.append(f"remove {path.name}"))
    save_checkpoint(tmp_path, 2, parts({"a": torch.ones(9), "b": torch.ones(9)}), {}, keep=1, shard_bytes=1)
    new = ".unfinished-step-00000002"
    assert events == [
        f"sync {new}/rank-00000-00000.safetensors",
        f"sync {new}/rank-00000-00001.safetensors",
        f"sync {new}/{INDEX}",
        f"sync {new}",
        f"rename {new} step-00000002",
        "sync .",
        "rename step-00000001 .unfinished-step-00000001",
        "sync .",
        "remove .unfinished-step-00000001",
    ]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_hide_that_the_new_one_is_complete(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, [], {})

    def busy(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(save_module.shutil, "rmtree", busy)
    with pytest.raises(CheckpointError, match=r"step-00000002 is complete, but .*step-00000001 cannot be removed"):
        save_checkpoint(tmp_path, 2, [], {}, keep=1)
    monkeypatch.undo()
    assert saved_steps(tmp_path) == [checkpoint_name(2)]
    save_checkpoint(tmp_path, 3, [], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(2), checkpoint_name(3)]


def test_what_dead_runs_left_is_removed_and_what_is_not_ours_stays(tmp_path):
    stale = tmp_path / ".unfinished-step-00000007"
    (stale / "deep").mkdir(parents=True)
    (stale / "deep" / "rank-00000-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished-step-00000008").write_text("a file")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("data")
    (tmp_path / ".unfinished-step-00000009").symlink_to(elsewhere)
    (tmp_path / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path, 7, [part("w", torch.ones(1))], {}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000007"]
    assert (elsewhere / "precious").read_text() == "data"


def test_only_whole_names_with_an_index_are_checkpoints(tmp_path):
    save_checkpoint(tmp_path, 2, [], {})
    save_checkpoint(tmp_path, 123_456_789, [], {})
    save_checkpoint(tmp_path, 99_999_999, [], {})
    content = (tmp_path / checkpoint_name(2) / INDEX).read_text()
    for name in ("step-00000003.bak", "step-copy", "step-3", ".unfinished-step-00000900", "xstep-00000009"):
        (tmp_path / name).mkdir()
        (tmp_path / name / INDEX).write_text(content)
    (tmp_path / "step-00000901").mkdir()
    (tmp_path / "step-00000902").write_text("a file")
    assert saved_steps(tmp_path) == ["step-00000002", "step-99999999", "step-123456789"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-123456789"
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_the_index_is_readable_without_this_program(tmp_path):
    path = save_checkpoint(tmp_path, 1, [part("w", torch.ones(2, 3, dtype=torch.bfloat16))], {"lr": 0.5})
    content = json.loads((path / INDEX).read_text())
    assert content["tensors"]["w"] == {
        "shape": [2, 3],
        "dtype": "bfloat16",
        "boxes": [{"file": "rank-00000-00000.safetensors", "key": "w", "offset": [0, 0], "shape": [2, 3]}],
    }
    assert content["files"]["rank-00000-00000.safetensors"]["size_bytes"] == os.path.getsize(
        path / "rank-00000-00000.safetensors"
    )
    assert content["state"] == {"lr": 0.5}
    assert content["version"] == 1
    assert content["written_by"] == f"moe-train {__version__}"
