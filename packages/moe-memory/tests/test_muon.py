"""Muon: orthogonal updates of whole matrices, wherever their parts are."""

from dataclasses import replace
from math import gcd

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, MoeMemoryError, OptimConfig, Zero1
from moe_memory.config import MuonConfig, OptimGroup
from moe_memory.optim import owners
from moe_memory.optim.matrices import matrices, matrix_dims
from moe_memory.optim.orthogonal import orthogonalised
from moe_memory.optim.owners import WholeMatrices
from moe_memory.optim.rules import update_rule
from moe_memory.testing import DataParallelConformance, RanksConformance
from moe_memory.testing.reference import CONFIG
from moe_parallel import AxisGroups, Box, ParallelLayout, ParameterKind, ShardSpec, run_distributed, shard_specs
from moe_parallel.testing import count_collectives

MUON = replace(CONFIG, kind="muon")


class TestZero1(DataParallelConformance):
    config = MUON
    exact = False

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


@pytest.mark.dist
class TestZero1OverRanks(RanksConformance):
    config = MUON
    low_precision_tolerance = 1e-4  # iterations enlarge what is small by 480

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, bucket_bytes=500)


@pytest.mark.dist
class TestFsdpOverRanks(RanksConformance):
    config = MUON
    low_precision_tolerance = 1e-4
    layouts = RanksConformance.layouts[2:4]

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Fsdp(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)

    build_other = TestZero1OverRanks.build


@pytest.mark.dist
class TestInRuns(RanksConformance):
    """State on neighbours, copies in every run: an owner serves all of them."""

    config = MUON
    low_precision_tolerance = 1e-4
    layouts = ((ParallelLayout(world=4), 2),)
    small = ((ParallelLayout(world=4), 4),)

    def build(self, config, groups, **options):
        return Zero1(config, groups, shard_replicas=gcd(2, groups.size("cp", "dp")), **options)

    def build_other(self, config, groups, **options):
        return Fsdp(config, groups, shard_replicas=gcd(2, groups.size("cp", "dp")), **options)


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5), (3, 6, 4)])
def test_singular_values_become_about_one_and_vectors_stay(shape):
    x = torch.randn(shape, dtype=torch.float64)
    y = orthogonalised(x, 5)
    assert y.shape == x.shape
    values = torch.linalg.svdvals(y)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    inner = left.mT @ y @ right.mT  # diagonal, in the singular vectors of x
    torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_directions_that_a_matrix_lacks_stay_out(shape):
    x = torch.randn(shape[0], 2, dtype=torch.float64) @ torch.randn(2, shape[1], dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalised(x, 5))
    assert 0.6 < float(values[1]) < float(values[0]) < 1.3
    assert float(values[2]) < 1e-10


def test_each_matrix_of_a_batch_is_alone_and_zeros_stay():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    x[1] = 0
    y = orthogonalised(x, 5)
    assert bool((y[1] == 0).all())
    torch.testing.assert_close(y[2], orthogonalised(x[2:] * 100, 5)[0], atol=1e-6, rtol=0)


