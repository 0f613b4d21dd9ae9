"""Many random cases, each put through all that can be said of one dispatch: values, order, symmetries, repetition.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatcher import Sizing, TokenDispatcher, combine, dispatch
from moe_comm.testing.cases import Case, Inputs, World, random_cases
from moe_comm.testing.harness import EXACT_TO, SAME_SUM, Harness, content, experts, layer, local_experts, send
from moe_comm.testing.reference import dense_reference, expected_rows
from moe_comm.testing.static import fixed, most_rows, same_beginning
from moe_comm.testing.verdict import close, require, same


class SweepRules(Harness):
    """The rules of one dispatch on random cases, on large worlds too."""

    def test_random_cases(self, world: World) -> None:
        """Two random cases; `sweep` runs as many as are wanted."""
        self.sweep(world, 2)

    def sweep(self, world: World, count: int, first: int = 0) -> None:
        """Put so many random cases through all checks, from number `first` on; the same ones in every run."""
        capabilities = self.capabilities(world)
        hidden, limit, static = self.hidden(world), capabilities.largest_top_k, capabilities.static_shapes
        cases = list(islice(random_cases(world, first + count, hidden=hidden, largest_top_k=limit), first, None))
        dtypes = self.dtypes()

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> list[Any]:
            values = check_values(case, rank, dispatcher)
            check_symmetries(case, rank, dispatcher, values[0])
            dtype = dtypes[case.seed % len(dtypes)]
            inner = check_whole_numbers(replace(case, dtype=dtype, whole_numbers=True), rank, dispatcher)
            return [values, inner, check_capacity(case, rank, dispatcher) if static else (0, 0)]

        # A few at a time: each run of all ranks has a limit of time.
        runs = [self.on_cases(cases[begin : begin + 10], on_rank) for begin in range(0, len(cases), 10)]
        for case, by_rank in zip(cases, chain.from_iterable(runs), strict=True):
            all_values, inner, overflow = zip(*by_rank, strict=True)
            there, back = (sum(side) for side in zip(*inner, strict=True))
            require(there == back, f"{case}: <dispatch(x), y> = {there}, but <x, combine(y)> = {back}")
            counted, surplus = (sum(side) for side in zip(*overflow, strict=True))
            require(counted == surplus, f"{case}: an overflow of {counted} where {surplus} found no row")
            expected = dense_reference(case)
            for rank, (y_TD, grad_x_TD, grad_probs_TK, grad_experts_EDD) in enumerate(all_values):
                for got, want, what in (
                    (y_TD, expected.y_TD[rank], "output"),
                    (grad_x_TD, expected.grad_x_TD[rank], "gradient of tokens"),
                    (grad_probs_TK, expected.grad_probs_TK[rank], "gradient of probabilities"),
                    (grad_experts_EDD, expected.grad_experts_EDD[case.local(rank)], "gradient of experts"),
                ):
                    close(got, want, EXACT_TO, f"{case}, rank {rank}: {what}")


def check_values(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> list[Tensor]:
    """Rows are those of the contract; a second plan, a reused one and one beside another give the same bits.

    Returns:
        Output, and the gradients of tokens, probabilities and experts.
    """
    given, experts_EDD = case.inputs(rank), local_experts(case, rank)
    plans = [dispatcher.plan(given.routing()) for _ in range(2)]
    other = replace(case, seed=case.seed + 1, tokens=case.tokens[::-1]).inputs(rank)
    plans.insert(1, dispatcher.plan(other.routing()))
    runs = []
    # The first plan serves twice, with the dispatch of another batch in between.
    for plan, inputs in zip((plans[0], plans[1], plans[2], plans[0]), (given, other, given, given), strict=True):
        leaves = (*inputs.leaves(), experts_EDD.clone().requires_grad_())
        runs.append((dispatch(dispatcher, plan, leaves[0], leaves[1]), leaves))
    outputs = [
        combine(dispatcher, plan, experts(sent, leaves[2]))
        for plan, (sent, leaves) in zip((plans[0], plans[1], plans[2], plans[0]), runs, strict=True)
    ]
    results = []
    for turn in (0, 1, 2, 3):
        grad_TD = other.grad_TD if turn == 1 else given.grad_TD
        results.append([outputs[turn].detach(), *torch.autograd.grad(outputs[turn], runs[turn][1], grad_TD)])
    for turn, what in ((2, "a second plan"), (3, "the second use of a plan")):
        for got, want in zip(results[turn], results[0], strict=True):
            same(got, want, f"{case}: {what}")

    wanted = expected_rows(case, rank)
    sent = runs[0][0]
    rows_RD, probs_R = content(case, [row for rows in wanted for row in rows])
    same(sent.rows_RD.detach(), rows_RD, f"{case}: rows")
    same(sent.probs_R.detach(), probs_R, f"{case}: probabilities")
    require(sent.counts_E.tolist() == [len(rows) for rows in wanted], f"{case}: counts {sent.counts_E.tolist()}")
    require(sent.offsets_E.tolist() == sent.counts_E.cumsum(0).tolist(), f"{case}: offsets {sent.offsets_E.tolist()}")
    return results[0]


def check_symmetries(case: Case, rank: int, dispatcher: TokenDispatcher[Any], y_TD: Tensor) -> None:
    """Experts that change nothing give the tokens back; reordered tokens and choices, renamed experts change nothing.

    All ranks rename experts alike, and each reorders as it likes.
    """
    given, experts_EDD = case.inputs(rank), case.experts()
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)

    def output(inputs: Inputs, experts_EDD: Tensor) -> Tensor:
        plan = dispatcher.plan(inputs.routing())
        return layer(dispatcher, plan, inputs.x_TD, inputs.probs_TK, experts_EDD[case.local(rank)] * case.share(rank))

    tokens = torch.randperm(len(given.x_TD), generator=generator)
    columns = torch.randperm(case.top_k, generator=generator)
    moved = replace(
        given,
        x_TD=given.x_TD[tokens],
        ids_TK=given.ids_TK[tokens][:, columns],
        probs_TK=given.probs_TK[tokens][:, columns],
    )
    close(output(moved, experts_EDD), y_TD[tokens], SAME_SUM, f"{case}: tokens and choices reordered")
    name_E = torch.randperm(case.num_experts, generator=torch.Generator().manual_seed(case.seed))
    renamed = replace(given, ids_TK=torch.where(given.ids_TK < 0, -1, name_E[given.ids_TK.clamp(min=0)]))
    renamed_EDD = torch.empty_like(experts_EDD).index_copy(0, name_E, experts_EDD)
    close(output(renamed, renamed_EDD), y_TD, SAME_SUM, f"{case}: experts renamed")
    made_T = (given.ids_TK >= 0).sum(1)
    probs_TK = made_T.clamp(min=1).double().reciprocal().unsqueeze(1).repeat(1, case.top_k)
    identity_EDD = torch.eye(case.hidden, dtype=torch.float64).expand_as(experts_EDD)
    back_TD = output(replace(given, probs_TK=probs_TK), identity_EDD)
    close(back_TD, given.x_TD * (made_T > 0).unsqueeze(1), SAME_SUM, f"{case}: identity")


def check_whole_numbers(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> tuple[float, float]:
    """Sums of whole numbers are exact in every dtype and order, so that all dispatchers give the same bits.

    Returns:
        The two sides of <dispatch(x), y> = <x, combine(y)>, of this rank.
    """
    given = case.inputs(rank)
    x_TD, probs_TK = given.leaves()
    plan = dispatcher.plan(given.routing())
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    same_TD = combine(dispatcher, plan, sent.rows_RD.detach() * case.share(rank))
    same(same_TD, given.x_TD * (given.ids_TK >= 0).sum(1, keepdim=True).to(case.dtype), f"{case}: whole numbers")
    generator = torch.Generator().manual_seed(rank)
    y_RD = torch.randint(-2, 3, sent.rows_RD.shape, generator=generator).to(case.dtype).requires_grad_()
    back_TD = combine(dispatcher, plan, y_RD)
    (grad_x_TD,) = torch.autograd.grad(sent.rows_RD, x_TD, y_RD.detach())
    same(grad_x_TD, back_TD.detach(), f"{case}: backward of dispatch is combine")
    (grad_y_RD,) = torch.autograd.grad(back_TD, y_RD, x_TD.detach())
    same(grad_y_RD, sent.rows_RD.detach(), f"{case}: backward of combine is dispatch")
    there = (sent.rows_RD.detach().double() * y_RD.detach().double()).sum()
    return float(there), float((x_TD.detach().double() * back_TD.detach().double()).sum())


def check_capacity(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> tuple[int, int]:
    """With fewer rows than needed, or more, the rows are the first of exact sizing.

    Returns:
        The overflow of this rank, and the choices that lack a row here, those of shared experts counted once.
    """
    multiple = (1, 4)[case.seed % 2]
    capacity = most_rows(case, multiple) * (case.seed % 5) // 3
    exact, _ = send(dispatcher, case.inputs(rank), Sizing(row_multiple=multiple))
    sent, plan = send(dispatcher, case.inputs(rank), fixed(case, capacity, multiple))
    same_beginning(sent, exact, f"{case}, {capacity} rows")
    is_first = rank % case.etp == 0
    return int(plan.overflow), int((exact.counts_E - sent.counts_E).sum()) if is_first else 0
