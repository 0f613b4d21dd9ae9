"""Optimizer state in host memory between updates, and updates on the host: the same bits as without."""

from dataclasses import replace

import pytest
import torch

from moe_memory import Fsdp, MemoryConfig, OptimConfig, Zero1
from moe_memory.config import state_problems
from moe_memory.copies import FakeCopies
from moe_memory.optim.buffer import Buffer
from moe_memory.optim.home import Home
from moe_memory.optim.host import HostUpdates
from moe_memory.optim.optimizer import Optimizer
from moe_memory.optim.rules import update_rule
from moe_memory.optim.slots import Slot
from moe_memory.testing import DataParallelConformance, RanksConformance
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, step_tokens
from moe_memory.testing.session import Session, assembled, copied
from moe_memory.testing.verdict import same_tables, state_of
from moe_parallel import AxisGroups, ParallelLayout, ParameterKind, ShardSpec, run_distributed

LOW = replace(CONFIG, exp_avg_dtype="int8", exp_avg_sq_dtype="bfloat16")
MODES = {
    "state": {"offload": "state"},
    "step": {"offload": "step"},
    "half": {"offload": "step", "offload_fraction": 0.5},
}
modes = pytest.mark.parametrize("mode", MODES)


class TestState(DataParallelConformance):
    config = replace(CONFIG, offload="state")

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


class TestStep(TestState):
    config = replace(CONFIG, offload="step", offload_fraction=0.7)


@pytest.mark.dist
class TestStepOverRanks(RanksConformance):
    config = replace(CONFIG, offload="step", offload_fraction=0.7)
    layouts = RanksConformance.layouts[2:4]

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, bucket_bytes=500)

    def build_other(self, config, groups, *, compute_dtype, keep_internal):
        config = replace(config, offload="state")
        return Fsdp(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


def engine_of(config, groups, dtype=torch.bfloat16, copies=None, bucket_bytes=500):
    return Zero1(
        config, groups, compute_dtype=dtype, keep_internal=KEEP_INTERNAL, bucket_bytes=bucket_bytes, copies=copies
    )


def trained(config, groups=None, steps=3, dtype=torch.bfloat16):
    """State and weights."""
    groups = groups or AxisGroups()
    session = Session(engine_of(config, groups, dtype), groups, dtype, seed=1)
    session.train(range(steps))
    return state_of(session.engine), session.weights()


@modes
@pytest.mark.parametrize("config", [CONFIG, LOW, replace(CONFIG, kind="muon")], ids=["float32", "low", "muon"])
def test_state_and_weights_have_the_bits_of_a_run_that_offloads_nothing(mode, config):
    expected, weights = trained(config)
    state, found = trained(replace(config, **MODES[mode]))
    same_tables(state, expected, mode, exact=True)
    same_tables(found, weights, mode, exact=True)


FEW_BITS = replace(LOW, master_dtype="bfloat16", gradient_dtype="bfloat16")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("engine_type", "config", "modes_of_it"),
    [
        (Zero1, LOW, MODES),
        (Zero1, replace(FEW_BITS, kind="muon"), MODES),
        (Fsdp, FEW_BITS, ("state",)),
        (Fsdp, replace(LOW, kind="muon"), ("state",)),
    ],
    ids=["zero1", "zero1 muon", "fsdp", "fsdp muon"],
)
def test_over_ranks_too_with_losses_and_gradients(engine_type, config, modes_of_it):
    def trained(config):
        def on_rank(groups):
            options = {"compute_dtype": torch.bfloat16, "keep_internal": KEEP_INTERNAL, "bucket_bytes": 500}
            session = Session(engine_type(config, groups, **options), groups, torch.bfloat16, seed=1)
            losses, gradients = [], []
            for step in range(3):
                loss = session.model(step_tokens(step, 1)[0])
                loss.backward()
                session.report(last=True)
                session.engine.finish()
                losses.append(loss.item())
                gradients.append(copied(session.engine.gradient_tensors()))
                session.engine.step(0.02, 0.5)
            return losses, [*gradients, copied(session.engine.state_tensors())]

        results = run_distributed(ParallelLayout(world=4, tp=2, ep=2), on_rank)
        moments = range(len(results[0][1]))
        return [losses for losses, _ in results], [assembled([parts[at] for _, parts in results], "") for at in moments]

    expected_losses, expected = trained(config)
    for mode in modes_of_it:
        losses, tables = trained(replace(config, **MODES[mode]))
        assert losses == expected_losses
        for found, wanted in zip(tables, expected, strict=True):
            same_tables(found, wanted, mode, exact=True)


