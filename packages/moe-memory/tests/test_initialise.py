"""Initial values depend on seed, global name and global shape, and on nothing else (numerics §7)."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, MoeMemoryError, OptimConfig, Zero1, constant, draw, normal, ones, zeros
from moe_memory.initialise import initialise
from moe_memory.testing.session import assembled, copied
from moe_parallel import (
    AxisGroups,
    Box,
    ParallelLayout,
    ParallelPlan,
    ParameterKind,
    PlanRule,
    ShardSpec,
    apply_plan,
    local_box,
    run_distributed,
    without_storage,
)

SHAPES = {"embedding": (40, 16), "w1": (6, 16, 24), "w2": (6, 24, 16), "norm": (16,), "scale": (), "bias": (6, 24)}
EXPERTS = ("w1", "w2", "bias")
RULES = [("norm", ones()), ("bias", zeros()), ("scale", constant(0.5)), ("*", normal(0.02))]


def model_of(shapes, dtype=torch.float32):
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.full(shape, 99.0, dtype=dtype)))
    return model


def spec_of(name, shape):
    kind = ParameterKind.EXPERT if name in EXPERTS else ParameterKind.DENSE
    return ShardSpec(name=name, shape=shape, kind=kind)


def initialised(shapes=SHAPES, rules=RULES, seed=3, dtype=torch.float32):
    model = model_of(shapes, dtype)
    initialise(model, {name: spec_of(name, shape) for name, shape in shapes.items()}, rules, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def drawn(spec, box, rule=None, seed=3):
    """A box of a parameter, as a rank that holds only this box draws it."""
    values = torch.full(box.shape, 99.0)
    for index, piece in draw(spec, box, rule or normal(0.02), seed):
        values[index] = piece
    return values


def test_the_first_rule_that_matches_wins():
    found = initialised()
    assert (found["norm"] == 1).all()
    assert (found["bias"] == 0).all()
    assert found["scale"] == 0.5
    assert not (found["w1"] == 99).any()


def test_values_depend_on_neither_order_nor_other_parameters():
    alone = initialised({"w1": SHAPES["w1"]}, [("*", normal(0.02))])["w1"]
    backwards = initialised(dict(reversed(SHAPES.items())))
    for name, values in initialised().items():
        assert torch.equal(values, backwards[name])
    assert torch.equal(initialised()["w1"], alone)


def test_seed_and_name_change_every_value():
    shapes = {"a": (50, 4), "b": (50, 4)}
    one, two = (initialised(shapes, [("*", normal(1.0))], seed) for seed in (3, 4))
    assert not torch.isclose(one["a"], two["a"], atol=1e-6).all(1).any()
    assert not torch.isclose(one["a"], one["b"], atol=1e-6).all(1).any()
    again = initialised(shapes, [("*", normal(1.0))], 3)
    assert torch.equal(one["a"], again["a"])


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(1)
    first = initialised()
    expected = torch.randn(3)
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3), expected)
    second = initialised()
    assert torch.equal(first["w1"], second["w1"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_get_the_cast_of_the_same_float32_draws(dtype):
    reference = initialised()
    for name, values in initialised(dtype=dtype).items():
        assert values.dtype == dtype
        assert torch.equal(values, reference[name].to(dtype))


def test_a_default_device_does_not_change_the_draws():
    reference = initialised()
    model = model_of(SHAPES)
    with torch.device("meta"):
        initialise(model, {name: spec_of(name, shape) for name, shape in SHAPES.items()}, RULES, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference[name])


def test_r054_all_experts_are_pairwise_different():
    experts = initialised({"w1": (64, 8, 8)}, [("*", normal(1.0))])["w1"]
    distance = torch.cdist(experts.flatten(1), experts.flatten(1)) + torch.eye(64) * 99
    assert float(distance.min()) > 5.0


def test_neighbouring_experts_are_independent():
    experts = initialised({"w1": (4, 200, 200)}, [("*", normal(1.0))])["w1"].flatten(1).double()
    correlation = torch.corrcoef(experts) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / 200


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_r054_each_rank_draws_its_experts_as_the_whole_has_them(ep):
    whole = initialised()["w1"]
    count = 6 // ep
    for rank in range(ep):
        mine = drawn(spec_of("w1", (6, 16, 24)), Box((rank * count, 0, 0), (count, 16, 24)))
        assert torch.equal(mine, whole[rank * count : (rank + 1) * count])


def test_a_box_of_several_dims_is_that_part_of_the_whole():
    whole = initialised()["w1"]
    mine = drawn(spec_of("w1", (6, 16, 24)), Box((2, 5, 8), (3, 4, 16)))
    assert torch.equal(mine, whole[2:5, 5:9, 8:24])


def test_only_the_experts_of_the_box_are_drawn():
    calls = []

    def rule(unit, generator):
        calls.append(tuple(unit.shape))
        unit.normal_(generator=generator)

    drawn(spec_of("w1", (6, 16, 24)), Box((2, 0, 0), (3, 16, 24)), rule)
    assert calls == [(1, 16, 24)] * 3
    calls.clear()
    drawn(spec_of("w1", (6, 16, 24)), Box((2, 0, 0), (0, 16, 24)), rule)
    assert calls == []


def test_large_dense_parameters_are_drawn_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("moe_memory.initialise._UNIT_ELEMENTS", 16 * 7)
    sizes = []

    def rule(unit, generator):
        sizes.append(unit.shape[0])
        unit.normal_(generator=generator)

    spec = spec_of("embedding", (40, 16))
    whole = drawn(spec, Box.whole((40, 16)), rule)
    assert sizes == [7, 7, 7, 7, 7, 5]
    for first, count, units in ((0, 40, 6), (7, 7, 1), (5, 10, 3), (33, 7, 2), (39, 1, 1), (0, 0, 0), (13, 0, 0)):
        sizes.clear()
        assert torch.equal(drawn(spec, Box((first, 4), (count, 8)), rule), whole[first : first + count, 4:12])
        assert len(sizes) == units
    assert not torch.equal(whole[:5], whole[7:12])


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 0), (2**24 + 5,)])
def test_odd_shapes(shape):
    values = initialised({"x": shape}, [("*", normal(1.0))])["x"]
    assert values.shape == shape
    assert values.isfinite().all()
    assert not (values == 99).any()


def test_normal_has_the_moments_that_it_claims():
    values = initialised({"x": (1000, 1000)}, [("*", normal(0.02))])["x"].double() / 0.02
    assert abs(float(values.mean())) < 5e-3
    assert float(values.std()) == pytest.approx(1.0, abs=5e-3)
    assert float((values.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=5e-3)
    assert float((values**4).mean()) == pytest.approx(3.0, abs=0.05)
    assert len(values.unique()) > 900_000


def refuses(match, shapes=SHAPES, rules=RULES, specs=None, groups=None):
    model = model_of(shapes)
    specs = {name: spec_of(name, shape) for name, shape in shapes.items()} if specs is None else specs
    with pytest.raises(MoeMemoryError, match=match):
        initialise(model, specs, rules, 1, groups)
    assert all((parameter == 99).all() for parameter in model.parameters())


def test_parameters_without_a_rule_are_named_all_of_them():
    refuses("matches the parameters embedding, w1, w2, scale; patterns are 'norm', 'bias'", rules=RULES[:2])


def test_r050_a_rule_that_reaches_nothing_is_named():
    refuses(r"the initial-value patterns 'router\*' reach no parameter", rules=[("router*", ones()), *RULES])
    refuses("'w1' reach no parameter", rules=[*RULES, ("w1", ones())])


def test_a_parameter_without_spec_is_named():
    refuses("no spec for the parameters w1, w2", specs={n: spec_of(n, s) for n, s in SHAPES.items() if n[0] != "w"})


def test_a_spec_of_another_name_is_refused():
    """Two parameters of one name would start with the same values."""
    specs = {name: spec_of(name, shape) for name, shape in SHAPES.items()} | {"w2": spec_of("w1", SHAPES["w2"])}
    refuses(r"specs call these parameters otherwise: w2 \(w1\)", specs=specs)


def test_parameters_without_memory_are_refused():
    with without_storage():
        model = model_of(SHAPES)
    with pytest.raises(MoeMemoryError, match=r"embedding, w1, .*are on the meta device, .*apply_plan"):
        initialise(model, {name: spec_of(name, shape) for name, shape in SHAPES.items()}, RULES, seed=3)


def test_a_sharded_parameter_is_refused_and_not_filled_as_if_it_were_whole():
    specs = {name: spec_of(name, shape) for name, shape in SHAPES.items()} | {"w1": spec_of("w1", (12, 16, 24))}
    refuses(r"w1 has shape \(6, 16, 24\) here; .* leaves \(12, 16, 24\)", specs=specs)


@pytest.mark.parametrize("rank", [0, 1])
def test_r095_a_rank_draws_its_experts_and_no_others(rank):
    class Half(AxisGroups):
        def size(self, *axes):
            return 2 if axes == ("ep",) else 1

        def rank(self, *axes):
            return rank if axes == ("ep",) else 0

    specs = {
        name: replace(spec_of(name, shape), placements=(("ep", 0),) * (name in EXPERTS))
        for name, shape in SHAPES.items()
    }
    model = model_of({name: local_box(spec, Half()).shape for name, spec in specs.items()})
    initialise(model, specs, RULES, 3, Half())
    whole = initialised()
    for name, parameter in model.named_parameters():
        expected = whole[name][3 * rank : 3 * rank + 3] if name in EXPERTS else whole[name]
        assert torch.equal(parameter, expected)
    refuses(r"w1 has shape \(6, 16, 24\) here; .* leaves \(3, 16, 24\)", specs=specs, groups=Half())


def test_a_dim_that_parts_rows_changes_no_value_and_no_block(monkeypatch):
    """Gate and up projection [2, F, D] as one matrix [2F, D]; a box has rows of both."""
    monkeypatch.setattr("moe_memory.initialise._UNIT_ELEMENTS", 16 * 7)
    matrix = drawn(spec_of("gate_up", (40, 16)), Box.whole((40, 16)), normal(1.0))
    spec = spec_of("gate_up", (2, 20, 16))
    assert torch.equal(drawn(spec, Box.whole((2, 20, 16)), normal(1.0)), matrix.view(2, 20, 16))
    part = drawn(spec, Box((0, 5, 2), (2, 10, 9)), normal(1.0))
    assert torch.equal(part, matrix.view(2, 20, 16)[:, 5:15, 2:11])


@pytest.mark.parametrize("sizes", [{"tp": 3, "etp": 2, "ep": 3}, {"tp": 8, "etp": 4, "ep": 1}])
def test_r095_ranks_of_tp_and_etp_draw_exactly_their_boxes_of_one_draw(sizes, monkeypatch):
    """Rows, columns, vocabularies that no degree divides (the last parts shorter or empty), and copies."""
    monkeypatch.setattr("moe_memory.initialise._UNIT_ELEMENTS", 16 * 7)  # parts end inside blocks of rows
    placements = {
        "embedding": (("tp", 0),),
        "head": (("tp", 1),),
        "w1": (("ep", 0), ("etp", 2)),
        "w2": (("etp", 1), ("ep", 0)),
        "bias": (("ep", 0), ("etp", 0)),
    }
    shapes = SHAPES | {"head": (5, 48), "embedding": (10, 16)}
    specs = {
        name: replace(spec_of(name, shape), placements=placements.get(name, ()), uneven=True)
        for name, shape in shapes.items()
    }
    whole = initialised(shapes, RULES)
    drawn = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for place in product(*map(range, sizes.values())):
        coordinates = dict(zip(sizes, place, strict=True))

        class Place(AxisGroups):
            def size(self, *axes):
                return sizes[axes[0]]

            def rank(self, *axes, coordinates=coordinates):
                return coordinates[axes[0]]

        boxes = {name: local_box(spec, Place()) for name, spec in specs.items()}
        model = model_of({name: box.shape for name, box in boxes.items()})
        initialise(model, specs, RULES, 3, Place())
        for name, box in boxes.items():
            index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
            assert torch.equal(model.get_parameter(name), whole[name][index])
            drawn[name][index] += 1
    ranks = prod(sizes.values())
    for name, count in drawn.items():
        assert (count == ranks // prod(sizes[axis] for axis, _ in placements.get(name, ()))).all()


def test_a_rule_that_leaves_values_is_seen_in_poisoned_memory(poisoned):
    """What is drawn is new memory; nothing of the parameter's old content can stay."""
    values = initialised({"x": (4,)}, [("*", lambda unit, generator: unit[:2].zero_())])["x"]
    assert values[:2].tolist() == [0, 0]
    assert values[2:].isnan().all()


