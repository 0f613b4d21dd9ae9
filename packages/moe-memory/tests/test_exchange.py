"""State that one world has saved is continued by another (R098)."""

import pytest
import torch
from torch import nn

from moe_memory import Fsdp, OptimConfig, Zero1
from moe_memory.testing.session import assembled, copied, overwrite
from moe_parallel import AxisGroups, ParallelLayout, run_distributed, shard_specs

pytestmark = pytest.mark.dist


class Uneven(nn.Module):
    """One tensor of 4096 elements and twenty scalars, so that ranks own very different numbers of parameters."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(512, 8, bias=False, dtype=torch.float64)
        self.scalars = nn.ParameterList(nn.Parameter(torch.tensor(0.1 * n, dtype=torch.float64)) for n in range(20))

    def forward(self, x):
        return (self.large(x) * sum(self.scalars)).square().sum() / 512


def stay(engine_type, first_step, saved):
    """Two steps on the ranks of the groups, from the state that was saved if there is one."""

    def work(groups):
        torch.manual_seed(1)
        model = Uneven()
        engine = engine_type(OptimConfig(), groups, compute_dtype=torch.float64)
        specs = shard_specs(model, [], groups)
        model = engine.wrap(model, specs)
        if saved is not None:
            overwrite(engine, saved)
            engine.load_finished({"updates": first_step})
        for step in range(first_step, first_step + 2):
            x = torch.randn(6, 512, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x[groups.rank("dp") :: groups.size("dp")]).backward()
            engine.grads_ready(list(specs), last=True)
            engine.finish()
            engine.step(1e-2, 0.5)
        assert engine.state_values() == {"updates": first_step + 2}
        return copied(engine.state_tensors())

    return work


@pytest.mark.parametrize("engines", [(Zero1, Zero1), (Zero1, Fsdp), (Fsdp, Zero1)], ids=["zero1", "mixed", "swapped"])
def test_r098_two_ranks_then_three_then_one(engines):
    saved = straight = None
    for number, world in enumerate((2, 3, 1)):
        work = stay(engines[number % 2], 2 * number, saved)
        results = run_distributed(ParallelLayout(world=world), work)
        assert len({len(parts) for parts in results}) == min(world, 2)  # the first rank has the scalars
        saved = {name: tensor.numpy() for name, tensor in assembled(results, f"{world} ranks").items()}
        parts = assembled([stay(Zero1, 2 * number, straight)(AxisGroups())], "straight")
        straight = {name: tensor.numpy() for name, tensor in parts.items()}
    assert saved.keys() == straight.keys()
    for name, expected in straight.items():
        assert abs(saved[name] - expected).max() <= 1e-12 * abs(expected).max(), name