def session_of(config, copies, dtype=torch.bfloat16):
    return Session(engine_of(config, AxisGroups(), dtype, copies), AxisGroups(), dtype, seed=1)


def device_bytes(session):
    """Of master weights and moments on the device."""
    optimizer = session.engine._optimizer
    masters = [bucket.master for bucket in session.engine._buckets]
    slots = [
        tensor
        for index, slots in enumerate(optimizer._slots)
        if index not in optimizer._host
        for slot in slots
        for tensor in slot.tensors()
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in masters + slots)


@modes
def test_between_updates_the_device_has_no_state(mode):
    copies = FakeCopies()
    session = session_of(replace(CONFIG, **MODES[mode]), copies)
    session.train([0])
    assert copies.in_flight > 0  # state leaves under what comes next
    list(session.engine.state_tensors())  # waits for what is under way
    assert copies.in_flight == 0
    routers = sum(3 * bucket.master.nbytes for bucket in session.engine._buckets if bucket.compute is bucket.master)
    # What the model computes with stays, and with it no moment.
    assert device_bytes(session) == routers / 3
    assert routers > 0


def test_state_comes_back_some_buckets_ahead_and_leaves_under_the_next_update(monkeypatch):
    copies = FakeCopies()
    session = session_of(replace(CONFIG, offload="state"), copies)
    session.accumulate(step_tokens(0))
    optimizer = session.engine._optimizer
    update, seen = optimizer._adamw.update, []

    def watched(buffer, *args, **kwargs):
        away = [homes[0]._away for index, homes in enumerate(optimizer._homes) if index in optimizer._adamw_indices]
        seen.append(away)
        update(buffer, *args, **kwargs)

    monkeypatch.setattr(optimizer._adamw, "update", watched)
    session.engine.step(0.02, 1.0)
    count = len(seen)
    assert count > 4
    for number, away in enumerate(seen):
        assert away == [not number <= place <= number + 2 for place in range(count)]
    assert copies.most_in_flight > 3


def test_updates_on_the_host_overlap_with_copies_both_ways(monkeypatch):
    copies = FakeCopies()
    session = session_of(replace(CONFIG, offload="step"), copies)
    session.accumulate(step_tokens(0))
    gradients = len(session.engine._optimizer._host._buffers)
    moments = 2  # of the router, whose weights the model computes with
    assert copies.in_flight == gradients + moments > 4  # all gradients are on their way
    under_way = []
    update = session.engine._optimizer._adamw.update

    def watched(buffer, *args, **kwargs):
        under_way.append(copies.in_flight)
        update(buffer, *args, **kwargs)

    monkeypatch.setattr(session.engine._optimizer._adamw, "update", watched)
    session.engine.step(0.02, 1.0)
    # Gradients that are still to come, and from the second on the weights of the one before.
    expected = [gradients - 1 - number + (number > 0) for number in range(gradients)]
    assert under_way[-gradients:] == [moments + copying for copying in expected]


def test_weights_on_their_way_are_not_those_that_follow():
    """As where a checkpoint is loaded right after the model was built, and nobody has read what was sent first."""
    rule = update_rule(CONFIG, ShardSpec(name="w", shape=(8, 8)), torch.bfloat16)
    host = HostUpdates(torch.device("cpu"), FakeCopies())
    buffer = host.take(0, Buffer(weights=torch.ones(64), parts=[], rule=rule, compute=torch.bfloat16, may_leave=True))
    first = host._send_weights(0)
    buffer.weights.fill_(2)
    second = host._send_weights(0)
    assert (first.wait().unique().item(), second.wait().unique().item()) == (1, 2)


