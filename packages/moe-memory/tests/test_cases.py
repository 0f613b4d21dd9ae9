"""Cases from bug reports of other frameworks that concern both engines."""

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, OptimConfig, Zero1
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL
from moe_memory.testing.session import Session, assembled, copied
from moe_parallel import AxisGroups, ParallelLayout, ParameterKind, ShardSpec, run_distributed

pytestmark = [pytest.mark.dist, pytest.mark.parametrize("engine_type", [Zero1, Fsdp])]


class Experts(nn.Module):
    """Scalar experts of this rank in a list, whose elements the engine fsdp shards."""

    def __init__(self, groups):
        super().__init__()
        self.layers = nn.ModuleList([_Layer(groups)])

    def forward(self, x_N, expert_N):
        return self.layers[0](x_N, expert_N)


class _Layer(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.first = groups.rank("ep") * 2 // groups.size("ep")
        self.w_E1 = nn.Parameter(torch.ones(2 // groups.size("ep"), 1))

    def forward(self, x_N, expert_N):
        """Terms of the mean over four tokens that the experts here add."""
        total = self.w_E1.sum() * 0
        for index, w_1 in enumerate(self.w_E1):
            total = total + (w_1 * x_N[expert_N == self.first + index]).sum() / 4
        return total


@pytest.mark.parametrize(
    "layout", [ParallelLayout(world=2, ep=2), ParallelLayout(world=4, ep=2), ParallelLayout(world=2)], ids=str
)
def test_r056_gradients_of_experts_are_divided_by_nothing(engine_type, layout):
    """Tokens 1 2 | 3 4 go to the experts 0 1 | 0 1; averaged over replicas of experts only they would be [2, 3]."""

    def work(groups):
        model = Experts(groups)
        spec = ShardSpec(name="layers.0.w_E1", shape=(2, 1), kind=ParameterKind.EXPERT, placements=(("ep", 0),))
        engine = engine_type(OptimConfig(), groups, compute_dtype=torch.float32)
        model = engine.wrap(model, {spec.name: spec})
        x_N, expert_N = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 0, 1])
        # Replicas of experts see other tokens; what was dispatched to the experts of this rank is picked in the model.
        here = torch.arange(4) // 2 % groups.size("edp") == groups.rank("edp")
        model(x_N[here], expert_N[here]).backward()
        engine.grads_ready([spec.name], last=True)
        engine.finish()
        return copied(engine.gradient_tensors())

    gradient = assembled(run_distributed(layout, work), str(layout))["layers.0.w_E1"]
    assert gradient.flatten().tolist() == [1.0, 1.5]


def test_r068_a_float32_router_and_an_expert_that_is_used_in_the_second_microbatch_only(engine_type):
    def work(groups):
        engine = engine_type(CONFIG, groups, compute_dtype=torch.bfloat16, keep_internal=KEEP_INTERNAL)
        session = Session(engine, groups, torch.bfloat16, seed=3)
        first, second = torch.tensor([0, 3, 6, 3]), torch.tensor([1, 4, 0, 7])  # token % 3 is the expert
        session.accumulate([first], last=False)
        session.accumulate([second])
        gradients = copied(engine.gradient_tensors())
        engine.step(0.02, 1.0)
        engine.synchronize()
        return gradients, session.model.layers[0].router.weight_ED.dtype

    results = run_distributed(ParallelLayout(world=2), work)
    assert {dtype for _, dtype in results} == {torch.float32}
    found = assembled([gradients for gradients, _ in results], "two ranks")
    expected = assembled([work(AxisGroups())[0]], "one process")
    used = found["layers.0.experts.w1_EDF"]
    assert float(used[1].abs().max()) > 0
    assert bool((used[2:] == 0).all())
    for name, gradient in expected.items():
        assert gradient.dtype == found[name].dtype == torch.float32
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=0.02 * float(gradient.abs().sum()) / max(gradient.numel(), 1) ** 0.5
        )


def test_r019_buffers_keep_their_bits_and_dtype(engine_type):
    """An expert bias in a narrow band would lose most of its values in bfloat16."""
    expected = 6.9 + 1e-3 * torch.arange(64)

    def work(groups):
        engine = engine_type(CONFIG, groups, compute_dtype=torch.bfloat16)
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("bias_E", expected.clone())
        specs = {name: ShardSpec(name=name, shape=tuple(p.shape)) for name, p in model.named_parameters()}
        model = engine.wrap(model, specs)
        for _ in range(2):
            model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
            engine.grads_ready(list(specs), last=True)
            engine.finish()
            engine.step(0.02, 1.0)
        bias_E = model[0].bias_E
        return bias_E.dtype == torch.float32 and torch.equal(bias_E, expected)

    assert all(run_distributed(ParallelLayout(world=2), work))
