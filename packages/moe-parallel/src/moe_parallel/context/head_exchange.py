"""From a part of the slots with all heads to all slots with a part of the heads, and back, by all-to-all.

Each direction is the other's gradient. No rank computes anything here, so values are moved bit for bit; only gradients
of key/value heads that several ranks were given are added up.

Shape legend: B rows, S slots of a row on one rank, C ranks of the exchange, R = C*S; H heads, N = H / C heads on one
rank between the exchanges, F features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_parallel.collectives import all_to_all
from moe_parallel.pending import Pending
from moe_parallel.precision import internal_dtype


class HeadExchange:
    """The exchange of one split.

    Args:
        place_CBS: for each rank of the group the places, in the joined rows, of the slots that it holds; together they
            are 0 to R - 1.
    """

    def __init__(self, group: ProcessGroup, place_CBS: Tensor) -> None:
        ranks, batch, self._slots = place_CBS.shape
        self._group, self._ranks, self._place_CBS = group, ranks, place_CBS
        self._order_BR = place_CBS.transpose(0, 1).flatten(1).argsort(dim=1)
        self._row_B1 = torch.arange(batch, device=place_CBS.device).unsqueeze(1)

    def to_heads(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of R slots, in order of their places, of this rank's heads.

        H is a multiple of C. So is G, or C of G: then C / G ranks, whose queries share a key/value head, get it each.
        """
        q, k, v = _ToHeads.apply(self, q_BSHD, k_BSGD, v_BSGV)  # type: ignore[no-untyped-call]
        return q, k, v

    def to_slots(self, out_BRNV: Tensor) -> Tensor:
        """out_BSHV of this rank's slots with all heads."""
        out_BSHV: Tensor = _ToSlots.apply(self, out_BRNV)  # type: ignore[no-untyped-call]
        return out_BSHV

    def hand_out_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x_BRNF for each x_BSHF; the exchanges are in flight together."""
        pending = [
            self._exchange(torch.unflatten(x_BSHF, 2, (self._ranks, -1)).permute(2, 0, 1, 3, 4)) for x_BSHF in tensors
        ]
        source_BR, slot_BR = self._order_BR // self._slots, self._order_BR % self._slots
        return tuple(received_CBSNF.wait()[source_BR, self._row_B1, slot_BR] for received_CBSNF in pending)

    def hand_out_slots(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x_BSHF for each x_BRNF; the exchanges are in flight together."""
        pending = [self._exchange(x_BRNF[self._row_B1, self._place_CBS]) for x_BRNF in tensors]
        return tuple(received_CBSNF.wait().permute(1, 2, 0, 3, 4).flatten(2, 3) for received_CBSNF in pending)

    def _exchange(self, x_CBSNF: Tensor) -> Pending[Tensor]:
        rows = [1] * self._ranks
        return all_to_all(x_CBSNF, self._group, send_rows=rows, receive_rows=rows)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ranks = exchange._ranks
        ctx.exchange, ctx.copies = exchange, [max(ranks // x_BSHF.shape[2], 1) for x_BSHF in tensors]
        whole = [
            x_BSHF.repeat_interleave(copies, dim=2) if copies > 1 else x_BSHF
            for x_BSHF, copies in zip(tensors, ctx.copies, strict=True)
        ]
        return exchange.hand_out_heads(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = ctx.exchange.hand_out_slots(grads)
        return None, *(_add_copies(x_BSHF, copies) for x_BSHF, copies in zip(whole, ctx.copies, strict=True))


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, out_BRNV: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.hand_out_slots([out_BRNV])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHV: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.exchange.hand_out_heads([grad_BSHV])[0]


def _add_copies(x_BSHF: Tensor, copies: int) -> Tensor:
    if copies == 1:
        return x_BSHF
    return torch.unflatten(x_BSHF.to(internal_dtype(x_BSHF.dtype)), 2, (-1, copies)).sum(3).to(x_BSHF.dtype)