def test_the_share_of_the_host_is_as_configured():
    for fraction in (0.0, 0.3, 1.0):
        session = session_of(replace(CONFIG, offload="step", offload_fraction=fraction), FakeCopies())
        optimizer = session.engine._optimizer
        for kind in ParameterKind:
            able = [
                bucket
                for bucket in session.engine._buckets
                if bucket.compute is not bucket.master and bucket.key.kind is kind
            ]
            total = sum(bucket.master.numel() for bucket in able)
            taken = sum(buffer.weights.numel() for buffer in optimizer._host._buffers.values() if buffer.kind is kind)
            largest = max(bucket.master.numel() for bucket in able)
            assert fraction * total - largest < taken <= fraction * total


def updated_by(config, *buffers):
    """Indices of buffers (kind, elements, whether there are copies) in the order of their updates: by the device, by
    the host."""
    rule = update_rule(config, ShardSpec(name="w", shape=(8, 8)), torch.bfloat16)
    made = [
        Buffer(
            weights=torch.zeros(elements),
            parts=[],
            rule=rule,
            compute=torch.bfloat16,
            kind=kind,
            has_copies=has_copies,
            may_leave=True,
        )
        for kind, elements, has_copies in buffers
    ]
    optimizer = Optimizer(config, [], made, AxisGroups(), torch.device("cpu"), copies=FakeCopies())
    gradients, updated = [torch.zeros(buffer.weights.numel()) for buffer in made], []
    optimizer.step(0.1, gradients, 1.0, lambda index, weights: updated.append((index, weights is not None)))
    assert sorted(index for index, _ in updated) == list(range(len(buffers)))
    device, host = ([index for index, on_host in updated if on_host is where] for where in (False, True))
    return device, host


HALF = replace(CONFIG, **MODES["half"])


def test_ranks_that_share_experts_update_them_in_one_order():
    """Whatever else they hold, as where `tp` does not divide the vocabulary: weights are gathered in that order."""

    def order(dense_elements):
        experts = [(ParameterKind.EXPERT, 64, False)] * 3
        device, host = updated_by(HALF, (ParameterKind.DENSE, dense_elements, False), *experts)
        return [index for index in (*device, *host) if index]

    assert order(dense_elements=160) == order(dense_elements=64)


@pytest.mark.parametrize(("mode", "is_on_host"), [("half", False), ("step", True)])
def test_copies_of_a_parameter_are_all_updated_in_one_place(mode, is_on_host):
    """Whatever else their ranks hold, as the stages with a tied table: host and device need not round alike."""
    for rest in ([], [64], [512, 512]):
        others = [(ParameterKind.DENSE, elements, False) for elements in rest]
        _, host = updated_by(replace(CONFIG, **MODES[mode]), (ParameterKind.DENSE, 64, True), *others)
        assert (0 in host) is is_on_host


@pytest.mark.dist
def test_copies_of_a_parameter_are_those_of_other_ranks_than_replicas():
    def on_rank(groups):
        engine = Session(engine_of(HALF, groups), groups, torch.bfloat16, seed=1).engine
        host = engine._optimizer._host
        return {(bool(bucket.key.copy_axes), index in host) for index, bucket in enumerate(engine._buckets)}

    for found in run_distributed(ParallelLayout(world=2, tp=2), on_rank):
        assert found == {(True, False), (False, False), (False, True)}