def test_an_update_has_the_root_mean_square_that_the_scale_says():
    """About that of AdamW, whatever the shape (arXiv 2502.16982, section 2.2)."""
    model = nn.Linear(64, 256, bias=False)
    engine = Zero1(OptimConfig(kind="muon", weight_decay=0.0), AxisGroups(), compute_dtype=torch.float32)
    model = engine.wrap(model, shard_specs(model, []))
    before = model.weight.detach().clone()
    model(torch.randn(512, 64)).square().sum().backward()
    engine.grads_ready(["weight"], last=True)
    engine.finish()
    engine.step(0.1, 1.0)
    assert float((model.weight.detach() - before).square().mean().sqrt() / 0.1) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "kind", "dims"),
    [
        ((4, 9), ParameterKind.DENSE, (0, 1)),
        ((8, 4, 9), ParameterKind.EXPERT, (1, 2)),
        ((2, 5, 9), ParameterKind.DENSE, (1, 2)),  # gate and up
        ((8, 5, 2, 9), ParameterKind.EXPERT, (1, 3)),
        ((8, 9, 2, 5), ParameterKind.EXPERT, (1, 3)),
        ((5, 5, 5), ParameterKind.DENSE, (1, 2)),
    ],
)
def test_the_two_longest_dims_are_the_matrix(shape, kind, dims):
    spec = ShardSpec(name="w", shape=shape, kind=kind)
    assert matrix_dims(spec) == dims
    cover = torch.zeros(shape, dtype=torch.int64)
    for box in matrices(spec):
        cover[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
        assert [box.shape[dim] for dim in dims] == [shape[dim] for dim in dims]
    assert bool((cover == 1).all())


@pytest.mark.parametrize(
    ("rows", "heights"),
    [((), [12]), ((3,), [3, 3, 3, 3]), ((4, 1, 1), [4, 1, 1, 4, 1, 1]), ((6, 3, 3), [6, 3, 3])],
    ids=["whole", "heads", "groups of heads", "queries, keys, values"],
)
def test_rows_are_cut_as_configured_and_each_piece_is_orthogonalised_alone(rows, heights):
    spec = ShardSpec(name="qkv", shape=(12, 5))
    boxes = list(matrices(spec, rows))
    assert [box.shape for box in boxes] == [(height, 5) for height in heights]
    assert [box.offset[0] for box in boxes] == [sum(heights[:index]) for index in range(len(heights))]
    model = nn.Module()
    model.qkv = nn.Parameter(torch.randn(12, 5, dtype=torch.float64))
    group = OptimGroup(pattern="q*", rows=rows, weight_decay=0.0)
    engine = Zero1(replace(MUON, groups=(group,)), AxisGroups(), compute_dtype=torch.float64)
    engine.wrap(model, {"qkv": spec})
    before = model.qkv.detach().clone()
    gradient = torch.randn(12, 5, dtype=torch.float64)
    (model.qkv * gradient).sum().backward()
    engine.grads_ready(["qkv"], last=True)
    engine.finish()
    engine.step(0.5, 1.0)
    expected = torch.cat(
        [orthogonalised(piece, 5) * 0.2 * max(piece.shape) ** 0.5 for piece in (1.95 * gradient).split(heights)]
    )
    torch.testing.assert_close(before - model.qkv, 0.5 * expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)])
def test_a_parameter_without_elements_has_no_matrices(shape):
    assert list(matrices(ShardSpec(name="w", shape=shape))) == []


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_a_vector_that_is_a_matrix_moves_by_its_direction(shape):
    gradient = torch.randn(shape, dtype=torch.float64)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    engine = Zero1(MUON, AxisGroups(), compute_dtype=torch.float64)
    engine.wrap(model, {"w": ShardSpec(name="w", shape=shape)})
    (model.w * gradient).sum().backward()
    engine.grads_ready(["w"], last=True)
    engine.finish()
    engine.step(1.0, 1.0)
    found = model.w.detach() / (0.2 * max(shape) ** 0.5)
    assert 0.6 < float(found.norm()) < 1.3
    torch.testing.assert_close(found / found.norm(), -gradient / gradient.norm())


def test_rows_that_do_not_fill_a_matrix_are_refused():
    with pytest.raises(MoeMemoryError, match=r"rows \[5\] of optim.groups add up to 5, of which the 12 rows of qkv"):
        list(matrices(ShardSpec(name="qkv", shape=(12, 5)), (5,)))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("layers.0.attention.q_proj.weight", (8, 4), "muon"),
        ("layers.0.attention.q_proj.bias", (8,), "adamw"),
        ("layers.0.norm.weight", (8,), "adamw"),
        ("embedding.weight", (8, 4), "adamw"),
        ("head.weight", (8, 4), "adamw"),
        ("layers.0.moe.router.weight", (8, 4), "adamw"),
    ],
)
def test_matrices_but_embeddings_head_and_router_are_muons(name, shape, kind):
    rule = update_rule(MUON, ShardSpec(name=name, shape=shape), torch.bfloat16)
    assert rule.kind == kind
    assert rule.weight_decay == (0.3 if len(shape) > 1 else 0.0)
    assert [slot for slot, _ in rule.slots] == (["exp_avg"] if kind == "muon" else ["exp_avg", "exp_avg_sq"])
    assert update_rule(CONFIG, ShardSpec(name=name, shape=shape), torch.bfloat16).kind == "adamw"


def test_the_first_group_that_matches_decides():
    groups = (
        OptimGroup(pattern="a.*", lr_scale=0.5, weight_decay=0.0, kind="muon"),
        OptimGroup(pattern="*.bias", lr_scale=2.0, weight_decay=0.7),
        OptimGroup(pattern="a*", lr_scale=9.0),
    )
    config = replace(CONFIG, groups=groups)
    first = update_rule(config, ShardSpec(name="a.weight", shape=(3, 4)), torch.float32)
    assert (first.kind, first.lr_scale, first.weight_decay) == ("muon", 0.5, 0.0)
    second = update_rule(config, ShardSpec(name="b.bias", shape=(3,)), torch.float32)
    assert (second.kind, second.lr_scale, second.weight_decay) == ("adamw", 2.0, 0.7)
    other = update_rule(config, ShardSpec(name="b.weight", shape=(3, 4)), torch.float32)
    assert (other.kind, other.lr_scale, other.weight_decay) == ("adamw", 1.0, 0.3)
    with pytest.raises(MoeMemoryError, match=r"optim.groups give a.bias of shape \(3,\) to Muon"):
        update_rule(config, ShardSpec(name="a.bias", shape=(3,)), torch.float32)


