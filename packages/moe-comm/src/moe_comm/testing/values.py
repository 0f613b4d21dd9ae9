"""Rules about values: outputs and gradients equal what a dense sum over all experts gives.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatcher import TokenDispatcher, combine, dispatch
from moe_comm.testing.cases import Case, Inputs, World, block
from moe_comm.testing.harness import EXACT_TO, SAME_SUM, Harness, content, layer, local_experts, send
from moe_comm.testing.reference import dense_reference, expected_rows
from moe_comm.testing.verdict import close, require, same
from moe_kernels import internal_dtype


class ValueRules(Harness):
    """Outputs and gradients."""

    def test_identity(self, world: World) -> None:
        """Experts that change nothing and weights of 1 / (choices made) give the tokens back; 0 where none is made."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            made_T = (given.ids_TK >= 0).sum(1)
            probs_TK = made_T.clamp(min=1).double().reciprocal().unsqueeze(1).repeat(1, case.top_k)
            sent, plan = send(dispatcher, replace(given, probs_TK=probs_TK))
            y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R.unsqueeze(1) * case.share(rank))
            require(y_TD.shape == given.x_TD.shape, f"{case.name}: {tuple(y_TD.shape)} came back")
            close(y_TD, given.x_TD * (made_T > 0).unsqueeze(1), SAME_SUM, case.name)
            require(bool((y_TD[made_T == 0] == 0).all()), f"{case.name}: a token without a choice is not exactly 0")

        self.on_cases(self.edge_cases(world), on_rank)

    def test_dense_reference(self, world: World) -> None:
        """Outputs and the gradients of tokens, probabilities and expert matrices equal a dense sum over all experts.

        Experts that nobody chose have a zero gradient, not none; tokens and probabilities of empty ranks too.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> list[Tensor]:
            given = case.inputs(rank)
            x_TD, probs_TK = given.leaves()
            experts_EDD = local_experts(case, rank).requires_grad_()
            y_TD = layer(dispatcher, dispatcher.plan(given.routing()), x_TD, probs_TK, experts_EDD)
            require(y_TD.requires_grad, f"{case.name}: the output is cut off from the graph")
            torch.autograd.backward(y_TD, given.grad_TD)
            for leaf, what in ((x_TD, "tokens"), (probs_TK, "probabilities"), (experts_EDD, "experts")):
                require(leaf.grad is not None, f"{case.name}: {what} of rank {rank} have no gradient")
            return [y_TD.detach(), *(leaf.grad for leaf in (x_TD, probs_TK, experts_EDD) if leaf.grad is not None)]

        cases = [*self.edge_cases(world), *self.random_cases(world)]
        for case, results in zip(cases, self.on_cases(cases, on_rank), strict=True):
            expected = dense_reference(case)
            for rank, (y_TD, grad_x_TD, grad_probs_TK, grad_experts_EDD) in enumerate(results):
                label = f"{case.name}, rank {rank}: "
                close(y_TD, expected.y_TD[rank], EXACT_TO, label + "output")
                close(grad_x_TD, expected.grad_x_TD[rank], EXACT_TO, label + "gradient of tokens")
                close(grad_probs_TK, expected.grad_probs_TK[rank], EXACT_TO, label + "gradient of probabilities")
                close(
                    grad_experts_EDD,
                    expected.grad_experts_EDD[case.local(rank)],
                    EXACT_TO,
                    label + "gradient of experts",
                )

    def test_equivariance(self, world: World) -> None:
        """Reordering tokens reorders outputs; reordering choices, or renaming experts with their matrices, nothing."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given, experts_EDD = case.inputs(rank), case.experts()

            def outputs(given: Inputs, experts_EDD: Tensor) -> Tensor:
                plan = dispatcher.plan(given.routing())
                return layer(
                    dispatcher, plan, given.x_TD, given.probs_TK, experts_EDD[case.local(rank)] * case.share(rank)
                )

            y_TD = outputs(given, experts_EDD)
            tokens = torch.arange(len(given.x_TD)).flip(0).roll(3)
            moved = replace(
                given, x_TD=given.x_TD[tokens], ids_TK=given.ids_TK[tokens], probs_TK=given.probs_TK[tokens]
            )
            close(outputs(moved, experts_EDD), y_TD[tokens], SAME_SUM, f"{case.name}: tokens reordered")
            turned = replace(given, ids_TK=given.ids_TK.flip(1), probs_TK=given.probs_TK.flip(1))
            close(outputs(turned, experts_EDD), y_TD, SAME_SUM, f"{case.name}: choices reordered")
            name_E = torch.arange(case.num_experts).roll(case.local_experts // 2 + 1)
            ids_TK = torch.where(given.ids_TK < 0, -1, name_E[given.ids_TK.clamp(min=0)])
            renamed_EDD = torch.empty_like(experts_EDD).index_copy(0, name_E, experts_EDD)
            renamed = outputs(replace(given, ids_TK=ids_TK), renamed_EDD)
            close(renamed, y_TD, SAME_SUM, f"{case.name}: experts renamed")

        self.on_cases(self.few_cases(world), on_rank)

    def test_dispatch_and_combine_are_adjoint(self, world: World) -> None:
        """<dispatch(x), y> = <x, combine(y)>, and each one's backward is the other; exact on small integers."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> tuple[float, float]:
            given = case.inputs(rank)
            x_TD, probs_TK = given.leaves()
            plan = dispatcher.plan(given.routing())
            sent = dispatch(dispatcher, plan, x_TD, probs_TK)
            generator = torch.Generator().manual_seed(rank)
            y_RD = torch.randint(-2, 3, sent.rows_RD.shape, generator=generator).to(case.dtype).requires_grad_()
            back_TD = combine(dispatcher, plan, y_RD)
            require(back_TD.dtype == case.dtype, f"{case.name}: rows of {case.dtype} come back as {back_TD.dtype}")
            (grad_x_TD,) = torch.autograd.grad(sent.rows_RD, x_TD, y_RD.detach())
            same(grad_x_TD, back_TD.detach(), f"{case.name}: backward of dispatch is combine")
            (grad_y_RD,) = torch.autograd.grad(back_TD, y_RD, x_TD.detach())
            same(grad_y_RD, sent.rows_RD.detach(), f"{case.name}: backward of combine is dispatch")
            return _inner(sent.rows_RD, y_RD), _inner(x_TD, back_TD)

        cases = [
            replace(case, name=f"{case.name}, {dtype}", dtype=dtype, whole_numbers=True)
            for case in self.few_cases(world)
            for dtype in self.dtypes()
        ]
        for case, results in zip(cases, self.on_cases(cases, on_rank), strict=True):
            there, back = (sum(side) for side in zip(*results, strict=True))
            require(there == back, f"{case.name}: <dispatch(x), y> = {there}, but <x, combine(y)> = {back}")

    def test_dtypes_and_sizes(self, world: World) -> None:
        """Every dtype and odd numbers of features, tokens that are not contiguous or need no gradient.

        Rows are copies, bit for bit. Sums of positive terms are as good as `roundings` roundings to the row dtype.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            plan = dispatcher.plan(given.routing())
            strided_TD = given.x_TD.t().contiguous().t()
            probs_TK = given.probs_TK.clone().requires_grad_()
            sent = dispatch(dispatcher, plan, strided_TD, probs_TK)
            rows_RD, probs_R = content(case, [row for rows in expected_rows(case, rank) for row in rows])
            same(sent.rows_RD, rows_RD, f"{case.name}: rows")
            same(sent.probs_R.detach(), probs_R, f"{case.name}: probabilities")
            require(sent.probs_R.requires_grad, f"{case.name}: probabilities lost their gradient")
            (grad_TK,) = torch.autograd.grad(sent.probs_R.sum() * case.share(rank), probs_TK)
            same(grad_TK, (given.ids_TK >= 0).to(grad_TK.dtype), f"{case.name}: gradient of probabilities")
            generator = torch.Generator().manual_seed(rank)
            made_TK = given.ids_TK >= 0
            scale_T = 1 + torch.rand(len(given.x_TD), generator=generator, dtype=torch.float64)
            positive_TD = (given.x_TD.double().abs() * scale_T.unsqueeze(1)).to(case.dtype)
            rows_RD = dispatch(dispatcher, plan, positive_TD, probs_TK.detach()).rows_RD * case.share(rank)
            y_TD = combine(dispatcher, plan, rows_RD)
            exact_TD = positive_TD.double() * made_TK.sum(1, keepdim=True)
            error = self.roundings * torch.finfo(case.dtype).eps / 2
            error += case.top_k * torch.finfo(internal_dtype(case.dtype)).eps
            worst_TD = (y_TD.double() - exact_TD).abs() - 1.01 * error * exact_TD
            require(bool((worst_TD <= 0).all()), f"{case.name}: sums are rounded more than {self.roundings} times")

        multiple = self.capabilities(world).hidden_multiple
        sizes = sorted({lcm(size, multiple) for size in (1, 3, 8, 24)})
        limit = self.capabilities(world).largest_top_k or 16
        etp, ep = block(world)
        tokens = tuple(5 + 2 * rank for rank in range(etp * ep))
        spread = Case(name="", tokens=tokens, etp=etp, local_experts=7, top_k=min(7, limit))
        # All rows of a token on one rank, where a sum of many terms shows how it is rounded.
        heaped = replace(spread, pattern="one expert", top_k=min(16, limit))
        cases = [
            replace(case, name=f"{case.pattern}, D={size}, {dtype}", hidden=size, dtype=dtype)
            for case, size in (*((spread, size) for size in sizes), (heaped, sizes[-1]))
            for dtype in self.dtypes()
        ]
        self.on_cases(cases, on_rank)


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() * b.detach().double()).sum())
