"""Gradient rules: what is summed over which ranks, and one norm over the world (numerics §6)."""

from math import inf, isfinite, nan, prod

import pytest
import torch

from moe_parallel import (
    AxisGroups,
    ParallelLayout,
    ParameterKind,
    ShardSpec,
    counts_here,
    gradient_axes,
    local_box,
    reduce_norm_parts,
    replica_axes,
    run_distributed,
)
from moe_parallel.testing import legal_layouts, run_threads

DENSE, EXPERT = ParameterKind.DENSE, ParameterKind.EXPERT

SPECS = {
    "norm": ShardSpec(name="norm", shape=(8,)),
    "router": ShardSpec(name="router", shape=(8, 8), grad_sum_axes=("tp",)),
    "attention": ShardSpec(name="attention", shape=(16, 8), placements=(("tp", 0),)),
    "experts": ShardSpec(name="experts", shape=(16, 8, 8), kind=EXPERT, placements=(("ep", 0), ("etp", 1))),
    "experts of one etp": ShardSpec(name="experts", shape=(16, 8), kind=EXPERT, placements=(("ep", 0),)),
}


def test_over_which_axes_gradients_are_summed():
    assert replica_axes(DENSE) == ("cp", "dp")
    assert replica_axes(EXPERT) == ("edp",)
    assert {name: gradient_axes(spec) for name, spec in SPECS.items()} == {
        "norm": ("cp", "dp"),
        "router": ("cp", "dp", "tp"),
        "attention": ("cp", "dp"),
        "experts": ("edp",),
        "experts of one etp": ("edp",),
    }


@pytest.mark.parametrize("name", SPECS)
def test_r057_every_element_of_a_stage_counts_once_for_each_replica(name, places_of):
    """Ranks of one place on the replica axes cover the parameter once; by brute force over all layouts of 16 ranks."""
    spec = SPECS[name]
    for layout in legal_layouts(16):
        if any(spec.shape[dim] % layout.size(axis) for axis, dim in spec.placements):
            continue
        counts = {}
        for rank in range(16):
            groups = places_of(layout, rank)
            replica = tuple(groups.rank(axis) for axis in (*replica_axes(spec.kind), "pp"))
            count = counts.setdefault(replica, torch.zeros(spec.shape))
            if counts_here(spec, groups):
                count[indices(local_box(spec, groups))] += 1
        assert len(counts) == prod(layout.size(axis) for axis in (*replica_axes(spec.kind), "pp"))
        for count in counts.values():
            assert torch.equal(count, torch.ones_like(count)), layout


def indices(box):
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


@pytest.mark.dist
def test_a_parameter_of_several_stages_counts_on_the_first_that_holds_it():
    """On two of four stages, and on two ranks of tp that split it; a norm of both stages is whole on them as well."""
    layout = ParallelLayout(world=8, tp=2, pp=4)
    split = ShardSpec(name="embedding", shape=(4, 2), placements=(("tp", 0),), grad_sum_axes=("pp_embedding",))
    whole = ShardSpec(name="norm", shape=(2,), grad_sum_axes=("pp_embedding",))

    def on_rank(mesh):
        return counts_here(split, mesh), counts_here(whole, mesh)

    found = run_distributed(layout, on_rank, shared={"pp_embedding": (1, 3)})
    holders = {rank: found[rank] for rank in (2, 3, 6, 7)}  # stages 1 and 3
    assert holders == {2: (True, True), 3: (True, False), 6: (False, False), 7: (False, False)}
    assert gradient_axes(split) == ("cp", "dp", "pp_embedding")


@pytest.mark.dist
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, inf])
def test_r057_one_norm_over_sharded_and_replicated_parameters(order):
    """Against the norm of the whole gradients, on eight ranks where all degrees differ."""
    layout = ParallelLayout(world=8, tp=2, pp=1, ep=4)  # dp 4, edp 2
    specs = {name: SPECS[name] for name in ("norm", "attention", "experts")}
    whole = {name: torch.randn(spec.shape, dtype=torch.float64) for name, spec in specs.items()}

    def on_rank(mesh):
        parts = {}
        for name, spec in specs.items():
            # As an engine that leaves every replica whole: the first one counts.
            first = all(mesh.rank(axis) == 0 for axis in replica_axes(spec.kind))
            mine = whole[name][indices(local_box(spec, mesh))]
            mine = mine if first and counts_here(spec, mesh) else mine[:0]
            size = mine.abs()
            parts[name] = (size.amax() if size.numel() else size.new_zeros(())) if order == inf else (size**order).sum()
        return reduce_norm_parts(parts, order, mesh)

    norms = run_distributed(layout, on_rank)
    expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in whole.values()]), order)
    for norm in norms:
        assert norm.dtype == torch.float64
        assert torch.equal(norm, norms[0]), "the same bits on every rank, so that all clip by the same factor"
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)


def scalars(*values):
    return {str(place): torch.tensor(value, dtype=torch.float64) for place, value in enumerate(values)}


def test_r057_a_known_norm():
    results = run_threads(2, lambda rank, groups: reduce_norm_parts(scalars([20.0, 100.0][rank]), 2.0, groups))
    assert [round(norm.item(), 4) for norm in results] == [10.9545, 10.9545]


@pytest.mark.dist
@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("order", [2.0, inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_gradient_that_is_not_finite_is_so_on_every_rank(bad, order, where):
    def on_rank(mesh):
        rank = mesh.rank("world")
        return reduce_norm_parts(scalars(1.0, bad if rank == where else 2.0, 3.0), order, mesh).item()

    norms = run_distributed(ParallelLayout(world=3), on_rank)
    assert not any(isfinite(norm) for norm in norms), norms
    assert len({str(norm) for norm in norms}) == 1


def test_the_norm_of_one_rank():
    assert reduce_norm_parts(scalars(9.0, 16.0), 2.0, AxisGroups()).item() == 5.0
    assert reduce_norm_parts(scalars(9.0, 16.0), inf, AxisGroups()).item() == 16.0
    assert reduce_norm_parts(scalars(9.0, nan), inf, AxisGroups()).item() == inf