class Stack(nn.Module):
    """Layers that can be called, of which a rank has parts of every kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.experts = nn.ModuleList([nn.Bilinear(8, 6, 4, bias=False)])
        self.norm = nn.LayerNorm(7)

    def forward(self):
        raise NotImplementedError


RULES_OF_STACK = (
    PlanRule(pattern="layers.*.weight", placements=(("tp", 0),)),
    PlanRule(pattern="layers.*.bias", placements=(("tp", 0),)),
    PlanRule(pattern="experts.*", kind=ParameterKind.EXPERT, placements=(("ep", 0), ("etp", 2))),
    PlanRule(pattern="norm.*"),
)


@pytest.mark.dist
@pytest.mark.parametrize("engine_type", [Zero1, Fsdp])
def test_r095_a_model_made_without_storage_starts_the_same_in_every_layout_and_engine(engine_type):
    """Made on the meta device, drawn in parts, given to an engine: master weights are those of one process."""

    def work(groups):
        with without_storage():
            model = Stack().to(torch.bfloat16)
        specs = apply_plan(model, ParallelPlan(parameters=RULES_OF_STACK), groups, device=torch.device("cpu"))
        rules = [("norm.*", ones()), ("*", normal(0.02))]
        initialise(model, specs, rules, seed=3, groups=groups)
        engine = engine_type(OptimConfig(), groups, compute_dtype=torch.bfloat16, keep_internal=["norm.*"])
        engine.wrap(model, specs)
        return copied(part for part in engine.state_tensors() if part.name.startswith("master/"))

    expected = assembled([work(AxisGroups())], "one process")
    for layout in (ParallelLayout(world=2, tp=2, ep=2), ParallelLayout(world=4), ParallelLayout(world=4, tp=2, etp=2)):
        found = assembled(run_distributed(layout, work), str(layout))
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
