"""Rules about repetition: the same bits again, from a reused plan, in recompute, beside another plan.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from dataclasses import replace
from typing import Any

import torch

from moe_comm.dispatcher import TokenDispatcher, combine, dispatch
from moe_comm.testing.cases import Case, World
from moe_comm.testing.harness import Harness, experts, layer_with_grads, local_experts
from moe_comm.testing.verdict import same


class ReuseRules(Harness):
    """Repetition gives the same bits."""

    def test_determinism(self, world: World) -> None:
        """Two runs give the same bits, with other allocations between them; only asked of those that promise it."""
        if not self.capabilities(world).deterministic:
            return

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given, experts_EDD = case.inputs(rank), local_experts(case, rank)
            first = layer_with_grads(dispatcher, dispatcher.plan(given.routing()), given, experts_EDD)
            unrelated = [torch.randn(size) for size in (3, 77, 4096)]
            second = layer_with_grads(dispatcher, dispatcher.plan(given.routing()), given, experts_EDD)
            del unrelated
            for one, other in zip(first, second, strict=True):
                same(other, one, f"{case.name}: the second run")

        self.on_cases(self.few_cases(world), on_rank)

    def test_plan_reuse(self, world: World) -> None:
        """One plan serves several dispatches; recompute under `torch.utils.checkpoint` reproduces them."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given, experts_EDD = case.inputs(rank), local_experts(case, rank)
            plan = dispatcher.plan(given.routing())
            plain = layer_with_grads(dispatcher, plan, given, experts_EDD)
            again = layer_with_grads(dispatcher, plan, given, experts_EDD)
            recomputed = layer_with_grads(dispatcher, plan, given, experts_EDD, recompute=True)
            for one, two, three in zip(plain, again, recomputed, strict=True):
                same(two, one, f"{case.name}: the second use of a plan")
                same(three, one, f"{case.name}: recompute")

        self.on_cases(self.few_cases(world), on_rank)

    def test_interleaved_plans(self, world: World) -> None:
        """Two dispatches in flight, forward 0 1 and backward 0 1 as in a pipeline, do not disturb each other."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            twin = replace(case, seed=case.seed + 1, tokens=case.tokens[::-1])
            given = [case.inputs(rank), twin.inputs(rank)]
            experts_EDD = local_experts(case, rank)
            alone = [layer_with_grads(dispatcher, dispatcher.plan(g.routing()), g, experts_EDD) for g in given]
            leaves = [(*g.leaves(), experts_EDD.clone().requires_grad_()) for g in given]
            plans = [dispatcher.plan(g.routing()) for g in given]
            sent = [dispatch(dispatcher, plans[i], leaves[i][0], leaves[i][1]) for i in (0, 1)]
            outputs = [combine(dispatcher, plans[i], experts(sent[i], leaves[i][2])) for i in (0, 1)]
            for i in (0, 1):
                grads = torch.autograd.grad(outputs[i], leaves[i], given[i].grad_TD)
                for one, other in zip(alone[i], (outputs[i].detach(), *grads), strict=True):
                    same(other, one, f"{case.name}: plan {i} of two")

        self.on_cases(self.few_cases(world), on_rank)
