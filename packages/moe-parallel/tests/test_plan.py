"""The plan: specs by name pattern, and boxes that tile the whole tensor."""

from itertools import product

import pytest
import torch
from torch import nn

from moe_parallel import (
    AxisGroups,
    Box,
    MoeParallelError,
    ParallelLayout,
    ParameterKind,
    PlanRule,
    ShardSpec,
    local_box,
    shard_specs,
)
from moe_parallel.plan import part_of
from moe_parallel.testing import legal_layouts

EXPERT = ParameterKind.EXPERT


def model():
    """Two layers with experts, the part of one rank: 3 of the experts."""
    layers = [
        nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "experts": nn.ParameterDict({"w1": nn.Parameter(torch.randn(3, 4, 6))})}
        )
        for _ in range(2)
    ]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(4, 10, bias=False)})


RULES = (
    PlanRule(pattern="*.experts.*", kind=EXPERT, placements=(("ep", 0),)),
    PlanRule(pattern="head.weight", placements=(("tp", 0),)),
)


def test_specs_say_what_the_local_parameters_are_globally(places_of):
    groups = places_of(ParallelLayout(world=8, tp=2, ep=4), 5)
    specs = shard_specs(model(), RULES, groups)
    assert list(specs) == [name for name, _ in model().named_parameters()]
    assert specs["layers.1.experts.w1"] == ShardSpec(
        name="layers.1.experts.w1", shape=(12, 4, 6), kind=EXPERT, placements=(("ep", 0),)
    )
    assert specs["head.weight"] == ShardSpec(name="head.weight", shape=(20, 4), placements=(("tp", 0),))
    assert specs["layers.0.norm.weight"] == ShardSpec(name="layers.0.norm.weight", shape=(4,))
    assert {spec.kind for spec in shard_specs(model(), (), AxisGroups()).values()} == {ParameterKind.DENSE}


def test_the_first_rule_that_matches_wins():
    rules = (PlanRule(pattern="head.*", grad_sum_axes=("tp",)), PlanRule(pattern="*", placements=()))
    specs = shard_specs(model(), rules, AxisGroups())
    assert specs["head.weight"].grad_sum_axes == ("tp",)
    assert specs["layers.0.norm.bias"].grad_sum_axes == ()


def test_r050_a_pattern_without_effect_is_an_error():
    rules = (*RULES, PlanRule(pattern="*.expert.*"), PlanRule(pattern="Head.weight"))
    with pytest.raises(MoeParallelError, match=r"match no parameter.*: \*\.expert\.\*, Head\.weight; param"):
        shard_specs(model(), rules, AxisGroups())
    with pytest.raises(MoeParallelError, match=r"none that an earlier pattern leaves: head\.\*"):
        shard_specs(model(), (PlanRule(pattern="*"), PlanRule(pattern="head.*")), AxisGroups())


def test_the_error_about_a_pattern_stays_short():
    large = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    with pytest.raises(MoeParallelError, match=r"9\.bias, \.\.\.$") as caught:
        shard_specs(large, (PlanRule(pattern="x"),), AxisGroups())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_a_dim_that_a_parameter_does_not_have(dim):
    with pytest.raises(MoeParallelError, match=rf"dim {dim} of layers\.0\.norm\.weight over tp, but it has 1 dims"):
        shard_specs(model(), (PlanRule(pattern="*.norm.*", placements=(("tp", dim),)),), AxisGroups())


@pytest.mark.parametrize(
    "wrong",
    [
        {"placements": (("ep", 0),)},  # experts forgotten
        {"placements": (("tp", 0),), "kind": EXPERT},
        {"placements": (("dp", 0),)},  # the engine's, not the plan's
        {"placements": (("sp", 0),)},
        {"grad_sum_axes": ("ep",)},
        {"placements": (("tp", 0), ("tp", 1))},
        {"placements": (("tp", 0),), "grad_sum_axes": ("tp",)},  # different parts cannot be summed
    ],
)
def test_a_rule_names_axes_of_its_view_once(wrong):
    with pytest.raises(MoeParallelError, match=r"the plan rule for a\.\* names the axes .* at most once"):
        PlanRule(pattern="a.*", **wrong)


