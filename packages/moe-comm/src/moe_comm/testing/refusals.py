"""Rules about refusals: what does not fit is an error on every rank, before a token moves.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from dataclasses import replace
from typing import Any

import torch

from moe_comm.dispatcher import Sizing, TokenDispatcher
from moe_comm.testing.cases import Case, World, even_case
from moe_comm.testing.harness import Harness
from moe_comm.testing.verdict import refused, require
from moe_parallel.testing import count_collectives


class RefusalRules(Harness):
    """What does not fit is refused."""

    def test_malformed_routing_is_refused_before_any_collective(self, world: World) -> None:
        """Wrong sizes, dtypes and limits are the same mistake on every rank, and every rank says so on the spot."""
        capabilities = self.capabilities(world)

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            good = given.routing()
            bad = {
                "another number of experts": (replace(good, num_experts=good.num_experts + 1), Sizing()),
                "int32 ids": (replace(good, ids_TK=good.ids_TK.to(torch.int32)), Sizing()),
                "flat ids": (replace(good, ids_TK=good.ids_TK.flatten()), Sizing()),
                "probabilities of another shape": (replace(good, probs_TK=good.probs_TK[:, :1]), Sizing()),
                "bfloat16 probabilities": (replace(good, probs_TK=good.probs_TK.bfloat16()), Sizing()),
                "padding to a multiple of 0": (good, Sizing(row_multiple=0)),
            }
            if capabilities.largest_top_k is not None:
                wide = torch.zeros(len(good.ids_TK), capabilities.largest_top_k + 1, dtype=torch.int64)
                bad["too many choices"] = (replace(good, ids_TK=wide, probs_TK=wide.double()), Sizing())
            if not capabilities.static_shapes:
                bad["a static shape"] = (good, Sizing(capacity_rows=64))
            for label, (routing, sizing) in bad.items():
                with count_collectives() as issued:
                    refused(label, dispatcher.plan, routing, sizing)
                require(not issued, f"{label} is noticed only after {', '.join(issued)}")

        self.on_cases([even_case("bad", world)], on_rank)

    def test_an_id_out_of_range_is_refused_on_every_rank(self, world: World) -> None:
        """One rank has an id below -1 or beyond the last expert: `plan` raises on all, so that none waits for ever."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            for wrong in (-2, case.num_experts):
                ids_TK = case.inputs(rank).ids_TK
                if rank == case.world - 1:
                    ids_TK[1, 1] = wrong
                routing = replace(case.inputs(rank).routing(), ids_TK=ids_TK)
                refused(f"expert id {wrong}", dispatcher.plan, routing)

        self.on_cases([even_case("bad id", world)], on_rank)

    def test_tokens_that_do_not_fit_the_plan_are_refused(self, world: World) -> None:
        """Another number of tokens, another dtype or number of features than can be carried."""
        capabilities = self.capabilities(world)

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            plan = dispatcher.plan(given.routing())
            bad = {"a token too many": torch.cat([given.x_TD, given.x_TD[:1]]), "int16 tokens": given.x_TD.short()}
            if capabilities.hidden_multiple > 1:
                bad["an odd number of features"] = given.x_TD[:, 1:]
            for label, x_TD in bad.items():
                with count_collectives() as issued:
                    refused(label, dispatcher.prepare, plan, x_TD, given.probs_TK)
                require(not issued, f"{label}: {', '.join(issued)} was issued")

        self.on_cases([even_case("bad tokens", world, hidden=self.hidden(world))], on_rank)
