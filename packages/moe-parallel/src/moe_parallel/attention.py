"""`AttentionCore`: softmax(q k^T) v of one microbatch, and how it is done where every rank holds whole sequences.

Shape legend: B sequences (rows) here, S token slots per row, H query heads, G key/value heads, D features per head.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import SequenceInfo


class AttentionCore(Protocol):
    """Causal attention between the token slots of a row; the seam of local, ring, all-to-all and gather attention."""

    def __call__(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, info: SequenceInfo) -> Tensor:
        """out_BSHD in the dtype of q. H is a multiple of G; query head h reads key/value head `h // (H // G)`.

        A token attends to itself and to earlier tokens of its own document.
        """


class LocalAttention:
    """Attention over whole sequences, by `torch.nn.functional.scaled_dot_product_attention`; no communication.

    Padding needs no mask: padding slots sit at the end of a row, where causality hides them from every real token.
    Rows that several documents share (`info.document_BS`) are masked to causal and same document. Every slot sees
    itself, so no row of the softmax is empty. The host is not synchronised.

    Args:
        scale: factor on q k^T; None is `D ** -0.5`.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale

    def __call__(self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, info: SequenceInfo) -> Tensor:
        """out_BSHD, as `AttentionCore`.

        Raises:
            MoeParallelError: the sequences are split over ranks (`info.context`), or H is not a multiple of G.
        """
        if info.context is not None:
            raise MoeParallelError(
                f"local attention needs whole sequences, but they are split over {info.context.size()} ranks; "
                "choose an attention core that communicates, or parallel.cp = 1"
            )
        num_heads, num_kv_heads = q_BSHD.shape[2], k_BSGD.shape[2]
        if num_heads % num_kv_heads:
            raise MoeParallelError(f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} key/value heads")
        # Grouped heads inside the kernel: 4-8 % faster than expanding k and v first (CPU, forward and backward,
        # B16 S256 H4 G2 D32, float32 and bfloat16), and k and v are not held twice.
        out_BHSD = F.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2),
            k_BSGD.transpose(1, 2),
            v_BSGD.transpose(1, 2),
            attn_mask=None if info.document_BS is None else _document_mask(info.document_BS),
            is_causal=info.document_BS is None,
            scale=self.scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        return out_BHSD.transpose(1, 2)


def _document_mask(document_BS: Tensor) -> Tensor:
    """[B, 1, S, S], True where query slot s may see key slot t: `t <= s` and the same document."""
    slot_S = torch.arange(document_BS.shape[1], device=document_BS.device)
    same_BSS = document_BS.unsqueeze(2) == document_BS.unsqueeze(1)
    return (same_BSS & (slot_S.unsqueeze(1) >= slot_S)).unsqueeze(1)
