"""Rules about communication: only in the steps that are for it, and on every rank alike.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_comm.dispatcher import Dispatched, Parcel, TokenDispatcher
from moe_comm.testing.cases import Case, World
from moe_comm.testing.harness import Harness
from moe_comm.testing.verdict import require, same
from moe_parallel import Pending
from moe_parallel.testing import count_collectives

T = TypeVar("T")


class CommunicationRules(Harness):
    """Who communicates, and when."""

    def test_only_exchanges_communicate(self, world: World) -> None:
        """`prepare`, `arrange`, `prepare_return` and `merge` issue no collective, forward or backward.

        The other steps issue the same number on every rank, with zero tokens too, in backward too.
        """

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> list[int]:
            given = case.inputs(rank)
            issued: list[int] = []

            def step(name: str, silent: bool, run: Callable[[], T], parts: Callable[[T], list[Tensor | None]]) -> T:
                with count_collectives() as forward:
                    result = run()
                with count_collectives() as backward:
                    roots = [part for part in parts(result) if part is not None and part.requires_grad]
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                if silent:
                    require(not forward, f"{case.name}: {name} communicates ({', '.join(forward)})")
                    require(not backward, f"{case.name}: the backward of {name} communicates ({', '.join(backward)})")
                issued.extend((len(forward), len(backward)))
                return result

            def parcel_parts(parcel: Parcel) -> list[Tensor | None]:
                return [parcel.rows, parcel.probs, *parcel.extra.values()]

            def sent_parts(sent: Dispatched) -> list[Tensor | None]:
                return [sent.rows_RD, sent.probs_R]

            x_TD, probs_TK = given.leaves()
            plan = step("plan", False, lambda: dispatcher.plan(given.routing()), lambda plan: [])
            parcel = step("prepare", True, lambda: dispatcher.prepare(plan, x_TD, probs_TK), parcel_parts)
            parcel = _cut(parcel)
            received = step("exchange", False, lambda: dispatcher.exchange(plan, parcel).wait(), parcel_parts)
            received = _cut(received)
            sent = step("arrange", True, lambda: dispatcher.arrange(plan, received), sent_parts)
            rows_RD = sent.rows_RD.detach().requires_grad_()
            home = step("prepare_return", True, lambda: dispatcher.prepare_return(plan, rows_RD), parcel_parts)
            home = _cut(home)
            back = step("exchange_return", False, lambda: dispatcher.exchange_return(plan, home).wait(), parcel_parts)
            back = _cut(back)
            step("merge", True, lambda: dispatcher.merge(plan, back), lambda y_TD: [y_TD])
            return issued

        cases = self.edge_cases(world)
        for case, results in zip(cases, self.on_cases(cases, on_rank), strict=True):
            require(
                all(issued == results[0] for issued in results),
                f"{case.name}: ranks differ in the number of collectives per step, forward and backward: {results}",
            )

    def test_overlapped_exchange(self, world: World) -> None:
        """`exchange` returns a `Pending`; waiting for it later, or twice, changes nothing."""

        def on_rank(case: Case, rank: int, dispatcher: TokenDispatcher[Any]) -> None:
            given = case.inputs(rank)
            plan = dispatcher.plan(given.routing())
            pending = dispatcher.exchange(plan, dispatcher.prepare(plan, given.x_TD, given.probs_TK))
            require(isinstance(pending, Pending), f"exchange returns {type(pending).__name__}, not a Pending")
            first = dispatcher.arrange(plan, pending.wait())
            second = dispatcher.arrange(plan, pending.wait())
            same(second.rows_RD, first.rows_RD, f"{case.name}: the second wait")

        self.on_cases(self.edge_cases(world), on_rank)


def _cut(parcel: Parcel) -> Parcel:
    """The parcel as leaves, so that one step's backward can be run alone."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    return Parcel(
        rows=leaf(parcel.rows),
        probs=None if parcel.probs is None else leaf(parcel.probs),
        extra={name: leaf(tensor) for name, tensor in parcel.extra.items()},
    )
