"""Rules about fixed sizes: the result of exact sizing while it fits, its first rows where it does not, no host reads.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatcher import Dispatched, Plan, Sizing, TokenDispatcher, combine, dispatch
from moe_comm.testing.cases import Case, Inputs, World, even_case
from moe_comm.testing.harness import Harness, layer_with_grads, local_experts, send
from moe_comm.testing.host_reads import count_host_reads
from moe_comm.testing.reference import expected_rows
from moe_comm.testing.verdict import refused, require, same
from moe_kernels import Routing
from moe_parallel.testing import count_collectives


class StaticRules(Harness):
    """What `Sizing.capacity_rows` promises; only asked of dispatchers that say they have static shapes."""

    def test_static_equals_exact_while_it_fits(self, world: World) -> None:
        """Rows, counts, offsets, outputs and gradients have the same bits; all other rows are zero."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given, experts_EDD = case.inputs(rank), local_experts(case, rank)
            for multiple in (1, 4):
                label = f"{case.name}, multiple {multiple}"
                sizing = fixed(case, most_rows(case, multiple) + 3, multiple)
                exact, exact_plan = send(dispatcher, given, Sizing(row_multiple=multiple))
                sent, plan = send(dispatcher, given, sizing)
                require(plan.num_rows == len(sent.rows_RD) == sizing.capacity_rows, f"{label}: {plan.num_rows} rows")
                require(plan.overflow.dtype == torch.int64 and int(plan.overflow) == 0, f"{label}: overflow")
                same_beginning(sent, exact, label)
                same(sent.counts_E, exact.counts_E, f"{label}: counts")
                same(sent.offsets_E, exact.offsets_E, f"{label}: offsets")
                want = layer_with_grads(dispatcher, exact_plan, given, experts_EDD)
                for got, exactly in zip(layer_with_grads(dispatcher, plan, given, experts_EDD), want, strict=True):
                    same(got, exactly, f"{label}: outputs and gradients")

        if self.capabilities(world).static_shapes:
            self.on_cases(self.few_cases(world), on_rank)

    def test_static_keeps_the_first_rows(self, world: World) -> None:
        """Beyond the capacity the rows are the first of exact sizing, and what has no row is counted once.

        Choices without a row add nothing to outputs and get no gradient. NaN in padding rows of the outputs of experts,
        and in the gradients of padding rows, does not spread.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> list[tuple[int, int]]:
            given = case.inputs(rank)
            counted = []
            for multiple, capacity in capacities(case):
                label = f"{case.name}, multiple {multiple}, {capacity} rows"
                exact, exact_plan = send(dispatcher, given, Sizing(row_multiple=multiple))
                sent, plan = send(dispatcher, given, fixed(case, capacity, multiple))
                begin_E = exact.offsets_E - exact.offsets_E.diff(prepend=exact.offsets_E.new_zeros(1))
                kept_E = (capacity - begin_E.long()).clamp(min=0).minimum(exact.counts_E)
                require(sent.rows_RD.shape == (capacity, case.hidden), f"{label}: {tuple(sent.rows_RD.shape)} rows")
                same_beginning(sent, exact, label)
                same(sent.counts_E, kept_E, f"{label}: counts")
                same(sent.offsets_E, exact.offsets_E.clamp(max=capacity), f"{label}: offsets")
                kept = torch.arange(exact_plan.num_rows) < capacity
                want = outputs_and_grads(case, rank, dispatcher, exact_plan, kept)
                got = outputs_and_grads(case, rank, dispatcher, plan, real_rows(sent))
                for one, other in zip(got, want, strict=True):
                    same(one, other, f"{label}: outputs and gradients")
                is_first = rank % case.etp == 0
                counted.append((int(plan.overflow), int((exact.counts_E - kept_E).sum()) if is_first else 0))
            return counted

        if not self.capabilities(world).static_shapes:
            return
        names = ("uniform", "duplicates", "all to one expert")
        cases = [case for case in self.edge_cases(world) if case.name in names]
        for case, by_rank in zip(cases, self.on_cases(cases, on_rank), strict=True):
            for (multiple, capacity), counted in zip(capacities(case), zip(*by_rank, strict=True), strict=True):
                overflow, surplus = (sum(numbers) for numbers in zip(*counted, strict=True))
                label = f"{case.name}, multiple {multiple}, {capacity} rows"
                require(overflow == surplus, f"{label}: an overflow of {overflow} where {surplus} found no row")

    def test_r082_static_plans_are_made_again_without_the_host(self, world: World) -> None:
        """Three dispatches, forward and backward, with the same sizes: the same shapes, and nothing read on the host.

        The first one may read, and communicate once more, to make sure that all ranks were given the same sizes.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            sizing = fixed(case, most_rows(case, 4) + 3, 4)
            shapes, issued = [], []
            # A routing that sends nothing comes second: shapes depend on sizes alone.
            routings = [case.inputs(rank), replace(case, pattern="nothing").inputs(rank)]
            for turn, given in enumerate((*routings, replace(case, seed=case.seed + 1).inputs(rank))):
                with count_collectives() as names, count_host_reads() as reads:
                    shapes.append(shapes_of_a_layer(dispatcher, given, sizing))
                issued.append(len(names))
                require(turn == 0 or not reads, f"{case.name}: dispatch {turn} reads on the host: {sorted(set(reads))}")
            require(shapes[0] == shapes[1] == shapes[2], f"{case.name}: shapes differ: {shapes}")
            require(issued[0] - issued[1] in (0, 1), f"{case.name}: {issued} collectives; sizes are compared once")
            require(issued[1] == issued[2], f"{case.name}: {issued} collectives; sizes are compared once")

        if self.capabilities(world).static_shapes:
            self.on_cases(self.few_cases(world), on_rank)

    def test_static_sizes_that_differ_are_refused_on_every_rank(self, world: World) -> None:
        """Sizes of the last rank that are not those of the others, or too many tokens there, are named on every rank.

        Nobody is left waiting: the right sizes work afterwards.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given, last = case.inputs(rank), rank == case.world - 1
            good = Sizing(capacity_rows=20, most_tokens=5)
            longer = replace(case, tokens=(*case.tokens[:-1], 6)).inputs(rank)
            wrong: list[tuple[str, Inputs, Sizing]] = [("6 on rank|brings 6 tokens", longer, good)]
            if case.world > 1:
                wrong += [
                    ("capacity_rows is .*21 on rank", given, replace(good, capacity_rows=21) if last else good),
                    ("row_multiple is .*2 on rank", given, replace(good, row_multiple=2) if last else good),
                    ("most_tokens is .*9 on rank", given, replace(good, most_tokens=9) if last else good),
                    ("most_tokens is .*6 on rank", longer, replace(good, most_tokens=None)),
                ]
            for words, inputs, sizing in wrong:
                refused(f"sizes of which {words}", dispatcher.plan, inputs.routing(), sizing, words=words)
                sent, _ = send(dispatcher, given, replace(good, capacity_rows=64))
                exact, _ = send(dispatcher, given)
                same_beginning(sent, exact, f"after sizes of which {words}")

        if self.capabilities(world).static_shapes:
            self.on_cases([even_case("sizes", world)], on_rank)

    def test_static_ids_out_of_range_are_overflow(self, world: World) -> None:
        """An id that is no expert gets no row and is counted; nobody reads it on the host."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> int:
            given = case.inputs(rank)
            wrong = given.ids_TK.clone()
            masked = given.ids_TK.clone()
            if rank == case.world - 1:
                wrong[0, 0], wrong[2, 1], wrong[3, 1] = -2, case.num_experts, 2**40
                masked[0, 0] = masked[2, 1] = masked[3, 1] = -1
            sizing = fixed(case, most_rows(case, 1) + 3, 1)
            want, _ = send(dispatcher, replace(given, ids_TK=masked), sizing)
            got, plan = send(dispatcher, replace(given, ids_TK=wrong), sizing)
            same_beginning(got, want, "ids out of range")
            same(got.counts_E, want.counts_E, "counts with ids out of range")
            return int(plan.overflow)

        if self.capabilities(world).static_shapes:
            overflow = sum(self.on_cases([even_case("bad ids", world)], on_rank)[0])
            require(overflow == 3, f"3 ids are no experts, but the overflow is {overflow}")


