"""Rows that have arrived, to the experts of this rank: one local permutation, in an order that no journey changes.

Rows arrive in the order of the lanes and hops they came by; the contract is (local expert, source rank, source token,
choice). So the map is made as if they had come in the order of their sources, and then applied where they are.

Shape legend: C arrived rows, K choices that ride with each, E experts here, R arranged rows. Arrived rows lie lane
after lane, in each by the member of the last hops that they came from: n lanes (parts of the tokens), s places of
`etp`, j members of the hop before it, p members of the hop before that. Source ranks are (p, j, s), s fastest.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels.permute import RowMap, row_map


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """How many rows arrive from whom.

    Attributes:
        counts_nsjp: int64 rows by lane and source, on the device.
        total: C, padding included.
        block: rows of each (n, s, j) with padding at their end; None where there is no padding.
    """

    counts_nsjp: Tensor
    total: int
    block: int | None

    def order_of_sources(self) -> Tensor | None:
        """Arrived row of each place in the order (p, j, s, n), padding last, int64; None where it is that already.

        The host is not synchronised.
        """
        lanes, places, members, inner = self.counts_nsjp.shape
        if lanes == places == inner == 1:  # padding rows have no expert, so it does not matter where they are
            return None
        device = self.counts_nsjp.device
        last = self.counts_nsjp.numel()
        key_nsjp = torch.arange(last, device=device).view(inner, members, places, lanes).permute(3, 2, 1, 0)
        lengths_nsjp = self.counts_nsjp
        if self.block is not None:
            padding = self.block - lengths_nsjp.sum(-1, keepdim=True)
            lengths_nsjp = torch.cat((lengths_nsjp, padding), -1)
            key_nsjp = torch.cat((key_nsjp, torch.full_like(padding, last)), -1)
        key_C = key_nsjp.flatten().repeat_interleave(lengths_nsjp.flatten(), output_size=self.total)
        return key_C.argsort(stable=True)


def land(
    ids_CK: Tensor,
    arrivals: Arrivals | None,
    *,
    first_expert: int,
    experts: int,
    row_multiple: int,
    num_rows: int,
    exact: bool,
) -> RowMap:
    """The map of arrived rows to rows sorted by (local expert, source rank, token, choice).

    The host is not synchronised.

    Args:
        ids_CK: global expert ids that ride with the rows; -1 for none.
        arrivals: where the rows came from; None where they are the tokens of this rank.
        first_expert, experts: those of this rank.
        row_multiple: every expert's rows are padded to a multiple of this.
        num_rows: R. Choices whose row would lie beyond it get none.
        exact: R is just what the choices need.
    """
    local_CK = ids_CK.to(torch.int64) - first_expert
    local_CK = local_CK.masked_fill((local_CK < 0) | (local_CK >= experts), -1)
    order_C = None if arrivals is None else arrivals.order_of_sources()
    if order_C is not None:
        local_CK = local_CK.index_select(0, order_C)
    if exact and row_multiple == 1:
        rows = row_map(local_CK, experts, num_rows=num_rows)
    else:
        rows = row_map(local_CK, experts, row_multiple=row_multiple, capacity_rows=num_rows)
    return rows if order_C is None else _where_tokens_are(rows, order_C)


def _where_tokens_are(rows: RowMap, order_T: Tensor) -> RowMap:
    """A map of tokens in another order, for the tokens as they lie: token t of the map is the token order_T[t]."""
    if rows.num_tokens == 0 or rows.num_choices == 0:
        return rows
    choice_R = rows.choice_R.clamp(min=0)
    token_R = order_T.index_select(0, choice_R // rows.num_choices)
    moved_R = token_R * rows.num_choices + choice_R % rows.num_choices
    return replace(
        rows,
        choice_R=moved_R.where(rows.choice_R >= 0, -1) if rows.is_padded else moved_R,
        row_TK=torch.empty_like(rows.row_TK).index_copy_(0, order_T, rows.row_TK),
    )
