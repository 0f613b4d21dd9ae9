"""Parameters that ranks of `tp` or `etp` hold alike: their sums, their buckets, and both engines with them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, OptimConfig, Zero1
from moe_memory.data_parallel.bucket import BucketKey
from moe_memory.data_parallel.partial import sum_partial
from moe_memory.optim.rules import update_rule
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, step_tokens
from moe_memory.testing.session import Session, assembled, copied
from moe_parallel import AxisGroups, ParallelLayout, ParameterKind, ShardSpec, local_box, run_distributed
from moe_parallel.testing import count_collectives, run_threads

ENGINES = pytest.mark.parametrize("engine_type", [Zero1, Fsdp])
DENSE, EXPERT = ParameterKind.DENSE, ParameterKind.EXPERT


class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.dist
@ENGINES
@pytest.mark.parametrize(
    ("kind", "axes", "degrees"),
    [
        (DENSE, (), {"world": 2}),
        (DENSE, ("tp",), {"world": 4, "tp": 2}),
        (EXPERT, ("etp",), {"world": 2, "etp": 2}),
        (EXPERT, (), {"world": 2}),
        (EXPERT, ("etp", "ep"), {"world": 4, "etp": 2, "ep": 2}),
    ],
)
def test_r069_every_sum_over_ranks_is_in_the_dtype_of_main_gradients(engine_type, kind, axes, degrees):
    """1.0 of the first rank and 2^-9 of the second; bfloat16 would lose the smaller."""

    def work(groups):
        engine = engine_type(OptimConfig(), groups, compute_dtype=torch.bfloat16)
        spec = ShardSpec(name="weight", shape=(4, 2), kind=kind, grad_sum_axes=axes)
        model = engine.wrap(Weight(4, 2), {"weight": spec})
        partial = {0: 1.0, 1: 2**-9}.get(groups.rank("world"), 0.0)
        model(torch.full((4, 2), partial, dtype=torch.bfloat16)).backward()
        engine.grads_ready(["weight"], last=True)
        engine.finish()
        return [part.tensor.flatten().tolist() for part in engine.gradient_tensors()]

    found = run_distributed(ParallelLayout(**degrees), work)
    assert {value for parts in found for part in parts for value in part} == {1.001953125}


@pytest.mark.dist
@ENGINES
def test_partial_gradients_of_a_step_share_one_sum_for_each_set_of_axes(engine_type):
    def work(groups):
        counts = []
        for bucket_bytes in (2**20, 200):
            engine = engine_type(
                CONFIG, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL, bucket_bytes=bucket_bytes
            )
            session = Session(engine, groups, torch.float64, seed=1)
            session.model(step_tokens(0, 1)[0]).backward()
            session.report(last=True)
            with count_collectives() as names:
                engine.finish()
            assert set(names) == {"allreduce"}
            counts.append(len(names))
        return counts

    for few, many in run_distributed(ParallelLayout(world=4, tp=2, etp=2), work):
        assert few == 2  # over tp, and over etp
        assert many > 4


class Outer(nn.Module):
    """A matrix of its own that two ranks of `tp` have copies of, and another that is split into one row and none."""

    def __init__(self, groups, specs):
        super().__init__()
        self.inner = Weight(*local_box(specs["inner.weight"], groups).shape)
        self.own = nn.Parameter(torch.linspace(1, 2, 16).view(4, 4))

    def forward(self, x_ND):
        return (x_ND @ self.own).square().sum() + self.inner(x_ND.sum(0))


@pytest.mark.dist
@ENGINES
def test_a_part_without_elements_does_not_change_how_copies_are_kept(engine_type):
    """`Fsdp` makes a unit of a module unless there is one inside: here that would differ between the ranks of `tp`."""
    specs = {
        "own": ShardSpec(name="own", shape=(4, 4), grad_sum_axes=("tp",)),
        "inner.weight": ShardSpec(name="inner.weight", shape=(1, 4), placements=(("tp", 0),), uneven=True),
    }

    def work(groups):
        engine = engine_type(CONFIG, groups, compute_dtype=torch.float32)
        model = engine.wrap(Outer(groups, specs), specs)
        for number in range(2):
            x_ND = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            model(x_ND[groups.rank("world") :: groups.size("world")]).backward()
            engine.grads_ready(list(specs), last=True)
            engine.finish()
            gradients = copied(engine.gradient_tensors())
            engine.step(0.01, 1.0)
        return gradients, copied(engine.state_tensors())

    results = run_distributed(ParallelLayout(world=4, tp=2), work)
    single = work(AxisGroups())
    assembled([parts for _, parts in results], "state")
    found = assembled([parts for parts, _ in results], "gradients")["own"]
    torch.testing.assert_close(found, assembled([single[0]], "gradients")["own"])


@pytest.mark.parametrize("limit_bytes", [1, 100, 10**6])
def test_sums_are_in_place_and_the_same_on_all_ranks(limit_bytes):
    """Of small, large, empty, scalar and strided tensors, in two dtypes."""

    def work(rank, groups):
        generator = torch.Generator().manual_seed(rank)
        tensors = [
            torch.randn(shape, generator=generator, dtype=dtype)
            for shape in ((3,), (), (0, 4), (40, 2), (5, 3))
            for dtype in (torch.float32, torch.float64)
        ]
        tensors = [tensor.t() if tensor.shape == (5, 3) else tensor for tensor in tensors]
        alone = torch.randn(6, generator=generator)
        before = [tensor.clone() for tensor in (*tensors, alone)]
        sum_partial([*((tensor, ("ep",)) for tensor in tensors), (alone, ())], groups, limit_bytes=limit_bytes)
        return before, [*tensors, alone]

    (first, found), (second, other) = run_threads(2, work)
    for one, two, total, same in zip(first[:-1], second[:-1], found, other, strict=False):
        assert torch.equal(total, one + two)
        assert torch.equal(total, same)
    assert torch.equal(found[-1], first[-1])


@pytest.mark.parametrize(
    ("kind", "placements", "grad_sum_axes", "copies", "summed"),
    [
        (DENSE, (), (), ("tp",), ()),
        (DENSE, (), ("tp",), ("tp",), ("tp",)),
        (DENSE, (("tp", 0),), (), (), ()),
        (EXPERT, (("ep", 0),), ("etp",), ("etp",), ("etp",)),
        (EXPERT, (("etp", 0),), ("ep",), (), ()),  # ep has one rank
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_only_ranks_outside_the_replicas_hold_copies(kind, placements, grad_sum_axes, copies, summed, rank):
    groups = SimpleNamespace(size=lambda axis: 1 if axis == "ep" else 2, rank=lambda axis: 0 if axis == "ep" else rank)
    spec = ShardSpec(name="x", shape=(4,), kind=kind, placements=placements, grad_sum_axes=grad_sum_axes)
    rule = update_rule(OptimConfig(), spec, torch.float32)
    key = BucketKey.of(spec, groups, rule=rule, compute_dtype=torch.float32)
    assert (key.copy_axes, key.sum_axes, key.counted) == (copies, summed, not copies or rank == 0)


@pytest.mark.dist
def test_ranks_with_copies_have_the_same_buckets_of_them():
    """Else NCCL could add up in another order, and copies would differ by a bit."""

    def work(groups):
        engine = Zero1(CONFIG, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL)
        Session(engine, groups, torch.float64, seed=1)
        return [bucket.names for bucket in engine._buckets]

    buckets = run_distributed(ParallelLayout(world=4, tp=2, etp=2), work)
    assert all(names == buckets[0] for names in buckets)
    assert ("columns.up_DF", "columns.out_VD") in buckets[0]
    assert ("gate.weight_VD",) in buckets[0]
