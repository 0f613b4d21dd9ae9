"""SIGKILL at every file operation of a save: what was complete before stays, or what is complete after is there."""

import os
import signal
import sys
import time

import pytest
import torch

from moe_memory.data_parallel import StateTensor
from moe_parallel import Box
from moe_train.checkpoint import save as save_module
from moe_train.checkpoint.format import INDEX
from moe_train.checkpoint.load import latest_checkpoint, load_tensors, verify
from moe_train.checkpoint.save import checkpoint_name, save_checkpoint

WATCHED = {
    *("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.unlink"),
    *("os.listdir", "os.scandir", "shutil.rmtree", "shutil.move", "glob.glob", "pathlib.Path.glob"),
}
LIMIT_S = 30
NAMES = ("master/a", "master/b", "exp_avg/a")
SHAPES = ((5, 3), (), (4,))


def parts(fill):
    """Three tensors in three shards; the values of each checkpoint are its own."""
    values = [torch.full(shape, fill + number / 4) for number, shape in enumerate(SHAPES)]
    return [
        StateTensor(name=name, global_shape=tuple(value.shape), box=Box.whole(tuple(value.shape)), tensor=value)
        for name, value in zip(NAMES, values, strict=True)
    ]


def save(directory, step):
    return save_checkpoint(directory, step, parts(step), {"step": step}, keep=1, shard_bytes=1)


def assert_loads_exactly(path, step):
    assert verify(path).state == {"step": step}
    targets = parts(-1)
    load_tensors(path, targets)
    for target, expected in zip(targets, parts(step), strict=True):
        assert torch.equal(target.tensor, expected.tensor)


def run_child(action):
    """Run `action` in a forked child; minus the signal that ended it, else 0. It never outlives the limit."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the child did not end within {LIMIT_S} s")


def inside(directory, event, args):
    """Whether an operation concerns the directory. With `dir_fd`, as in rmtree, names are relative to a descriptor."""
    root = str(directory)
    if any(str(arg).startswith(root) for arg in args if isinstance(arg, (str, os.PathLike))):
        return True
    descriptors = [arg for arg in args if isinstance(arg, int) and arg > 2]
    if event in {"os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir"}:
        for descriptor in descriptors:
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(root):
                    return True
            except OSError:
                continue
    return False


def killed_save(directory, step, number):
    """Save in a child that kills itself just before its `number`-th operation; whether it was killed."""

    def action():
        seen = 0

        def hook(event, args):
            nonlocal seen
            if event in WATCHED and inside(directory, event, args):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save(directory, step)

    code = run_child(action)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_every_operation_the_newest_complete_checkpoint_loads(tmp_path):
    """With keep = 1, so that the old checkpoint is removed in the same save."""
    old, new, both = 0, 0, 0
    number = 0
    killed = True
    while killed:
        number += 1
        directory = tmp_path / str(number)
        save(directory, 1)
        killed = killed_save(directory, 2, number)
        path = latest_checkpoint(directory)
        assert path in (directory / checkpoint_name(1), directory / checkpoint_name(2)), number
        step = int(path.name[-1])
        assert_loads_exactly(path, step)
        if killed:
            old, new = old + (step == 1), new + (step == 2)
            both += len(list(directory.glob("step-*"))) == 2
        # The next save works, whichever step it is, and leaves nothing of the dead one.
        save(directory, step + 1)
        assert [path.name for path in directory.iterdir()] == [checkpoint_name(step + 1)]
        assert_loads_exactly(directory / checkpoint_name(step + 1), step + 1)
    # What this proves: kills before the rename, between rename and removal, and inside the removal.
    assert old > 10
    assert both > 0
    assert new - both > 4
    assert number > 20


def test_killed_at_every_operation_of_the_first_save(tmp_path):
    number = 0
    killed = True
    while killed:
        number += 1
        directory = tmp_path / str(number) / "checkpoints"
        killed = killed_save(directory, 1, number)
        path = latest_checkpoint(directory)
        if path is None:
            assert killed
            path = save(directory, 1)
        assert_loads_exactly(path, 1)
    assert number > 10


@pytest.mark.parametrize("moment", ["in a shard", "in the index", "after the index"])
def test_killed_in_the_middle_of_a_file(moment, tmp_path, monkeypatch):
    """Half a file is on the disk. The library that writes shards raises no audit events, so it dies here."""

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_shard(content, file):
        inner(content, file)
        if file.name.endswith("00001.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
            die()

    def half_an_index(folder, index):
        (folder / INDEX).write_text(index.to_json()[:99])
        die()

    inner = save_module.save_file
    if moment == "in a shard":
        monkeypatch.setattr(save_module, "save_file", half_a_shard)
    elif moment == "in the index":
        monkeypatch.setattr(save_module, "write_index", half_an_index)
    else:
        monkeypatch.setattr(save_module, "read_index", die)
    assert run_child(lambda: save(tmp_path, 2)) == -signal.SIGKILL
    assert latest_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == [tmp_path / f".unfinished-{checkpoint_name(2)}"]
    monkeypatch.undo()
    assert_loads_exactly(save(tmp_path, 2), 2)
    assert list(tmp_path.iterdir()) == [tmp_path / checkpoint_name(2)]


def test_killed_twice_at_many_pairs_of_operations(tmp_path):
    """A save that cleans up after a dead one dies too."""
    for first in range(3, 30, 6):
        for second in range(2, 30, 5):
            directory = tmp_path / f"{first}-{second}"
            save(directory, 1)
            for step, number in ((2, first), (3, second)):
                newest = int(latest_checkpoint(directory).name[-1])
                if newest < step:
                    killed_save(directory, step, number)
            assert_loads_exactly(latest_checkpoint(directory), int(latest_checkpoint(directory).name[-1]))
            save(directory, 4)
            assert [path.name for path in directory.iterdir()] == [checkpoint_name(4)]