def fixed(case: Case, capacity_rows: int, row_multiple: int) -> Sizing:
    """A fixed size for ranks that may bring different numbers of tokens."""
    return Sizing(row_multiple=row_multiple, capacity_rows=capacity_rows, most_tokens=max(1, *case.tokens))


def most_rows(case: Case, row_multiple: int) -> int:
    """Rows of the rank that has most of them, padding included."""
    return max(
        sum(-(-len(rows) // row_multiple) * row_multiple for rows in expected_rows(case, rank))
        for rank in range(case.world)
    )


def capacities(case: Case) -> list[tuple[int, int]]:
    """Row multiples, and capacities that are too small: nothing, half, all but one row."""
    return [(1, most_rows(case, 1) // 2), (1, most_rows(case, 1) - 1), (4, most_rows(case, 4) // 2), (4, 0)]


def same_beginning(sent: Dispatched, exact: Dispatched, label: str) -> None:
    """Rows and probabilities are those of exact sizing as far as there are so many, and zero after them."""
    for got, want, what in ((sent.rows_RD, exact.rows_RD, "rows"), (sent.probs_R, exact.probs_R, "probabilities")):
        both = min(len(got), len(want))
        same(got[:both], want[:both], f"{label}: {what}")
        require(not bool(got[both:].any()), f"{label}: {what} after the last are not zero")


def real_rows(sent: Dispatched) -> Tensor:
    """Which rows are no padding, bool [R]."""
    row_R = torch.arange(len(sent.rows_RD))
    expert_R = torch.searchsorted(sent.offsets_E, row_R, right=True).clamp(max=len(sent.offsets_E) - 1)
    begin_E = sent.offsets_E - sent.offsets_E.diff(prepend=sent.offsets_E.new_zeros(1))
    return row_R - begin_E[expert_R] < sent.counts_E[expert_R]


def outputs_and_grads(
    case: Case, rank: int, dispatcher: TokenDispatcher[Any], plan: Plan, kept_R: Tensor
) -> list[Tensor]:
    """Output, and the gradients of tokens and probabilities, where the rows that are not kept give nothing.

    Experts multiply by a factor, so that no sum depends on the number of rows. Padding rows, which are those that are
    not kept where sizes are fixed, answer with NaN and have NaN for a gradient.
    """
    given = case.inputs(rank)
    x_TD, probs_TK = given.leaves()
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    fill = torch.nan if len(kept_R) and torch.equal(kept_R, real_rows(sent)) else 0.0
    for rows in (sent.rows_RD, sent.probs_R):
        rows.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: torch.where(kept_R.view(-1, *[1] * (grad.dim() - 1)), grad, fill)
        )
    factor_R = torch.searchsorted(sent.offsets_E, torch.arange(plan.num_rows), right=True) + 1.5
    rows_RD = sent.rows_RD * sent.probs_R.unsqueeze(1) * factor_R.unsqueeze(1) * case.share(rank)
    y_TD = combine(dispatcher, plan, torch.where(kept_R.unsqueeze(1), rows_RD, fill))
    return [y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, probs_TK), given.grad_TD)]


def shapes_of_a_layer(dispatcher: TokenDispatcher[Any], given: Inputs, sizing: Sizing) -> list[tuple[int, ...]]:
    """Shapes of all that travels or arrives; backward runs too."""
    x_TD, probs_TK = given.leaves()
    plan = dispatcher.plan(Routing(ids_TK=given.ids_TK, probs_TK=probs_TK, num_experts=given.num_experts), sizing)
    parcel = dispatcher.prepare(plan, x_TD, probs_TK)
    received = dispatcher.exchange(plan, parcel).wait()
    sent = dispatcher.arrange(plan, received)
    home = dispatcher.prepare_return(plan, sent.rows_RD * sent.probs_R.unsqueeze(1))
    back = dispatcher.exchange_return(plan, home).wait()
    torch.autograd.backward(dispatcher.merge(plan, back), given.grad_TD)
    rows = (parcel.rows, parcel.probs, received.rows, received.probs, sent.rows_RD, home.rows, back.rows)
    return [tuple(tensor.shape) for tensor in rows if tensor is not None]
