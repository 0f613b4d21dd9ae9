"""Published faults of gradients over ranks, with the numbers that are right: dispatcher, engine and norm together."""

import math

import pytest
import torch
from torch import nn

from moe_comm import AllToAllConfig, build_dispatcher, combine, dispatch
from moe_kernels import Routing
from moe_memory import MemoryConfig, OptimConfig
from moe_memory.data_parallel import build_engine
from moe_parallel import ParallelLayout, PlanRule, all_gather, reduce_norm_parts, run_distributed, shard_specs
from moe_parallel.sharding import ParameterKind
from moe_train.assemble import assemble
from moe_train.config.load import load_config
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, SMALL, microbatches, short_corpus

pytestmark = pytest.mark.dist

EXPERTS = PlanRule(pattern="*experts*", kind=ParameterKind.EXPERT, placements=(("ep", 0),))


class ScalarExperts(nn.Module):
    """y = w_e x for the expert e of each token, through the all-to-all; the dense scale multiplies x."""

    def __init__(self, groups, num_experts, num_features=1):
        super().__init__()
        self.dispatcher = build_dispatcher(AllToAllConfig(), groups, num_experts)
        self.num_experts = num_experts
        self.dense = nn.ModuleList([Scale(1, num_features)])
        self.experts = nn.ModuleList([Scale(num_experts // groups.size("ep"), num_features)])

    def forward(self, x_TD, ids_T):
        x_TD = x_TD * self.dense[0]()[0]
        probs_TK = torch.ones(len(ids_T), 1, dtype=x_TD.dtype)
        plan = self.dispatcher.plan(Routing(ids_TK=ids_T[:, None], probs_TK=probs_TK, num_experts=self.num_experts))
        sent = dispatch(self.dispatcher, plan, x_TD, probs_TK)
        expert_R = torch.repeat_interleave(torch.arange(len(plan.counts_E)), plan.counts_E)
        rows_RD = sent.rows_RD * self.experts[0]()[expert_R] * sent.probs_R[:, None]
        return combine(self.dispatcher, plan, rows_RD)


class Scale(nn.Module):
    def __init__(self, rows, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, features, dtype=torch.float64))

    def forward(self):
        return self.weight * 1


def complete_gradients(mesh, engine_name, x_TD, ids_T, num_experts, weight):
    """Gradients that this rank owns, the norm and the largest gradient, of the loss weight * sum of all outputs."""
    model = ScalarExperts(mesh, num_experts, x_TD.shape[1])
    specs = shard_specs(model, [EXPERTS], mesh)
    engine = build_engine(
        MemoryConfig(data_parallel=engine_name, compute_dtype="float64"),
        OptimConfig(),
        mesh,
        compute_dtype=torch.float64,
    )
    model = engine.wrap(model, specs)
    (model(x_TD, ids_T).sum() * weight).backward()
    engine.grads_ready(list(specs), last=True)
    engine.finish()
    owned = [(part.name, part.box.offset, part.tensor.flatten().tolist()) for part in engine.gradient_tensors()]
    norms = [float(reduce_norm_parts(engine.norm_parts(order), order, mesh)) for order in (2.0, math.inf)]
    return owned, norms


def whole(results, name):
    """Values of a parameter with one feature, in the order of their rows."""
    parts = [(offset, values) for owned, _ in results for found, offset, values in owned if found == name and values]
    return [value for _, values in sorted(parts) for value in values]


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
def test_r056_expert_gradients_are_divided_by_all_tokens(engine, world):
    """Tokens 1, 2, 3, 4 to experts 0, 1, 0, 1 on two ranks or one each on four; the mean over four tokens."""

    def on_rank(mesh):
        x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64).chunk(world)[mesh.rank("world")]
        ids = torch.tensor([0, 1, 0, 1]).chunk(world)[mesh.rank("world")]
        return complete_gradients(mesh, engine, x, ids, 2, 1 / 4)

    results = run_distributed(ParallelLayout(world=world, ep=2), on_rank, timeout_s=20)
    assert whole(results, "experts.0.weight") == [1.0, 1.5]
    assert whole(results, "dense.0.weight") == [2.5]


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_r057_one_norm_over_dense_and_experts_of_all_ranks(engine, world, ep):
    """Squared norms 20 and 100 at two experts, replicas counted once; other experts, if any, get no token."""

    def on_rank(mesh):
        rank = mesh.rank("world")
        x = torch.tensor([[2.0, 4.0], [6.0, 8.0]], dtype=torch.float64)[rank : rank + 1]
        ids = torch.tensor([0, ep // 2])[rank : rank + 1]
        return complete_gradients(mesh, engine, x, ids, ep, 1.0)

    results = run_distributed(ParallelLayout(world=world, ep=ep), on_rank, timeout_s=20)
    # The dense scale multiplies both tokens: its gradient is their sum, (8, 12).
    expected = [math.sqrt(20 + 100 + 8**2 + 12**2), 12.0]
    for _, norms in results:
        assert norms == pytest.approx(expected, rel=1e-14)
    assert len({tuple(norms) for _, norms in results}) == 1


def config_for(layout, *overrides):
    settings = [*SMALL, *ALL_LOSSES, "model.num_experts=8", f"parallel.ep={layout.ep}", *overrides]
    return load_config("tiny_moe", [], settings, world=layout.world).config


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
def test_r054_experts_differ_and_replicas_are_equal(engine):
    def on_rank(mesh):
        training = assemble(config_for(mesh.layout, f"memory.data_parallel={engine}"), mesh)
        return [(p.name, p.box.offset, p.tensor.numpy(force=True)) for p in training.engine.state_tensors()]

    def masters(layout):
        found = {}
        for parts in run_distributed(layout, on_rank, timeout_s=20):
            for name, offset, values in parts:
                if name.startswith("master/") and values.size:
                    found.setdefault(name, []).append((offset, values))
        return found

    def joined(parts, shape):
        tensor = torch.full(shape, torch.nan)
        for offset, values in parts:
            tensor[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = torch.from_numpy(values)
        return tensor

    with short_corpus():
        alone, spread = masters(ParallelLayout(world=1)), masters(ParallelLayout(world=4, ep=2))
    assert alone.keys() == spread.keys()
    for name, ((_, values),) in alone.items():
        want = torch.from_numpy(values)
        assert torch.equal(joined(spread[name], want.shape), want), name
        if ".experts." in name:
            assert all(not torch.equal(want[i], want[j]) for i in range(8) for j in range(i))


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
def test_r051_experts_of_a_rank_without_tokens_decay_only(engine):
    """Every token is forced to experts 0 and 1: three of four ranks compute on no row, forward and backward."""

    def on_rank(mesh):
        settings = [
            f"memory.data_parallel={engine}",
            "optim.weight_decay=0.5",
            "optim.lr=0.01",
            "optim.schedule=constant",
        ]
        training = assemble(config_for(mesh.layout, *settings), mesh)
        for block in training.model.layers:
            inner = block.moe.router.forward
            block.moe.router.forward = lambda x, valid, ids, scale, inner=inner: inner(
                x, valid, torch.tensor([0, 1]).expand(len(x), 2), scale
            )
        before = {p.name: p.tensor.clone() for p in training.engine.state_tensors()}
        found = {}

        def keep():
            found.update({p.name: p.tensor.clone() for p in training.engine.gradient_tensors()})

        batch = training.data.train.next_batch(training.share.rows(8))
        result = run_step(training, microbatches(training, batch), updates=0, window=None, inspect=keep)
        assert result.statistics.counts[:, 2:].sum() == 0
        for part in training.engine.state_tensors():
            slot, name = part.name.split("/", 1)
            if ".experts." not in name or not part.tensor.numel():
                continue
            idle = slice(None) if mesh.rank("ep") > 0 else slice(0, 0)
            assert bool((found[name][idle] == 0).all()), name
            if slot == "master":
                torch.testing.assert_close(part.tensor[idle], before[part.name][idle] * (1 - 0.01 * 0.5))
            else:
                assert bool((part.tensor[idle] == 0).all())
        copies = all_gather(torch.tensor([result.loss]), mesh.group("world")).wait()
        assert bool((copies == copies[0]).all())

    with short_corpus():
        run_distributed(ParallelLayout(world=4, ep=4), on_rank, timeout_s=20)
