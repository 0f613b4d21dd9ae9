"""A transformer of plain modules, trained under plans of tensor and sequence parallelism as in one process.

Shape legend: T tokens of one sequence, D features, H heads, G key/value heads, K features of a head.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_parallel import (
    AxisGroups,
    Boundary,
    ModuleRule,
    ParallelLayout,
    ParallelPlan,
    PlanRule,
    SharedPieces,
    SplitVocabulary,
    all_reduce,
    apply_plan,
    gradient_axes,
    local_box,
    run_distributed,
    vocabulary_cross_entropy,
)
from moe_parallel.plan import part_of

VOCABULARY, TOKENS, FEATURES, HEAD, HEADS, INNER = 13, 12, 8, 4, 4, 8
STEPS = 3


class Attention(nn.Module):
    """Of as many heads as its projections have."""

    def __init__(self, kv_heads):
        super().__init__()
        self.q = nn.Linear(FEATURES, HEADS * HEAD)
        self.k = nn.Linear(FEATURES, kv_heads * HEAD)
        self.v = nn.Linear(FEATURES, kv_heads * HEAD, bias=False)
        self.q_norm = nn.RMSNorm(HEAD)
        self.o = nn.Linear(HEADS * HEAD, FEATURES, bias=False)

    def forward(self, x_TD):
        q, k, v = (f(x_TD).unflatten(-1, (-1, HEAD)).transpose(0, 1) for f in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        out_HTK = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o(out_HTK.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, INNER)
        self.down = nn.Linear(INNER, FEATURES, bias=False)

    def forward(self, x_TD):
        return self.down(F.silu(self.up(x_TD)))


class Gated(nn.Module):
    """Stands for a Mixture of Experts: a gate before or after what it weighs, of whole parameters on every rank."""

    def __init__(self, gate_first):
        super().__init__()
        self.gate = nn.Linear(FEATURES, 1)
        self.expert = nn.Linear(FEATURES, FEATURES)
        self.gate_first = gate_first

    def forward(self, x_TD, valid_T):
        score_T1 = self.gate(x_TD).sigmoid() * valid_T[:, None]
        return self.expert(x_TD * score_T1).tanh() if self.gate_first else self.expert(x_TD).tanh() * score_T1, score_T1


class Model(nn.Module):
    def __init__(self, kv_heads, tied=False, gate_first=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(4))
        self.attention = Attention(kv_heads)
        self.mlp = Mlp()
        self.moe = Gated(gate_first)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, token_T, valid_T):
        x_TD = self.embedding(token_T)
        x_TD = x_TD + self.attention(self.norms[0](x_TD))
        x_TD = x_TD + self.mlp(self.norms[1](x_TD))
        x_TD = x_TD + self.moe(self.norms[2](x_TD), valid_T)[0]
        return self.head(self.norms[3](x_TD))


def plan_of(tp, kv_heads, *, sequence_parallel, tied=False):
    split = partial(PlanRule, placements=(("tp", 0),))
    summed = partial(PlanRule, grad_sum_axes=("tp",))
    enter, leave = ("gather_rows", "sum_scatter_rows") if sequence_parallel else ("sum_gradients", "sum_outputs")
    kv_split = kv_heads % tp == 0
    parameters = [
        *(split(pattern=name, uneven=True) for name in ["embedding.weight", *([] if tied else ["head.weight"])]),
        *([summed(pattern="norms.*")] if sequence_parallel else []),
        split(pattern="attention.q.*"),
        *((split if kv_split else summed)(pattern=f"attention.{name}.*") for name in "kv"),
        summed(pattern="attention.q_norm.weight"),
        PlanRule(pattern="attention.o.weight", placements=(("tp", 1),)),
        split(pattern="mlp.up.*"),
        PlanRule(pattern="mlp.down.weight", placements=(("tp", 1),)),
        summed(pattern="moe.*"),
    ]
    moe = Boundary(inputs=("split_rows", "split_rows"), outputs=("join_rows", None))
    if sequence_parallel:
        moe = Boundary(inputs=(None, "split_rows"))
    modules = [
        ModuleRule(pattern="embedding", style=SplitVocabulary()),
        ModuleRule(pattern="embedding", style=Boundary(outputs=(leave,))),
        *([] if kv_split else [ModuleRule(pattern="attention.[kv]", style=SharedPieces(pieces=kv_heads))]),
        ModuleRule(pattern="attention", style=Boundary(inputs=(enter,), outputs=(leave,))),
        ModuleRule(pattern="mlp", style=Boundary(inputs=(enter,), outputs=(leave,))),
        ModuleRule(pattern="moe", style=moe),
        ModuleRule(pattern="head", style=Boundary(inputs=(enter,))),
    ]
    return ParallelPlan(parameters=tuple(parameters), modules=tuple(modules))


def train(model, plan, groups, data):
    """Three steps of SGD; the specs, the parameters of this rank, and the losses of its share of the sequences."""
    specs = apply_plan(model, plan, groups)
    tp = groups.size("tp")
    first, _ = part_of(VOCABULARY, tp, groups.rank("tp"))
    targets = sum(int(valid_T.sum()) for _, valid_T in data)
    losses = []
    for _ in range(STEPS):
        for token_T, valid_T in data[groups.rank("dp") :: groups.size("dp")]:
            loss_T = vocabulary_cross_entropy(
                model(token_T[:-1], valid_T),
                token_T[1:],
                groups.group("tp"),
                first=first,
                vocab_size=VOCABULARY,
                valid_T=valid_T,
            )
            losses.append(loss_T.detach())
            (loss_T.sum() / targets).backward()
        for name, parameter in model.named_parameters():
            group = groups.group(*gradient_axes(specs[name]))
            if group is not None:
                all_reduce(parameter.grad, group).wait()
            with torch.no_grad():
                parameter.sub_(0.5 * parameter.grad)
            parameter.grad = None
    parts = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return specs, parts, losses, {name: local_box(spec, groups) for name, spec in specs.items()}


def problem(kv_heads, sequences=2, **options):
    model = Model(kv_heads, **options).double()
    data = [(torch.randint(VOCABULARY, (TOKENS + 1,)), torch.rand(TOKENS) < 0.8) for _ in range(sequences)]
    return model, data, train(copy.deepcopy(model), ParallelPlan(), AxisGroups(), data)


def check(whole, results):
    """Every part as in one process to 1e-10, and what is not split the same bits on every rank."""
    _, wanted, _, _ = whole
    for specs, parts, _, boxes in results:
        assert parts.keys() == wanted.keys()
        for name, part in parts.items():
            of_whole = wanted[name][tuple(slice(o, o + n) for o, n in zip(boxes[name].offset, part.shape, strict=True))]
            torch.testing.assert_close(
                part, of_whole, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )
            if not specs[name].placements:
                assert torch.equal(part, results[0][1][name]), f"copies of {name} drift apart"


def compare(on_tp, tp, kv_heads, *, sequence_parallel, **options):
    model, data, whole = problem(kv_heads, **options)
    plan = plan_of(tp, kv_heads, sequence_parallel=sequence_parallel, tied=options.get("tied", False))
    models = [copy.deepcopy(model) for _ in range(tp)]
    results = on_tp(tp, lambda groups: train(models[groups.rank("tp")], plan, groups, data))
    for _, _, losses, _ in results:
        torch.testing.assert_close(losses, whole[2], rtol=0, atol=1e-10)
        assert all(torch.equal(a, b) for a, b in zip(losses, results[0][2], strict=True)), "losses of ranks differ"
    check(whole, results)
    return results


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp", [2, 4])
def test_r034_three_steps_are_those_of_one_process_and_copies_stay_the_same_bits(
    on_tp, tp, kv_heads, sequence_parallel
):
    results = compare(on_tp, tp, kv_heads, sequence_parallel=sequence_parallel)
    copies = [name for name, spec in results[0][0].items() if not spec.placements]
    assert {"norms.0.weight", "moe.gate.weight", "attention.q_norm.weight"} <= set(copies)
    assert ("attention.k.weight" in copies) == (kv_heads < tp)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
def test_r060_a_gate_that_sees_slices_of_the_tokens(on_tp, gate_first, sequence_parallel):
    results = compare(on_tp, 2, 2, sequence_parallel=sequence_parallel, gate_first=gate_first)
    assert gradient_axes(results[0][0]["moe.gate.weight"]) == ("cp", "dp", "tp")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tied_embeddings(on_tp, sequence_parallel):
    results = compare(on_tp, 2, 2, sequence_parallel=sequence_parallel, tied=True)
    assert [part["embedding.weight"].shape[0] for _, part, _, _ in results] == [7, 6]


def test_r034_a_sum_that_is_forgotten_is_seen_by_this_test(on_tp):
    model, data, whole = problem(2)
    plan = plan_of(2, 2, sequence_parallel=True)
    wrong = ParallelPlan(
        parameters=tuple(rule for rule in plan.parameters if rule.pattern != "norms.*"), modules=plan.modules
    )
    models = [copy.deepcopy(model) for _ in range(2)]
    results = on_tp(2, lambda groups: train(models[groups.rank("tp")], wrong, groups, data))
    with pytest.raises(AssertionError, match="not close"):
        check(whole, results)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [ParallelLayout(world=6, tp=2), ParallelLayout(world=6, tp=3)], ids=["tp2", "tp3"])
def test_r043_degrees_that_differ(layout):
    """tp 2 * dp 3, and tp 3 * dp 2 where 4 heads and 8 inner features do not divide: these parts are whole."""
    model, data, whole = problem(2, sequences=6)
    plan = plan_of(layout.tp, 2, sequence_parallel=True)
    if layout.tp == 3:
        others = [rule for rule in plan.parameters if not rule.pattern.startswith(("attention.", "mlp."))]
        modules = [rule for rule in plan.modules if not rule.pattern.startswith(("attention", "mlp"))]
        # Tokens are joined and split by hand: every rank attends to all of them and keeps its own.
        joined = Boundary(inputs=("join_rows",), outputs=("split_rows",))
        modules.append(ModuleRule(pattern="attention", style=joined))
        plan = ParallelPlan(
            parameters=(*others, PlanRule(pattern="mlp.*", grad_sum_axes=("tp",)), PlanRule(pattern="attention.*")),
            modules=tuple(modules),
        )
    results = run_distributed(layout, lambda mesh: train(model, plan, mesh, data))
    check(whole, results)
