"""The closed formula of docs/activation-memory.md is what autograd keeps, to the byte."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from moe_kernels.experts import GroupedExperts
from moe_kernels.grouped_gemm import select_grouped_gemm
from moe_memory import LayerUnits, SavedBytes
from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble
from moe_train.config.checks import layout_of, mesh_of
from moe_train.config.load import load_config
from moe_train.config.toml import toml_value
from moe_train.data.microbatches import next_step
from moe_train.models.activation_bytes import moe_layer_bytes
from moe_train.models.moe import MoELayer
from moe_train.scale import LoadWindow
from moe_train.step import run_step
from moe_train.testing import SMALL, short_corpus

NO_LOSSES = tuple(f"model.balance.{name}=0" for name in ("aux", "seq", "glob", "z"))
BASE = (*SMALL, *NO_LOSSES, "model.num_experts=8", "model.num_layers=1")
LOSSES = {
    "none": (),
    "aux": ("model.balance.aux=0.1",),
    "all": tuple(f"model.balance.{name}=0.1" for name in ("aux", "seq", "glob", "z")),
    "seq z": ("model.balance.seq=0.1", "model.balance.z=0.1"),
    "glob": ("model.balance.glob=0.1",),
}
ROUTERS = {
    "softmax": (),
    "raw softmax": ("model.router.normalize=false", "model.router.softmax_order=before_topk"),
    "sigmoid": ("model.router.score=sigmoid", "model.router.scale=2.5", "model.balance.bias_rate=0.01"),
    "raw sigmoid": ("model.router.score=sigmoid", "model.router.normalize=false"),
    "jitter": ("model.router.jitter=0.1",),
    "groups": ("model.router.groups=4", "model.router.group_top_k=2", "model.router.score=sigmoid"),
}
PARTS = {
    "plain": (),
    "shared": ("model.shared_features=9",),
    "gated": ("model.shared_features=9", "model.shared_gate=true"),
    "latent": ("model.moe_latent_features=10",),
    "both": ("model.moe_latent_features=10", "model.shared_features=9"),
    "capacity": ("model.capacity.factor=0.6", "model.shared_features=9"),
}
UNITS = {
    "nothing": (),
    "moe_act": ("moe_act",),
    "shared": ("moe_act", "shared_experts"),
    "norms": ("layernorm", "core_attn"),
    "moe": ("moe",),
}
DTYPES = ("float32", "bfloat16", "float64")
TABLES = (DTYPES, LOSSES, ROUTERS, PARTS, UNITS)


def covering(tables):
    """Rows such that any two values of different tables meet in one, found greedily."""
    tables = [list(table) for table in tables]
    pairs = [(i, j) for i in range(len(tables)) for j in range(i)]
    open_pairs = {(i, a, j, b) for i, j in pairs for a in tables[i] for b in tables[j]}
    while open_pairs:
        best = max(product(*tables), key=lambda row: sum((i, row[i], j, row[j]) in open_pairs for i, j in pairs))
        open_pairs -= {(i, best[i], j, best[j]) for i, j in pairs}
        yield best


def kept_and_formula(config, groups=None):
    """Bytes that the first forward of the MoE layer keeps, and those of the formula."""
    run = assemble(config, groups)
    (layer,) = [module for module in run.model.modules() if isinstance(module, MoELayer)]
    found = []
    run_part, plan_of, plans = LayerUnits.run, layer.dispatcher.plan, []

    def measured(units, unit, *arguments, **more):
        if unit != "moe":
            return run_part(units, unit, *arguments, **more)
        with SavedBytes(run.model.parameters()) as saved:
            result = run_part(units, unit, *arguments, **more)
        found.append(saved.total_bytes)
        return result

    def planned(routing, *arguments):
        plans.append((len(routing.ids_TK), plan_of(routing, *arguments)))
        return plans[-1][1]

    layer.dispatcher.plan = planned
    window = LoadWindow(counts_LE=torch.ones(1, 8, dtype=torch.int64), num_tokens=8)
    step = next_step(run.data.train, run.cut).microbatches
    with patch.object(LayerUnits, "run", measured):
        run_step(run, step, updates=0, window=window)
    batch = step[0].batch
    tokens, plan = plans[0]
    dtype = getattr(torch, config.memory.compute_dtype)
    expected = moe_layer_bytes(
        config.model,
        tokens=tokens,
        rows=plan.num_rows,
        local_experts=len(plan.counts_E),
        compute_bytes=dtype.itemsize,
        internal_bytes=max(dtype.itemsize, 4),
        balance_groups=batch.token_BS.shape[0],
        segments=batch.token_BS.shape[0],
        tp=config.parallel.tp,
        etp=config.parallel.etp,
        sequence_parallel=config.parallel.sequence_parallel,
        units=config.memory.recompute,
    )
    return found[0], expected, plan.num_rows


def config_of(dtype, losses, router, part, units, *more, world=1):
    options = (*LOSSES[losses], *ROUTERS[router], *PARTS[part], f"memory.compute_dtype={dtype}")
    has_shared = any("shared_features" in option for option in PARTS[part])
    chosen = [unit for unit in UNITS[units] if unit != "shared_experts" or has_shared]
    recompute = f"memory.recompute={toml_value(chosen)}"
    return load_config("tiny_moe", [], [*BASE, *options, recompute, *more], world=world).config


@pytest.mark.parametrize("row", list(covering(TABLES)), ids=" ".join)
def test_the_formula_is_what_is_kept(row):
    with short_corpus():
        kept, expected, _ = kept_and_formula(config_of(*row))
    assert kept == expected.total


@pytest.mark.slow
def test_the_formula_holds_for_every_combination():
    with short_corpus():
        for row in product(*TABLES):
            kept, expected, _ = kept_and_formula(config_of(*row))
            assert kept == expected.total, row


DISPATCHERS = {
    "rows": ("comm.kind=alltoall",),
    "choices": ("comm.kind=alltoall", "comm.row=per_expert"),
    "all": ("comm.kind=allgather",),
    "nodes": ("comm.kind=hybrid", "parallel.ranks_per_node=1"),
    "lanes": ("comm.kind=hybrid", "parallel.ranks_per_node=1", "comm.lanes=2"),
    "rail": ("comm.kind=hybrid", "parallel.ranks_per_node=1", "comm.rail=allgather"),
    "fixed rows": ("comm.kind=alltoall", "comm.rank_capacity_factor=2"),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", DISPATCHERS)
def test_r126_what_is_exchanged_is_not_kept_and_experts_on_more_ranks_keep_no_less(name):
    """Over two ranks the formula is that of the rows that arrived; all ranks together keep what one process does."""
    options = ("float32", "aux", "softmax", "shared", "nothing")
    config = config_of(*options, "parallel.ep=2", *DISPATCHERS[name], world=2)
    layout = ParallelLayout(world=2, ep=2)

    def on_rank(mesh):
        kept, expected, rows = kept_and_formula(config, mesh)
        return kept, expected.total, expected.experts, rows

    with short_corpus():
        _, alone, rows_alone = kept_and_formula(config_of(*options))
        found = run_distributed(layout, on_rank, timeout_s=30, limit_s=60, **mesh_of(config, layout))
    assert [kept for kept, *_ in found] == [total for _, total, *_ in found]
    # Twice the rows of even load are those of the worst case.
    more = 2 if name == "fixed rows" else 1
    assert sum(rows for *_, rows in found) == more * rows_alone
    row_bytes = (alone.experts - 4 * config.model.num_experts) // rows_alone
    assert sum(experts for _, _, experts, _ in found) - alone.experts == (more - 1) * rows_alone * row_bytes


SHARED_LAYERS = {
    "rows": ("parallel.cp=2",),
    "tokens": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "features": ("parallel.tp=2", "parallel.etp=2"),
    "experts": ("parallel.tp=2", "parallel.ep=2"),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", SHARED_LAYERS)
def test_the_formula_holds_for_ranks_that_share_a_layer(name):
    sizes = ("model.shared_features=10", "model.expert_features=12")
    found = []
    for row in covering((("float32", "bfloat16"), *TABLES[1:])):
        more = sizes if row[3] in ("shared", "gated", "both", "capacity") else sizes[1:]
        found.append((row, config_of(*row, *more, *SHARED_LAYERS[name], world=2)))
    layout = layout_of(found[0][1], 2)

    def on_rank(mesh):
        for row, config in found:
            kept, expected, _ = kept_and_formula(config, mesh)
            assert kept == expected.total, row

    with short_corpus():
        run_distributed(layout, on_rank, timeout_s=30, limit_s=100, **mesh_of(found[0][1], layout))


def test_r126_the_formula_knows_no_number_of_ranks():
    model = config_of("bfloat16", "none", "softmax", "plain", "nothing").model
    sizes = {"tokens": 52, "compute_bytes": 2, "internal_bytes": 4}
    balanced = [moe_layer_bytes(model, rows=104, local_experts=8 // ep, **sizes).experts for ep in (1, 8)]
    assert balanced[0] - balanced[1] == 4 * 7
    worst = moe_layer_bytes(model, rows=8 * 104, local_experts=1, **sizes).experts
    assert worst - 4 == 8 * (balanced[1] - 4)


@pytest.mark.parametrize("part", ["plain", "latent"])
def test_no_output_of_the_experts_is_kept(part):
    """The probability is multiplied in before the second product: what that returns needs no gradient of a product."""
    outputs = []
    forward = GroupedExperts.forward

    def watched(experts, *arguments):
        outputs.append(forward(experts, *arguments))
        return outputs[-1]

    packed = []

    def pack(tensor):
        packed.append(tensor.untyped_storage())
        return tensor.detach()

    with short_corpus(), patch.object(GroupedExperts, "forward", watched):
        run = assemble(config_of("float32", "all", "softmax", part, "nothing"))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            run_step(run, next_step(run.data.train, run.cut).microbatches, updates=0, window=None)
    kept = {id(storage) for storage in packed}
    assert outputs
    assert all(id(output.untyped_storage()) not in kept for output in outputs)


def test_the_other_place_of_the_probability_would_keep_the_output():
    """So that the test above can fail."""
    experts = GroupedExperts(2, 4, 3, probs_on="output", backend=select_grouped_gemm("auto", torch.float64, "cpu"))
    experts = experts.double()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    rows, probs = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64, requires_grad=True)
    found = {}
    for place in ("activation", "output"):
        experts.probs_on = place
        with SavedBytes([*experts.parameters(), rows, probs]) as saved:
            experts(rows, probs, torch.tensor([2, 6], dtype=torch.int32))
        found[place] = saved.total_bytes
    assert found["output"] - found["activation"] == 6 * 4 * 8
