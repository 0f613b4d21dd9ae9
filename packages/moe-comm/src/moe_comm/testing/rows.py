"""Rules about rows: which arrive, where, in which order.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.dispatcher import Dispatched, Sizing, TokenDispatcher, combine
from moe_comm.testing.cases import Case, World
from moe_comm.testing.harness import EXACT_TO, Harness, content, send
from moe_comm.testing.reference import apply_experts, expected_rows
from moe_comm.testing.verdict import close, require, same


class RowRules(Harness):
    """Which rows arrive at which expert, in which order."""

    def test_conservation(self, world: World) -> None:
        """Each expert gets every choice of it exactly once, with the token's content and the choice's probability."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            sent, _ = send(dispatcher, case.inputs(rank))
            expected = expected_rows(case, rank)
            counts = [len(rows) for rows in expected]
            require(sent.counts_E.tolist() == counts, f"{case.name}: counts {sent.counts_E.tolist()}, not {counts}")
            for rows_RD, probs_R, wanted in zip(*_by_expert(sent), expected, strict=True):
                got = sorted([*row, prob] for row, prob in zip(rows_RD.tolist(), probs_R.tolist(), strict=True))
                content_RD, content_R = content(case, wanted)
                want = sorted([*row, prob] for row, prob in zip(content_RD.tolist(), content_R.tolist(), strict=True))
                require(got == want, f"{case.name}: an expert's rows are not the tokens that chose it")

        self.on_cases(self.edge_cases(world), on_rank)

    def test_row_order(self, world: World) -> None:
        """Rows are sorted by (local expert, source rank, source token, choice), bit for bit, with and without padding.

        All ranks that share an expert have the same rows. Padding rows and their probabilities are zero; an empty
        expert gets none.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            for multiple in (1, 4):
                sent, plan = send(dispatcher, case.inputs(rank), Sizing(row_multiple=multiple))
                wanted = expected_rows(case, rank)
                padded = [-len(rows) % multiple for rows in wanted]
                parts = [content(case, rows) for rows in wanted]
                rows_RD = torch.cat([F.pad(p, (0, 0, 0, n)) for (p, _), n in zip(parts, padded, strict=True)])
                probs_R = torch.cat([F.pad(p, (0, n)) for (_, p), n in zip(parts, padded, strict=True)])
                counts_E = torch.tensor([len(rows) for rows in wanted])
                offsets_E = (counts_E + torch.tensor(padded)).cumsum(0).to(torch.int32)
                label = f"{case.name}, multiple {multiple}"
                same(sent.counts_E, counts_E, f"{label}: counts without padding")
                same(sent.offsets_E, offsets_E, f"{label}: inclusive offsets with padding")
                same(sent.rows_RD, rows_RD, f"{label}: rows")
                same(sent.probs_R, probs_R, f"{label}: probabilities")
                require(plan.num_rows == len(rows_RD), f"{label}: the plan says {plan.num_rows} rows")
                require(plan.num_local_experts == case.local_experts, f"{label}: the plan's number of experts")
                require((plan.num_tokens, plan.num_choices) == (case.tokens[rank], case.top_k), f"{label}: T and K")
                require(plan.overflow.dtype == torch.int64 and int(plan.overflow) == 0, f"{label}: overflow")

        self.on_cases(self.edge_cases(world), on_rank)

    def test_r042_every_row_meets_its_expert(self, world: World) -> None:
        """Expert e multiplies by e + 1, so that a row at a neighbour's expert shows in the result."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            sent, plan = send(dispatcher, given)
            factors_E = (torch.arange(case.num_experts) + 1.0)[case.local(rank)] * case.share(rank)
            rows_RD = apply_experts(
                sent.rows_RD, sent.offsets_E.tolist(), factors_E.double().view(-1, 1, 1) * _eye(case)
            )
            y_TD = combine(dispatcher, plan, rows_RD * sent.probs_R.unsqueeze(1))
            chosen_TK = given.ids_TK >= 0
            weight_T = (given.probs_TK * (given.ids_TK + 1) * chosen_TK).sum(1)
            close(y_TD, weight_T.unsqueeze(1) * given.x_TD, EXACT_TO * (case.num_experts + 1), case.name)

        self.on_cases(self.edge_cases(world), on_rank)


def _by_expert(sent: Dispatched) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and probabilities of each local expert, padding left out."""
    starts = [0, *sent.offsets_E.tolist()]
    spans = [slice(start, start + count) for start, count in zip(starts, sent.counts_E.tolist(), strict=False)]
    return [sent.rows_RD[span] for span in spans], [sent.probs_R[span] for span in spans]


def _eye(case: Case) -> Tensor:
    return torch.eye(case.hidden, dtype=torch.float64)