def test_groups_step_by_their_own_rate_and_decay():
    model = nn.Linear(4, 4)
    config = OptimConfig(
        groups=(OptimGroup(pattern="bias", lr_scale=0.0), OptimGroup(pattern="weight", lr_scale=0.5, weight_decay=0.6))
    )
    engine = Zero1(config, AxisGroups(), compute_dtype=torch.float32)
    model = engine.wrap(model, shard_specs(model, []))
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    (model(torch.ones(4)) * 0).sum().backward()
    engine.grads_ready(["weight", "bias"], last=True)
    engine.finish()
    engine.step(0.1, 1.0)
    assert torch.equal(model.bias, bias)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.5 * 0.6))


@pytest.mark.dist
def test_every_matrix_is_updated_once_by_owners_with_equal_work(monkeypatch):
    """In rounds of a few, whole, with parts from ranks of tp and of the replicas, and copies."""
    monkeypatch.setattr(owners, "_ROUND_ELEMENTS", 100)
    stack = ShardSpec(name="stack", shape=(6, 8, 10), kind=ParameterKind.DENSE)
    copies = ShardSpec(name="copies", shape=(8, 6))
    parameters = [(stack, ()), (copies, (4,))]
    whole = {
        name: torch.arange(size).view(shape)
        for name, size, shape in (("stack", 480, (6, 8, 10)), ("copies", 48, (8, 6)))
    }

    def work(groups):
        rank = groups.rank("tp", "cp", "dp")
        boxes = {
            "stack": Box((0, 0, 3 * rank), (6, 8, min(3, 10 - 3 * rank))),
            "copies": Box((4 * (rank // 2), 0), (4, 6)),
        }
        parts = {name: _part(whole[name], box).double() for name, box in boxes.items()}
        found = WholeMatrices(parameters, boxes, torch.device("cpu"), torch.float64, groups.group("tp", "cp", "dp"))
        seen = []

        def change(matrices):
            seen.extend(matrix.tolist() for matrix in matrices)
            return [matrix + 0.5 for matrix in matrices]

        with count_collectives() as names:
            found.update(parts, change)
        right = all(torch.equal(parts[name], _part(whole[name], box) + 0.5) for name, box in boxes.items())
        return right, seen, len(names)

    results = run_distributed(ParallelLayout(world=4, tp=2), work)
    assert all(right for right, _, _ in results)
    seen = [matrix for _, some, _ in results for matrix in some]
    expected = [*whole["stack"].tolist(), *whole["copies"].split(4)]
    assert sorted(seen) == sorted(matrix if isinstance(matrix, list) else matrix.tolist() for matrix in expected)
    assert sorted(len(some) for _, some, _ in results) == [2, 2, 2, 2]
    assert {count for _, _, count in results} == {4}  # there and back, two rounds


def _part(whole, box):
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].clone()


@pytest.mark.parametrize("changes", [{"steps": 0}, {"momentum": 1.0}, {"scale": 0.0}])
def test_wrong_settings_are_named(changes):
    (problem,) = OptimConfig(muon=MuonConfig(**changes)).problems()
    assert problem.key == f"optim.muon.{next(iter(changes))}"


@pytest.mark.parametrize(("kind", "of_group"), [("adamw", "default"), ("muon", "adamw")])
def test_rows_of_what_adamw_updates_are_without_effect_and_refused(kind, of_group):
    group = OptimGroup(pattern="a*", rows=(4,), kind=of_group)
    (problem,) = OptimConfig(kind=kind, groups=(group,)).problems()
    assert (problem.key, problem.value) == ("optim.groups", (4,))
    assert problem.rule.startswith("rows of 'a*' are for Muon")
    assert not OptimConfig(kind="adamw", groups=(replace(group, kind="muon"),)).problems()


@pytest.mark.parametrize("changes", [{"lr_scale": -1.0}, {"weight_decay": -0.1}, {"rows": (0,)}])
def test_a_wrong_group_is_named(changes):
    (problem,) = OptimConfig(groups=(OptimGroup(pattern="a*", kind="muon", **changes),)).problems()
    assert problem.key == "optim.groups"
    assert problem.rule.startswith(f"{next(iter(changes))} of 'a*' must")
