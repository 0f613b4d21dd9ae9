"""`ContextAttention`: what the attention cores of context parallelism have in common.

Shape legend: B rows, S slots of a row on this rank, H query heads, G key/value heads, D features of queries and keys,
V of values.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from moe_parallel.attention.core import check_attention
from moe_parallel.attention.local import LocalAttention
from moe_parallel.sequence import ContextSplit, SequenceInfo


class ContextAttention(ABC):
    """An `AttentionCore` for rows that ranks share; rows that are not split are attended to locally."""

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
            MoeParallelError: H is not a multiple of G, a window in which a token does not see itself, or the slots of a
                document are not consecutive; what more a core asks for, its class says.
            CollectiveError: a peer died or did not come in time; the message names the group.
        """
        if info.context is None:
            return LocalAttention()(q_BSHD, k_BSGD, v_BSGV, info, scale=scale, window=window)
        check_attention(q_BSHD, k_BSGD, window)
        scale = q_BSHD.shape[3] ** -0.5 if scale is None else scale
        return self.attend_shared(q_BSHD, k_BSGD, v_BSGV, info.context, scale, window)

    @abstractmethod
    def attend_shared(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, split: ContextSplit, scale: float, window: int | None
    ) -> Tensor:
        """out_BSHV of the slots that this rank holds of `split`."""
