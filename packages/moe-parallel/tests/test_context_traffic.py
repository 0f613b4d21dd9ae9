"""What travels and what is held: memory of keys and values by rank count, messages, and their order with the work."""

import weakref

import pytest
import torch

from moe_parallel import ParallelLayout, SequenceInfo, context_attention, run_distributed, split_context
from moe_parallel._torch_compat import operator_mode
from moe_parallel.context import gather, ring
from moe_parallel.testing import count_collectives

pytestmark = pytest.mark.dist

ROWS, SLOTS, KV_HEADS, FEATURES, VALUE_FEATURES = 1, 8, 2, 5, 3
BLOCK_BYTES = ROWS * SLOTS * KV_HEADS * (FEATURES + VALUE_FEATURES) * 8  # of no other tensor in these runs


def on_ranks(ranks, fn):
    return run_distributed(ParallelLayout(world=ranks, cp=ranks), lambda mesh: fn(mesh.group("cp")))


def attend(core, group):
    """Forward and backward, each as a call."""
    shapes = [(KV_HEADS, FEATURES)] * 2 + [(KV_HEADS, VALUE_FEATURES)]
    q, k, v = (torch.randn(ROWS, SLOTS, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    nothing = torch.zeros(ROWS, SLOTS, dtype=torch.int64)
    info = SequenceInfo(
        position_BS=nothing,
        token_index_BS=nothing,
        valid_BS=nothing == 0,
        context=split_context(group, ROWS, SLOTS * group.size()),
    )
    out = []
    return lambda: out.append(core(q, k, v, info)), lambda: out[0].sum().backward()


def most_blocks_held(step):
    """The most keys and values that were alive at a time inside `step`, in those of one rank."""
    held, most = [0], [0]

    def drop(blocks):
        held[0] -= blocks

    def call(operator, args, kwargs):
        result = operator(*args, **kwargs)
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() % BLOCK_BYTES == 0:
                storage = x.untyped_storage()
                if storage not in known:
                    known.add(storage)
                    weakref.finalize(storage, drop, storage.nbytes() // BLOCK_BYTES)
                    held[0] += storage.nbytes() // BLOCK_BYTES
                    most[0] = max(most[0], held[0])
        return result

    known = weakref.WeakSet()
    with operator_mode(call):
        step()
    return most[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_holds_a_constant_number_of_blocks_and_gather_holds_all(ranks):
    def on_rank(group):
        return [
            [most_blocks_held(step) for step in attend(context_attention(kind), group)] for kind in ("ring", "gather")
        ]

    for of_ring, of_gather in on_ranks(ranks, on_rank):
        forward, backward = of_ring
        assert forward == 2, "one to attend to and one that comes"
        assert backward <= 2 + 3, "and gradients: one here, one that comes, one that leaves"
        assert of_gather[0] >= ranks
        assert of_gather[1] >= 2 * ranks


def test_messages():
    def on_rank(group):
        counts = {}
        for kind in ("ring", "gather", "all_to_all"):
            forward, backward = attend(context_attention(kind), group)
            with count_collectives() as in_forward:
                forward()
            with count_collectives() as in_backward:
                backward()
            counts[kind] = len(in_forward), len(in_backward)
        return counts

    ranks = 2
    for counts in on_ranks(ranks, on_rank):
        assert counts["gather"] == (1, 2)
        assert counts["all_to_all"] == (4, 4)
        # A send and a receive: keys and values one time less than there are ranks, gradients as often.
        assert counts["ring"] == (2 * (ranks - 1), 2 * (ranks - 1) + 2 * ranks)


@pytest.mark.parametrize(
    ("kind", "module", "starts"), [("ring", ring, ["shift"]), ("gather", gather, ["all_gather", "reduce_scatter"])]
)
def test_communication_starts_before_the_work_that_hides_it(monkeypatch, kind, module, starts):
    events = []

    def logged(name):
        original = getattr(module, name)

        def call(*args):
            events.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, call)

    for name in (*starts, "attend", "attend_backward"):
        logged(name)

    def on_rank(group):
        forward, backward = attend(context_attention(kind), group)
        forward()
        split = len(events)
        backward()
        return events[:split], events[split:]

    for forward, backward in on_ranks(3, on_rank):
        if kind == "ring":
            assert forward == ["shift", "attend"] * 2 + ["attend"]
            assert backward == ["shift", "attend_backward", "shift"] * 2 + ["attend_backward", "shift"]
        else:
            assert forward == ["all_gather"] + ["attend"] * 3
            assert backward == ["all_gather"] + ["attend_backward"] * 3 + ["reduce_scatter"]


def test_pairs_that_a_rank_computes():
    """Head-tail rows: half of all pairs, equally many on every rank."""

    def on_rank(group):
        computed = []
        original = ring.attend  # of this process, which ends with the run

        def counted(q, k, v, tiles, scale, partial):
            computed.extend(tile.pairs for tile in tiles)
            original(q, k, v, tiles, scale, partial)

        ring.attend = counted
        attend(context_attention("ring"), group)[0]()
        return sum(computed)

    ranks = 4
    slots = ranks * SLOTS
    assert on_ranks(ranks, on_rank) == [slots * (slots + 1) // 2 // ranks] * ranks
