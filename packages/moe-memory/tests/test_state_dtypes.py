"""Master weights, gradients and moments in dtypes of their own: kept, equal in every layout, moved bit for bit.

Gradients are whole numbers, whose sums are exact in every order, so that layouts can be compared bit for bit.
"""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, MoeMemoryError, OptimConfig, Zero1
from moe_memory.measure import LiveBytes
from moe_memory.optim import buffer as buffer_module
from moe_memory.optim.buffer import Buffer, Part
from moe_memory.optim.optimizer import Optimizer
from moe_memory.optim.rules import update_rule
from moe_memory.testing.model import index_of
from moe_memory.testing.session import assembled, copied, overwrite
from moe_parallel import (
    AxisGroups,
    Box,
    ParallelLayout,
    ParameterKind,
    PlanRule,
    ShardSpec,
    local_box,
    run_distributed,
    shard_specs,
)

EXPERT = ParameterKind.EXPERT
CONFIG = OptimConfig(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
LOW = replace(
    CONFIG, master_dtype="bfloat16", gradient_dtype="bfloat16", exp_avg_dtype="int8", exp_avg_sq_dtype="bfloat16"
)
INT8 = replace(CONFIG, exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
BF16 = replace(CONFIG, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")

SHAPES = {
    "column": (12, 600),
    "row": (600, 12),
    "wide": (3, 1100),
    "vector": (33,),
    "scalar": (),
    "one": (1, 1),
    "experts_w1": (4, 300, 2, 6),
    "experts_w2": (4, 6, 300),
    "experts_b": (4, 7),
}
RULES = (
    PlanRule(pattern="column", placements=(("tp", 0),)),
    PlanRule(pattern="row", placements=(("tp", 1),)),
    PlanRule(pattern="experts_w1", kind=EXPERT, placements=(("ep", 0), ("etp", 3))),
    PlanRule(pattern="experts_w2", kind=EXPERT, placements=(("ep", 0), ("etp", 1))),
    PlanRule(pattern="experts_*", kind=EXPERT, placements=(("ep", 0),)),
    PlanRule(pattern="*"),
)


class Linear(nn.Module):
    """A loss that is linear in every parameter: gradients are what a step says."""

    def __init__(self, groups, dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.specs = shard_specs(self, RULES)
        self.groups = groups
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.named_parameters():
            values = torch.randn(SHAPES[name], generator=generator)
            parameter.data = values[index_of(local_box(self.specs[name], groups))].to(dtype)

    def forward(self, gradients):
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            axes = ("edp",) if self.specs[name].kind is EXPERT else ("cp", "dp")
            rank, ranks = self.groups.rank(*axes), self.groups.size(*axes)
            # Each replica has the elements whose turn it is.
            turn = torch.arange(prod(SHAPES[name])).view(SHAPES[name]) % ranks == rank
            mine = (gradients[name] * turn)[index_of(local_box(self.specs[name], self.groups))]
            total = total + (parameter * mine.to(parameter.dtype)).float().sum()
        return total


def gradients_of(step):
    generator = torch.Generator().manual_seed(step)
    scale = {name: 10 ** (index % 2) for index, name in enumerate(SHAPES)}
    return {
        name: torch.randint(-9, 10, shape, generator=generator).float() * scale[name] for name, shape in SHAPES.items()
    }


def trained(engine_type, config, groups, dtype, steps, *, whole=None, shard_replicas=None):
    engine = engine_type(
        config, groups, compute_dtype=dtype, bucket_bytes=10_000, seed=5, shard_replicas=shard_replicas
    )
    model = engine.wrap(Linear(groups, dtype), Linear(groups, dtype).specs)
    if whole is not None:
        overwrite(engine, whole)
        engine.load_finished({"updates": steps[0]})
    before = copied(engine.state_tensors())
    for step in steps:
        model(gradients_of(step)).backward()
        engine.grads_ready(list(model.specs), last=True)
        engine.finish()
        engine.step(0.02, 0.5)
    return before, copied(engine.state_tensors())


def state(engine_type, config, layout, dtype, steps, *, whole=None, shard_replicas=None):
    """Whole tensors before and after the steps."""

    def work(groups):
        return trained(engine_type, config, groups, dtype, steps, whole=whole, shard_replicas=shard_replicas)

    results = [work(AxisGroups())] if layout.world == 1 else run_distributed(layout, work)
    return tuple(assembled([result[side] for result in results], str(layout)) for side in (0, 1))


def same_bits(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def raw(tables):
    return {n: (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy() for n, t in tables.items()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(INT8, torch.float32), (LOW, torch.bfloat16), (BF16, torch.float32)],
    ids=["int8", "low", "bf16"],
)
def test_r075_every_layout_has_the_same_bits_and_reads_those_of_any_other(config, dtype):
    alone = ParallelLayout(world=1)
    _, first = state(Zero1, config, alone, dtype, (0, 1))
    _, expected = state(Zero1, config, alone, dtype, (2, 3), whole=raw(first))
    same_bits(expected, state(Zero1, config, alone, dtype, range(4))[1])
    for engine_type, layout, run in (
        (Zero1, ParallelLayout(world=2), None),
        (Zero1, ParallelLayout(world=4), None),  # the last rank has nothing of some
        (Zero1, ParallelLayout(world=4, tp=2, ep=2), None),
        (Zero1, ParallelLayout(world=4, tp=2, etp=2), None),
        (Fsdp, ParallelLayout(world=2), None),
        (Fsdp, ParallelLayout(world=4), 2),
    ):
        _, found = state(engine_type, config, layout, dtype, (0, 1), shard_replicas=run)
        same_bits(found, first)
        loaded, continued = state(engine_type, config, layout, dtype, (2, 3), whole=raw(found), shard_replicas=run)
        same_bits(loaded, first)
        same_bits(continued, expected)


@pytest.mark.parametrize("config", [replace(LOW, kind="muon"), replace(LOW, kind="muon", exp_avg_dtype="bfloat16")])
def test_r097_muon_in_few_bits_continues_bit_for_bit(config):
    alone = ParallelLayout(world=1)
    _, first = state(Zero1, config, alone, torch.bfloat16, (0, 1))
    assert first["exp_avg/column"].dtype in (torch.uint8, torch.bfloat16)
    _, found = state(Zero1, config, alone, torch.bfloat16, (2, 3), whole=raw(first))
    same_bits(found, state(Zero1, config, alone, torch.bfloat16, range(4))[1])


def test_r075_state_has_the_dtypes_that_the_configuration_says():
    before, after = state(Zero1, LOW, ParallelLayout(world=1), torch.bfloat16, (0,))
    for tables in (before, after):
        kinds = {name: tensor.dtype for name, tensor in tables.items()}
        assert kinds.pop("exp_avg/vector") == torch.float32
        assert kinds.pop("exp_avg/scalar") == torch.float32
        assert kinds.pop("exp_avg/one") == torch.float32  # there is no dim to lie along
        assert kinds.pop("exp_avg/experts_b") == torch.float32  # stacked vectors
        expected = {
            "master": torch.bfloat16,
            "exp_avg": torch.uint8,
            "exp_avg_scale": torch.float32,
            "exp_avg_sq": torch.bfloat16,
        }
        assert {(name.split("/")[0], dtype) for name, dtype in kinds.items()} == set(expected.items())
        assert tables["exp_avg_scale/column"].shape == (12, 3)
        assert tables["exp_avg_scale/experts_w1"].shape == (4, 2, 2, 6)


def plain_update(config, weight, gradient, moments, update, factor):
    """The formulas of the paper, in float64."""
    m, v = moments
    gradient = gradient.double() * factor
    m = config.beta1 * m + (1 - config.beta1) * gradient
    v = config.beta2 * v + (1 - config.beta2) * gradient**2
    weight = weight.double() * (1 - 0.02 * config.weight_decay)
    step = m / (1 - config.beta1**update) / ((v / (1 - config.beta2**update)).sqrt() + config.eps)
    return weight - 0.02 * step, (m, v)


@pytest.mark.parametrize(
    ("config", "tolerance"), [(CONFIG, 1e-5), (BF16, 0.02), (INT8, 0.15)], ids=["float32", "bf16", "int8"]
)
def test_steps_are_near_those_of_the_paper(config, tolerance):
    """Within a share of the way that weights went, by what is rounded: weights of order one, moments, codes."""
    _, found = state(Zero1, config, ParallelLayout(world=1), torch.float32, range(4))
    start, _ = state(Zero1, config, ParallelLayout(world=1), torch.float32, ())
    for name in ("column", "experts_w1"):
        weight = start[f"master/{name}"]
        moments = (torch.zeros_like(weight).double(), torch.zeros_like(weight).double())
        for step in range(4):
            weight, moments = plain_update(config, weight, gradients_of(step)[name], moments, step + 1, 0.5)
        moved = float((weight - start[f"master/{name}"]).abs().max())
        assert float((found[f"master/{name}"] - weight).abs().max()) < tolerance * moved


@pytest.mark.parametrize("config", [INT8, BF16, LOW], ids=["int8", "bf16", "low"])
@pytest.mark.parametrize("size", [256, 5000])
def test_how_an_update_is_cut_into_chunks_changes_no_bit(config, size, monkeypatch):
    dtype = torch.bfloat16 if config is LOW else torch.float32
    _, expected = state(Zero1, config, ParallelLayout(world=1), dtype, (0, 1))
    monkeypatch.setattr(buffer_module, "CHUNK_ELEMENTS", size)
    _, found = state(Zero1, config, ParallelLayout(world=1), dtype, (0, 1))
    same_bits(found, expected)


def one_buffer(config, shape, dtype):
    spec = ShardSpec(name="w", shape=shape)
    rule = update_rule(config, spec, dtype)
    weights = torch.randn(prod(shape)).to(rule.master)
    return Buffer(weights=weights, parts=[Part(spec=spec, box=Box.whole(shape), start=0)], rule=rule, compute=dtype)


def optimizer_of(config, buffer):
    return Optimizer(config, [(buffer.parts[0].spec, buffer.rule)], [buffer], AxisGroups(), torch.device("cpu"))


@pytest.mark.parametrize("config", [INT8, LOW], ids=["int8", "low"])
def test_nothing_is_ever_whole_in_the_dtype_of_the_arithmetic(config, monkeypatch):
    monkeypatch.setattr(buffer_module, "CHUNK_ELEMENTS", 2**12)
    shape = (1024, 1024)
    buffer = one_buffer(config, shape, torch.bfloat16)
    optimizer = optimizer_of(config, buffer)
    gradient = torch.randn(prod(shape)).to(buffer.rule.gradient)
    optimizer.step(0.1, [gradient])  # makes the tables of codes, once
    with LiveBytes() as live:
        optimizer.step(0.1, [gradient])
    # A few tensors of a chunk, int64 the largest, beside what lives anyway and is seen when it is first touched.
    kept = sum(t.untyped_storage().nbytes() for t in (buffer.weights, gradient))
    kept += sum(t.nbytes for slot in optimizer._slots[0] for t in slot.tensors())
    assert live.peak_bytes < kept + 20 * 2**12 * 8 < kept + prod(shape) * 4


@pytest.mark.parametrize("share", [2.0**-10, 2.0**-12])
def test_small_updates_of_bfloat16_weights_are_not_lost(share):
    """Each is far below half a unit in the last place, where nearest rounding would leave all weights as they are."""
    config = replace(LOW, exp_avg_dtype="float32", exp_avg_sq_dtype="float32", weight_decay=0.0, eps=1e-30)
    buffer = one_buffer(config, (64, 64), torch.bfloat16)
    buffer.weights.fill_(1.0)
    optimizer = optimizer_of(config, buffer)
    for _ in range(64):
        optimizer.step(share, [torch.ones(64 * 64, dtype=torch.bfloat16)])  # each takes a step of the rate
    assert float(buffer.weights.float().mean()) == pytest.approx(1 - 64 * share, rel=0.01)


def test_a_second_moment_in_bfloat16_falls_when_gradients_do():
    """With a decay of 0.999 nearest rounding would keep it for ever."""
    config = replace(CONFIG, exp_avg_sq_dtype="bfloat16", beta2=0.999)
    buffer = one_buffer(config, (64, 64), torch.float32)
    optimizer = optimizer_of(config, buffer)
    optimizer._slots[0][1].values.fill_(1.0)
    for _ in range(100):
        optimizer.step(0.0, [torch.zeros(64 * 64)])
    assert float(optimizer._slots[0][1].values.float().mean()) == pytest.approx(0.999**100, rel=0.01)


def test_what_computes_in_the_internal_dtype_keeps_masters_and_gradients_there():
    engine = Zero1(LOW, AxisGroups(), compute_dtype=torch.bfloat16, keep_internal=["row"])
    model = engine.wrap(Linear(AxisGroups(), torch.bfloat16), Linear(AxisGroups(), torch.bfloat16).specs)
    model({name: 2 * tensor for name, tensor in gradients_of(0).items()}).backward()
    engine.grads_ready(list(model.specs), last=True)
    engine.finish()
    gradients = {part.name: part.tensor.dtype for part in engine.gradient_tensors()}
    masters = {part.name: part.tensor.dtype for part in engine.state_tensors() if part.name.startswith("master/")}
    for name in SHAPES:
        dtype = torch.float32 if name == "row" else torch.bfloat16
        assert (gradients[name], masters[f"master/{name}"]) == (dtype, dtype)


@pytest.mark.parametrize("name", ["master_dtype", "gradient_dtype"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_bits_than_the_weights_have_are_refused(name, dtype):
    with pytest.raises(MoeMemoryError, match=f"optim.{name} = 'bfloat16' would have fewer bits"):
        Zero1(replace(CONFIG, **{name: "bfloat16"}), AxisGroups(), compute_dtype=dtype)


def test_fsdp_cannot_keep_gradients_in_more_bits_than_masters():
    with pytest.raises(MoeMemoryError, match=r"optim\.gradient_dtype"):
        Fsdp(replace(CONFIG, master_dtype="bfloat16"), AxisGroups(), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_state_equals_the_fused_adamw_of_torch_to_the_last_bit(dtype):
    """Of long and of odd tensors, over whole vectors."""
    spec = ShardSpec(name="w", shape=(977, 16))
    rule = update_rule(CONFIG, spec, dtype)
    weights = torch.randn(977 * 16, dtype=dtype)
    judge = weights.clone().requires_grad_()
    buffer = Buffer(
        weights=weights, parts=[Part(spec=spec, box=Box.whole(spec.shape), start=0)], rule=rule, compute=dtype
    )
    optimizer = optimizer_of(CONFIG, buffer)
    reference = torch.optim.AdamW([judge], betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, fused=True)
    for rate in (0.1, 0.03, 0.02):
        gradient = torch.randn_like(weights)
        judge.grad = gradient * 0.7
        reference.param_groups[0]["lr"] = rate
        reference.step()
        optimizer.step(rate, [gradient], 0.7)
    assert torch.equal(weights, judge)
    for slot in optimizer._slots[0]:
        assert torch.equal(slot.values, reference.state[judge][slot.name])


@pytest.mark.parametrize("elements", [15, 33, 2**17 + 13])
def test_an_odd_end_is_updated_as_if_more_followed_it(elements):
    """As where a shard ends and its parameter does not: no bit depends on where it was cut."""
    whole, part = one_buffer(CONFIG, (elements + 100,), torch.float32), one_buffer(CONFIG, (elements,), torch.float32)
    part.weights.copy_(whole.weights[:elements])
    gradients = torch.randn(20, elements + 100)
    for buffer in (whole, part):
        optimizer = optimizer_of(CONFIG, buffer)
        for gradient in gradients:
            optimizer.step(0.1, [gradient[: buffer.weights.numel()].clone()])
    assert torch.equal(part.weights, whole.weights[:elements])


def test_combinations_of_dtypes_all_train():
    for exp_avg, exp_avg_sq, master, gradient in product(
        ("float32", "bfloat16", "int8"),
        ("float32", "bfloat16", "int8"),
        ("float32", "bfloat16"),
        ("float32", "bfloat16"),
    ):
        config = replace(
            CONFIG,
            exp_avg_dtype=exp_avg,
            exp_avg_sq_dtype=exp_avg_sq,
            master_dtype=master,
            gradient_dtype=gradient,
            weight_decay=0.0,
        )
        buffer = one_buffer(config, (8, 40), torch.bfloat16)
        optimizer = optimizer_of(config, buffer)
        first = float(buffer.weights.float().square().sum())
        for _ in range(10):
            optimizer.step(0.05, [buffer.weights.to(buffer.rule.gradient)])  # of half the square
        assert float(buffer.weights.float().square().sum()) < 0.8 * first
