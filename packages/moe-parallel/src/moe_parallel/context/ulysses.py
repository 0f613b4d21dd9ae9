"""`AllToAllAttention`: whole rows of a part of the heads on every rank, by all-to-all (Ulysses, arXiv 2309.14509).

Shape legend: B rows, S slots of a row on this rank, H query heads, G key/value heads, D features of queries and keys,
V of values.
"""

import torch
from torch import Tensor

from moe_parallel.attention import LocalAttention, attend_to_rows, check_attention
from moe_parallel.context.head_exchange import HeadExchange
from moe_parallel.context.rules import check_heads
from moe_parallel.context.tiles import once_per_split, tiles_of
from moe_parallel.context.whole_rows import tiled_attention
from moe_parallel.sequence import ContextSplit, SequenceInfo


class AllToAllAttention:
    """Attention with four all-to-alls, of q, k, v and the output; an `AttentionCore`.

    A rank sends and receives its share of q, k, v and the output once, whatever the number of ranks, which is less
    than the keys and values of a ring for many ranks; but there are no more ranks than heads. Between the exchanges
    every rank attends to whole rows, so that any split is balanced. Rows that are not split are attended to locally.
    """

    def __call__(
        self,
        q_BSHD: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        info: SequenceInfo,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """out_BSHV, as `AttentionCore`; collective over the group of the split, in forward and backward.

        Raises:
            MoeParallelError: heads cannot be shared out to the ranks, or a window in which a token does not see itself.
            CollectiveError: a peer died or did not come in time; the message names the group.
        """
        split = info.context
        if split is None:
            return LocalAttention()(q_BSHD, k_BSGD, v_BSGV, info, scale=scale, window=window)
        check_attention(q_BSHD, k_BSGD, window)
        check_heads("all_to_all", q_BSHD.shape[2], k_BSGD.shape[2], ranks=split.group.size())
        exchange = once_per_split(split, "whole rows", lambda: HeadExchange(split.group, split.slot_CBS))
        q, k, v = exchange.to_heads(q_BSHD, k_BSGD, v_BSGV)
        if split.document_BR is None and window is None:
            return exchange.to_slots(attend_to_rows(q, k, v, None, scale))
        rows = once_per_split(split, "rows of one rank", lambda: _whole_rows(split))
        return exchange.to_slots(tiled_attention(q, k, v, tiles_of(rows, 0, window, q.device)[0], scale))


def _whole_rows(split: ContextSplit) -> ContextSplit:
    """As if one rank held all slots."""
    ranks, batch, slots = split.slot_CBS.shape
    slot_R = torch.arange(ranks * slots, device=split.slot_CBS.device)
    return ContextSplit(group=split.group, slot_CBS=slot_R.expand(1, batch, -1), document_BR=split.document_BR)