@pytest.mark.parametrize(
    "spec",
    [
        ShardSpec(name="w", shape=(12, 6), placements=(("tp", 1),)),
        ShardSpec(name="w", shape=(24, 6), kind=EXPERT, placements=(("ep", 0),)),
        ShardSpec(name="w", shape=(24, 24), kind=EXPERT, placements=(("ep", 0), ("etp", 1))),
        ShardSpec(name="w", shape=(144, 2), kind=EXPERT, placements=(("ep", 0), ("etp", 0))),
        ShardSpec(name="w", shape=(144,), kind=EXPERT, placements=(("etp", 0), ("ep", 0))),
    ],
    ids=lambda spec: "-".join(f"{axis}{dim}" for axis, dim in spec.placements),
)
def test_boxes_tile_the_whole_tensor(spec, places_of):
    axes = [axis for axis, _ in spec.placements]
    for layout in legal_layouts(12):
        if any(spec.shape[dim] % layout.size(axis) for axis, dim in spec.placements):
            continue
        covered = torch.zeros(spec.shape, dtype=torch.int64)
        boxes = {}
        for rank in range(12):
            places = places_of(layout, rank)
            box = local_box(spec, places)
            boxes.setdefault(tuple(places.rank(axis) for axis in axes), set()).add(box)
        for place, of_place in boxes.items():
            (box,) = of_place  # every other axis replicates
            covered[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
            assert all(0 <= p < layout.size(axis) for axis, p in zip(axes, place, strict=True))
        assert torch.equal(covered, torch.ones_like(covered)), layout


def test_of_nested_placements_the_first_is_the_outermost(places_of):
    layout = ParallelLayout(world=6, ep=3, etp=2)
    outer_ep = ShardSpec(name="w", shape=(12,), kind=EXPERT, placements=(("ep", 0), ("etp", 0)))
    outer_etp = ShardSpec(name="w", shape=(12,), kind=EXPERT, placements=(("etp", 0), ("ep", 0)))
    for ep, etp in product(range(3), range(2)):
        places = places_of(layout, etp + 2 * ep)
        assert local_box(outer_ep, places) == Box((4 * ep + 2 * etp,), (2,))
        assert local_box(outer_etp, places) == Box((6 * etp + 2 * ep,), (2,))


def test_a_dim_that_does_not_divide_names_both_numbers(places_of):
    spec = ShardSpec(name="head.weight", shape=(4, 10), placements=(("tp", 1),))
    with pytest.raises(MoeParallelError, match=r"dim 1 of head\.weight has 10 entries, not a multiple of tp = 4"):
        local_box(spec, places_of(ParallelLayout(world=4, tp=4), 0))
    nested = ShardSpec(name="w", shape=(6,), kind=EXPERT, placements=(("ep", 0), ("etp", 0)))
    with pytest.raises(MoeParallelError, match="has 3 entries, not a multiple of etp = 2"):
        local_box(nested, places_of(ParallelLayout(world=4, ep=2, etp=2), 0))


def test_specs_and_boxes_agree_on_every_rank(places_of):
    layout = ParallelLayout(world=8, tp=2, ep=4)
    for rank in range(8):
        groups, local = places_of(layout, rank), model()
        for name, spec in shard_specs(local, RULES, groups).items():
            assert local_box(spec, groups).shape == tuple(local.get_parameter(name).shape)


def test_specs_of_a_whole_model_are_the_same_whatever_the_rank():
    whole = model()
    specs = shard_specs(whole, RULES)
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(parameter.shape) for name, parameter in whole.named_parameters()
    }
    assert specs["head.weight"].placements == (("tp", 0),)
    with torch.device("meta"):
        assert shard_specs(model(), RULES) == specs


def test_whether_parts_are_uneven_goes_from_the_rule_to_the_spec(places_of):
    rules = (PlanRule(pattern="head.weight", placements=(("tp", 0),), uneven=True),)
    spec = shard_specs(model(), rules)["head.weight"]
    assert spec == ShardSpec(name="head.weight", shape=(10, 4), placements=(("tp", 0),), uneven=True)
    layout = ParallelLayout(world=4, tp=4)
    boxes = [local_box(spec, places_of(layout, rank)) for rank in range(4)]
    assert boxes == [Box((0, 0), (3, 4)), Box((3, 0), (3, 4)), Box((6, 0), (3, 4)), Box((9, 0), (1, 4))]


def test_the_whole_cannot_be_told_from_an_uneven_part(places_of):
    rules = (PlanRule(pattern="head.weight", placements=(("tp", 0),), uneven=True),)
    with pytest.raises(MoeParallelError, match=r"the parts of head\.weight are uneven, .* give shard_specs the whole"):
        shard_specs(model(), rules, places_of(ParallelLayout(world=2, tp=2), 0))
    one = places_of(ParallelLayout(world=2, ep=2), 0)
    assert shard_specs(model(), rules, one)["head.weight"].shape == (10, 4)


def test_parts_are_in_order_cover_everything_once_and_only_the_last_ones_are_short():
    for size in range(40):
        for ranks in range(1, 12):
            parts = [part_of(size, ranks, rank) for rank in range(ranks)]
            assert [n for start, stop in parts for n in range(start, stop)] == list(range(size))
            sizes = [stop - start for start, stop in parts]
            assert sizes == sorted(sizes, reverse=True)
            full = -(-size // ranks)
            assert len({n for n in sizes if 0 < n < full}) <= 1
            assert sum(0 < n < full for n in sizes) <= 1
            assert all(0 <= start <= stop <= size for start, stop in parts)
            if size % ranks == 0:
                assert set(sizes) == {size // ranks}


@pytest.mark.parametrize("placements", [(("ep", 0), ("etp", 0)), (("etp", 0), ("ep", 0)), (("ep", 0), ("etp", 1))])
def test_uneven_boxes_tile_the_whole_tensor(placements, places_of):
    for size in range(1, 14):
        spec = ShardSpec(name="w", shape=(size, 5), kind=EXPERT, placements=placements, uneven=True)
        for layout in (layout for layout in legal_layouts(6) if layout.ep * layout.etp == 6):
            covered = torch.zeros(spec.shape, dtype=torch.int64)
            for rank in range(6):
                box = local_box(spec, places_of(layout, rank))
                covered[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
            assert torch.equal(covered, torch.ones_like(covered)), (size, layout)
