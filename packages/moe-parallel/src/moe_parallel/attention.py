"""`AttentionCore`: softmax(q k^T) v of one microbatch, and how it is done where every rank holds whole sequences.

Shape legend: B sequences (rows) here, S token slots per row, H query heads, G key/value heads, D features per head of
queries and keys, V features per head of values.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
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


class LocalAttention:
    """Attention over whole sequences, by `torch.nn.functional.scaled_dot_product_attention`; no communication.

    Padding needs no mask: padding slots sit at the end of a row, where causality hides them from every real token.
    Rows that several documents share (`info.document_BS`) are masked to causal and same document. Every slot sees
    itself, so no row of the softmax is empty. The host is not synchronised.
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
        """out_BSHV, as `AttentionCore`.

        Raises:
            MoeParallelError: the sequences are split over ranks (`info.context`), H is not a multiple of G, or a window
                in which a token does not see itself.
        """
        if info.context is not None:
            raise MoeParallelError(
                f"local attention needs whole sequences, but they are split over {info.context.group.size()} ranks; "
                "choose an attention core that communicates, or parallel.cp = 1"
            )
        check_attention(q_BSHD, k_BSGD, window)
        mask = _row_mask(q_BSHD.shape[1], info.document_BS, window, q_BSHD.device)
        return attend_to_rows(q_BSHD, k_BSGD, v_BSGV, mask, scale)


def check_attention(q_BSHD: Tensor, k_BSGD: Tensor, window: int | None) -> None:
    """Raise a `MoeParallelError` if H is not a multiple of G, or a window does not hold the token itself."""
    num_heads, num_kv_heads = q_BSHD.shape[2], k_BSGD.shape[2]
    if num_heads % num_kv_heads:
        raise MoeParallelError(f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} key/value heads")
    if window is not None and window < 1:
        raise MoeParallelError(f"an attention window of {window} hides a token from itself; it is at least 1")


def attend_to_rows(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """out_BSHV over whole rows in slot order; a mask of None is causal."""
    value_features = v_BSGV.shape[-1]
    if value_features < q_BSHD.shape[-1]:
        # With values narrower than keys torch leaves its fused kernels, and holds all scores at once.
        v_BSGV = F.pad(v_BSGV, (0, q_BSHD.shape[-1] - value_features))
    # Grouped heads inside the kernel: 4-8 % faster than expanding k and v first (CPU, forward and backward,
    # B16 S256 H4 G2 D32, float32 and bfloat16), and k and v are not held twice.
    out_BHSV = F.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BSGD.transpose(1, 2),
        v_BSGV.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_BSHD.shape[2] != k_BSGD.shape[2],
    )
    return out_BHSV[..., :value_features].transpose(1, 2)


def _row_mask(slots: int, document_BS: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """True where query slot s may see key slot t: `t <= s < t + window` and the same document; None is `t <= s`.

    [S, S], or [B, 1, S, S] where rows hold several documents.
    """
    if document_BS is None and (window is None or window >= slots):
        return None
    slot_S = torch.arange(slots, device=device)
    distance_SS = slot_S.unsqueeze(1) - slot_S
    visible_SS = distance_SS >= 0 if window is None else (distance_SS >= 0) & (distance_SS < window)
    if document_BS is None:
        return visible_SS
    return (visible_SS & (document_BS.unsqueeze(2) == document_BS.unsqueeze(1))).unsqueeze(1)
