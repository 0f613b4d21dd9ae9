"""`AttentionCore`: softmax(q k^T) v of one microbatch, whoever holds its rows.

Shape legend: B sequences (rows) here, S token slots per row, H query heads, G key/value heads, D features per head of
queries and keys, V features per head of values.
"""

from typing import Protocol

from torch import Tensor

from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import SequenceInfo


class AttentionCore(Protocol):
    """Causal attention between the token slots of a row; the seam of local, ring, all-to-all and gather attention."""

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
        """out_BSHV in the dtype of q. H is a multiple of G; query head h reads key/value head `h // (H // G)`.

        A token attends to itself and to earlier tokens of its own document.

        Args:
            scale: factor on q k^T; None is `D ** -0.5`.
            window: tokens that a token sees, itself included; None is all of them.
        """


def check_attention(q_BSHD: Tensor, k_BSGD: Tensor, window: int | None) -> None:
    """Raise a `MoeParallelError` if H is not a multiple of G, or a window does not hold the token itself."""
    num_heads, num_kv_heads = q_BSHD.shape[2], k_BSGD.shape[2]
    if num_heads % num_kv_heads:
        raise MoeParallelError(f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} key/value heads")
    if window is not None and window < 1:
        raise MoeParallelError(f"an attention window of {window} hides a token from itself; it is at least 1")
