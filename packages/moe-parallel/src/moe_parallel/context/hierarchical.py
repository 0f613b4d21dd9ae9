"""`HierarchicalAttention`: all-to-all inside a machine, a ring across machines (USP, arXiv 2405.07719).

The inner ranks of a machine exchange heads, after which each holds the slots of all of them for its heads; these travel
around the ring of the ranks with the same place in their machines.

Shape legend: B rows, S slots of a row on this rank, C ranks of the split, I inner and O outer ranks, C = I * O; H query
heads, G key/value heads, D features of queries and keys, V of values.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel.collectives import describe_group
from moe_parallel.context.core import ContextAttention
from moe_parallel.context.head_exchange import HeadExchange
from moe_parallel.context.ring import RingAttention
from moe_parallel.context.rules import check_heads
from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import ContextSplit, once_per_microbatch


class HierarchicalAttention(ContextAttention):
    """Attention with all-to-alls inside the inner group and a ring over the outer group.

    Rank `i + I * o` of the group of the split is rank i of its inner and rank o of its outer group, as on the axes
    `cp_inner` and `cp_outer` of `FoldedMesh`.

    Raises:
        MoeParallelError: when it is called, heads cannot be shared out to the inner ranks, or the groups are not inner
            and outer groups of that of the split.
    """

    def __init__(self, inner: ProcessGroup, outer: ProcessGroup) -> None:
        self._inner, self._outer, self._ring = inner, outer, RingAttention()

    def attend_shared(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, split: ContextSplit, scale: float, window: int | None
    ) -> Tensor:
        check_heads("all_to_all", q_BSHD.shape[2], k_BSGD.shape[2], ranks=self._inner.size())
        exchange, outer = once_per_microbatch(split, (self._inner, self._outer), lambda: self._two_levels(split))
        q, k, v = exchange.to_heads(q_BSHD, k_BSGD, v_BSGV)
        return exchange.to_slots(self._ring.attend_shared(q, k, v, outer, scale, window))

    def _two_levels(self, split: ContextSplit) -> tuple[HeadExchange, ContextSplit]:
        """The exchange inside, and the split over the outer group of the slots that inner ranks hold together."""
        inner, outer, ranks = self._inner, self._outer, dist.get_process_group_ranks(split.group)
        place, size = outer.rank() * inner.size(), inner.size()
        if (
            dist.get_process_group_ranks(inner) != ranks[place : place + size]
            or dist.get_process_group_ranks(outer) != ranks[inner.rank() :: size]
        ):
            raise MoeParallelError(
                f"{describe_group(inner)} and {describe_group(outer)} are not consecutive ranks of "
                f"{describe_group(split.group)} and those with the same place among them, as groups of the axes "
                "cp_inner and cp_outer of a mesh are"
            )
        slot_OBR = torch.unflatten(split.slot_CBS, 0, (-1, size)).transpose(1, 2).flatten(2)
        slot_OBR, order_OBR = slot_OBR.sort(dim=2)
        place_BI = order_OBR[outer.rank()].argsort(dim=1)
        whole = ContextSplit(group=outer, slot_CBS=slot_OBR, document_BR=split.document_BR)
        return HeadExchange(inner, torch.unflatten(place_BI, 1, (size, -1)).transpose(0, 1).contiguous()), whole
