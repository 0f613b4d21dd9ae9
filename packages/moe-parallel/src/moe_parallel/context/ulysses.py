"""`AllToAllAttention`: whole rows of a part of the heads on every rank, by all-to-all (Ulysses, arXiv 2309.14509).

Shape legend: B rows, S slots of a row on this rank, H query heads, G key/value heads, D features of queries and keys,
V of values.
"""

from torch import Tensor

from moe_parallel.attention.whole_rows import attend_to_rows
from moe_parallel.context.core import ContextAttention
from moe_parallel.context.head_exchange import HeadExchange
from moe_parallel.context.rules import check_heads
from moe_parallel.sequence import ContextSplit, once_per_microbatch


class AllToAllAttention(ContextAttention):
    """Attention with four all-to-alls, of q, k, v and the output.

    A rank sends and receives its share of q, k, v and the output once, whatever the number of ranks, which is less
    than the keys and values of a ring for many ranks; but there are no more ranks than heads. Between the exchanges
    every rank attends to whole rows, so that any split is balanced.

    Raises:
        MoeParallelError: when it is called, heads cannot be shared out to the ranks.
    """

    def attend_shared(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, split: ContextSplit, scale: float, window: int | None
    ) -> Tensor:
        check_heads("all_to_all", q_BSHD.shape[2], k_BSGD.shape[2], ranks=split.group.size())
        exchange = once_per_microbatch(split, "heads", lambda: HeadExchange(split.group, split.slot_CBS))
        q, k, v = exchange.to_heads(q_BSHD, k_BSGD, v_BSGV)
        return exchange.to_slots(attend_to_rows(q, k, v, split, split.document_BR, scale, window))