@modes
def test_what_leaves_is_in_buckets_even_where_nothing_is_communicated(mode):
    """Or all of it would come back at once."""
    buckets = session_of(replace(CONFIG, **MODES[mode]), FakeCopies()).engine._buckets
    for bucket in buckets:
        size_bytes = sum(p.numel() for p in bucket.parameters.values()) * bucket.grad.element_size()
        assert len(bucket.names) == 1 or size_bytes <= 500
    assert len(buckets) > len({bucket.key for bucket in buckets})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_device_has_the_state_of_few_buffers_at_once(kind, monkeypatch):
    """Its memory is taken until a copy is made, and a host that did not wait for any would be far ahead of them."""
    copies = FakeCopies()
    session = session_of(replace(CONFIG, kind=kind, offload="state"), copies)
    session.train([0])
    restore, seen = copies.restore, []

    def restored(tensor):
        restore(tensor)
        seen.append(device_bytes(session))

    monkeypatch.setattr(copies, "restore", restored)
    session.train([1])
    optimizer = session.engine._optimizer
    sizes = [
        sum(tensor.nbytes for slot in slots for tensor in slot.tensors()) + buffer.may_leave * buffer.weights.nbytes
        for slots, buffer in zip(optimizer._slots, optimizer._buffers, strict=True)
    ]
    staying = sum(bucket.master.nbytes for bucket in session.engine._buckets if bucket.compute is bucket.master)
    # The one that is updated, two on their way here, two on their way back.
    assert max(seen) - staying <= sum(sorted(sizes)[-5:]) < sum(sizes)


@modes
def test_r081_a_checkpoint_waits_for_what_is_under_way_and_loads_into_host_memory(mode):
    config = replace(CONFIG, **MODES[mode])
    session = session_of(config, FakeCopies())
    session.train(range(2))
    saved, values = state_of(session.engine), dict(session.engine.state_values())
    expected, _ = trained(CONFIG, steps=2)
    same_tables(saved, expected, "saved", exact=True)
    other = session_of(config, FakeCopies())
    other.train([5])
    for part in other.engine.state_tensors():
        part.tensor.copy_(saved[part.name])
    other.engine.load_finished(values)
    for each in (session, other):
        each.train((2, 3))
    same_tables(state_of(other.engine), state_of(session.engine), "continued", exact=True)
    same_tables(other.weights(), session.weights(), "continued", exact=True)


@modes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1.0])
@pytest.mark.parametrize("config", [CONFIG, replace(LOW, kind="muon")], ids=["float32", "muon int8"])
def test_a_skipped_step_changes_nothing_and_the_next_one_is_right(mode, bad, config):
    session = session_of(replace(config, **MODES[mode]), FakeCopies())
    session.train(range(2))
    (session.model(step_tokens(9)[0]) * bad).backward()
    session.report(last=True)
    session.engine.finish()
    assert bool(session.engine.norm_parts(2.0)["dense"].isfinite()) == (bad == 1)
    session.engine.skip()
    same_tables(state_of(session.engine), trained(config, steps=2)[0], "after a skip", exact=True)
    session.train([2])
    same_tables(state_of(session.engine), trained(config, steps=3)[0], "the step after it", exact=True)


def test_the_state_of_a_buffer_leaves_before_that_of_the_next_is_made(monkeypatch):
    """Or all of it would be on the device at the start."""
    copies, held = FakeCopies(), []
    make, release = Slot.__init__, copies.release

    def made(slot, *args):
        make(slot, *args)
        held.append(held[-1] + len(slot.tensors()) if held else len(slot.tensors()))

    def released(tensor):
        held.append(held[-1] - 1)
        release(tensor)

    monkeypatch.setattr(Slot, "__init__", made)
    monkeypatch.setattr(copies, "release", released)
    session = session_of(replace(LOW, offload="state"), copies)
    slots = 3  # a moment in codes, their scales, and the other moment
    assert max(held) == slots < len(session.engine._optimizer._slots)


@pytest.mark.parametrize("method", ["_arrive", "_settle"])
def test_r081_a_missing_wait_is_caught(method, monkeypatch):
    """Spoiled bits in the state, or a race that the engine refuses."""
    monkeypatch.setattr(Home, method, lambda home: None)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        same_tables(trained(replace(CONFIG, offload="state"))[0], trained(CONFIG)[0], "without a wait", exact=True)


def test_fsdp_keeps_weights_where_they_are_and_refuses_updates_on_the_host():
    memory = MemoryConfig(data_parallel="fsdp")
    assert state_problems(memory, OptimConfig(offload="state")) == []
    (problem,) = state_problems(memory, OptimConfig(offload="step"))
    assert problem.key == "optim.offload"
