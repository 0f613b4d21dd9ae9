"""What autograd keeps, by hand; and peak memory by phase."""

import gc
import mmap
import resource
import weakref
from pathlib import Path

import pytest
import torch

from moe_memory import LiveBytes, OptimConfig, PeakMemory, SavedBytes, Zero1
from moe_memory.measure import phases
from moe_memory.recompute import KEEP, RECOMPUTE, run_unit
from moe_parallel import AxisGroups, ShardSpec

CPU = torch.device("cpu")


def test_saved_bytes_of_a_small_graph_by_hand():
    """mul keeps both factors, relu its output, the second mul the same output and its factor; sum keeps nothing."""
    x, w = torch.randn(10, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    v = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    with SavedBytes() as saved:
        loss = ((x * w).relu() * v).sum()
    assert saved.total_bytes == 10 * 3 * 4 + 3 * 4 + 10 * 3 * 4 + 10 * 3 * 8
    assert saved.num_storages == 4
    with SavedBytes(exclude=[w, v]) as saved:
        ((x * w).relu() * v).sum()
    assert saved.total_bytes == 2 * 10 * 3 * 4
    loss.backward()
    expected = torch.autograd.grad(((x * w).relu() * v).sum(), [x, w, v])
    for tensor, gradient in zip((x, w, v), expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_views_of_one_storage_count_once_and_whole():
    base = torch.randn(100)
    scale = torch.ones(1, requires_grad=True)
    with SavedBytes(exclude=[scale]) as saved:
        _ = [(base[start : start + 10].view(2, 5) * scale) for start in range(0, 90, 10)]
    assert saved.total_bytes == 400
    assert saved.num_storages == 1


def test_parameters_in_a_bucket_are_excluded_through_any_of_them():
    model = torch.nn.Linear(6, 4)
    specs = {name: ShardSpec(name=name, shape=tuple(p.shape)) for name, p in model.named_parameters()}
    Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.bfloat16).wrap(model, specs)
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    with SavedBytes(exclude=model.parameters()) as saved:
        model(x)
    assert saved.total_bytes == 5 * 6 * 2


def test_an_address_that_is_used_again_counts_again():
    scale = torch.ones(1, requires_grad=True)
    with SavedBytes(exclude=[scale]) as saved:
        for _ in range(10):
            (torch.randn(1000) * scale).sum()
    assert saved.total_bytes == 40_000


def test_a_measured_graph_is_freed_with_its_last_reference():
    """exp keeps its own output; a node that held the very tensor would be a cycle that only the collector can free."""
    x = torch.randn(3, requires_grad=True)
    gc.disable()
    try:
        with SavedBytes() as saved:
            y = x.exp()
        assert saved.total_bytes == 3 * 4
        watched = weakref.ref(y)
        del y
        assert watched() is None
    finally:
        gc.enable()


def test_what_is_saved_lives_no_longer_than_its_graph():
    x = torch.randn(1000, requires_grad=True)
    with SavedBytes() as saved:
        y = x.exp()
        watched = weakref.ref(y.untyped_storage())
        y.sum().backward()
        del y
        assert watched() is None
    assert saved.total_bytes == 4000


def test_only_what_is_saved_inside_counts_and_each_opening_starts_anew():
    scale = torch.ones(1, requires_grad=True)
    saved = SavedBytes(exclude=[scale])
    for size in (10, 20):
        torch.randn(500) * scale
        with saved:
            torch.randn(size) * scale
        torch.randn(500) * scale
        assert saved.total_bytes == 4 * size
    with saved, torch.no_grad():
        torch.randn(500) * scale
    assert saved.total_bytes == 0


def deep_unit(replay, x):
    for _ in range(5):
        x = torch.tanh(x * x)
    return x


def test_full_recompute_keeps_only_the_input_of_each_unit():
    x = torch.randn(64, 32, requires_grad=True)
    size = x.numel() * 4
    found = {}
    for policy in (KEEP, RECOMPUTE):
        with SavedBytes() as saved:
            y = x
            for unit in range(3):
                y = run_unit(policy, str(unit), deep_unit, y)
        found[policy] = saved.total_bytes
        y.sum().backward()
    assert found[RECOMPUTE] == 3 * size
    # Plain: the input, and the output of each of 15 tanh, which is the factor of the next multiplication too.
    assert found[KEEP] == (1 + 3 * 5) * size


def test_live_bytes_of_a_few_operators_by_hand():
    before = torch.zeros(100)
    with LiveBytes(also=[before, before[10:]]) as live:
        assert live.live_bytes == live.peak_bytes == 400
        x = before + 1
        views = [x[:50], x.view(10, 10), *x.split(20)]
        assert live.live_bytes == 800
        y = (x * 2).double()
        assert live.live_bytes == 800 + 800
        assert live.peak_bytes == 800 + 400 + 800
        del y
        live.restart_peak()
        x.mul_(2)
        views[0].add_(1)
        assert live.live_bytes == live.peak_bytes == 800
        del x
        assert live.live_bytes == 800
        del views
        assert live.live_bytes == 400
    del before
    assert live.live_bytes == 0  # freed later


def test_live_bytes_see_the_backward():
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live:
        loss = x.exp().sum()
        assert live.live_bytes == 4000 + 4  # exp keeps its output
        loss.backward()
        assert live.live_bytes == 4000 + 4  # freed, and a gradient in its place
        assert live.peak_bytes >= 2 * 4000 + 4


requires_marks = pytest.mark.skipif(
    PeakMemory(CPU).source != "VmHWM of the phase", reason="the system cannot reset the high-water mark of a process"
)
MEBI = 2**20


def resident_bytes():
    """What the process has in memory now; the system may page out what is idle, so it drifts from phase to phase."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def risen_bytes(memory, name, size, within=None):
    """How far a phase that takes `size` bytes peaked above what was resident when it began.

    From the system, not from malloc, which may have kept what an earlier test has freed.
    """
    before = resident_bytes()
    with memory.phase(name), mmap.mmap(-1, size + 1) as pages:
        for start in range(0, size, resource.getpagesize()):
            pages[start] = 1
    return memory.peaks_bytes[name if within is None else f"{within}/{name}"] - before


@requires_marks
def test_peak_memory_sees_an_allocation_in_its_phase_and_not_after():
    memory = PeakMemory(CPU)
    assert abs(risen_bytes(memory, "before", 0)) < 10 * MEBI
    assert risen_bytes(memory, "large", 200 * MEBI) == pytest.approx(200 * MEBI, rel=0.1)
    assert abs(risen_bytes(memory, "after", 0)) < 10 * MEBI
    assert list(memory.peaks_bytes) == ["before", "large", "after"]


@requires_marks
def test_a_phase_that_occurs_again_keeps_its_latest_peak():
    memory = PeakMemory(CPU)
    assert risen_bytes(memory, "step", 100 * MEBI) == pytest.approx(100 * MEBI, rel=0.1)
    assert abs(risen_bytes(memory, "step", 0)) < 10 * MEBI
    assert risen_bytes(memory, "step", 50 * MEBI) == pytest.approx(50 * MEBI, rel=0.1)


@requires_marks
def test_a_phase_inside_another_one_is_part_of_it():
    memory = PeakMemory(CPU)
    for sizes in ((150, 50), (20, 80)):
        with memory.phase("step"):
            rises = [risen_bytes(memory, "part", size * MEBI, within="step") for size in sizes]
        # The larger of the two, whichever came last, counts for both names.
        assert max(rises) == pytest.approx(max(sizes) * MEBI, rel=0.1)
        assert memory.peaks_bytes["step"] >= memory.peaks_bytes["step/part"]
        assert memory.peaks_bytes["step"] - memory.peaks_bytes["step/part"] < 10 * MEBI
    with memory.phase("step"):
        pass
    assert list(memory.peaks_bytes) == ["step"]


def test_what_no_phase_inside_covers_is_known_too():
    memory = PeakMemory(CPU)
    with memory.phase("step"):
        with memory.phase("part"):
            pass
        with memory.phase("part"):
            pass
    assert list(memory.alone_bytes) == ["step", "step/part"]
    assert memory.alone_bytes["step/part"] == memory.peaks_bytes["step/part"]
    assert 0 < memory.alone_bytes["step"] <= memory.peaks_bytes["step"]
    with memory.phase("step"):
        pass
    assert memory.alone_bytes == memory.peaks_bytes
    assert list(memory.alone_bytes) == ["step"]


def test_an_error_ends_a_phase():
    memory = PeakMemory(CPU)
    with pytest.raises(KeyError), memory.phase("outer"), memory.phase("failing"):
        raise KeyError
    with memory.phase("next"):
        pass
    assert set(memory.peaks_bytes) == {"outer", "outer/failing", "next"}


@pytest.mark.parametrize("missing", ["no reset", "no mark", "no file"])
def test_without_a_mark_that_can_be_reset_the_source_says_so(missing, tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text("Name: x\nVmHWM:\t  123 kB\n" if missing == "no reset" else "Name: x\n")
    if missing == "no reset":
        monkeypatch.setattr(phases, "_CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    else:
        monkeypatch.setattr(phases, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(phases, "_STATUS", status if missing != "no file" else Path("/nowhere"))
    memory = PeakMemory(CPU)
    assert memory.source == "peak resident set since the start of the process"
    with memory.phase("x"):
        pass
    expected = 123 * 1024 if missing == "no reset" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert memory.peaks_bytes["x"] == expected
