"""Attention of query slots to a part of their keys, and how parts add up: softmax with the log of its denominator.

Two parts of the keys give out_1, lse_1 and out_2, lse_2. Over both together lse = log(exp(lse_1) + exp(lse_2)) and
out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse). The gradients of a part need only its own keys and the out and
lse of the whole (FlashAttention, arXiv 2205.14135; RingAttention, arXiv 2310.01889).

Shape legend: B rows, S slots, H query heads, G key/value heads, D features of queries and keys, V of values; Q queries
and K keys of a tile, N features of a tile, at least D and V. Sums are kept in the internal dtype: FP32, and FP64 where
the input is FP64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_parallel._torch_compat import fused_attention, fused_attention_backward
from moe_parallel.attention.tiles import Tile
from moe_parallel.precision import internal_dtype


class PartialAttention:
    """Output of some queries over the keys that have come so far.

    Attributes:
        out_BSHV: in the internal dtype; 0 where a query has seen no key.
        lse_BHS: likewise; -inf there.
    """

    def __init__(self, q_BSHD: Tensor, value_features: int) -> None:
        batch, slots, heads, _ = q_BSHD.shape
        dtype = internal_dtype(q_BSHD.dtype)
        self.out_BSHV = q_BSHD.new_zeros((batch, slots, heads, value_features), dtype=dtype)
        self.lse_BHS = q_BSHD.new_full((batch, heads, slots), -torch.inf, dtype=dtype)
        self._empty = True

    def add(self, tile: Tile, out_BHQV: Tensor, lse_BHQ: Tensor) -> None:
        """Take in what the queries of a tile see of its keys."""
        so_far_BQHV = self.out_BSHV[tile.rows, tile.queries]
        so_far_BHQ = self.lse_BHS[tile.rows, :, tile.queries]
        if self._empty:  # the first tile, usually a rank's own keys, needs no weights
            self._empty = False
            so_far_BQHV.copy_(out_BHQV.transpose(1, 2))
            so_far_BHQ.copy_(lse_BHQ)
            return
        lse_BHQ = lse_BHQ.to(so_far_BHQ.dtype)
        both_BHQ = torch.logaddexp(so_far_BHQ, lse_BHQ)
        finite_BHQ = both_BHQ.masked_fill(both_BHQ == -torch.inf, 0)  # -inf - -inf is NaN
        old_BQH1, new_BQH1 = ((lse - finite_BHQ).exp().transpose(1, 2).unsqueeze(3) for lse in (so_far_BHQ, lse_BHQ))
        so_far_BQHV.mul_(old_BQH1).addcmul_(out_BHQV.transpose(1, 2), new_BQH1)
        so_far_BHQ.copy_(both_BHQ)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attended:
    """Queries with their output over all keys, for the backward of parts.

    Attributes:
        dq_BSHD: where the gradient of the queries adds up, in the internal dtype.
    """

    grad_BSHV: Tensor
    q_BSHD: Tensor
    out_BSHV: Tensor
    lse_BHS: Tensor
    dq_BSHD: Tensor


def attend(
    q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, tiles: Sequence[Tile], scale: float, partial: PartialAttention
) -> None:
    """Add to `partial` what the queries see of these keys.

    H is a multiple of G, and query head h reads key/value head `h // (H // G)`.
    """
    value_features = v_BSGV.shape[3]
    if tiles:
        q_BSHD, k_BSGD, v_BSGV = _to_one_width(q_BSHD, k_BSGD, v_BSGV)
    for tile in tiles:
        q_BHQN = _cut(q_BSHD, tile, tile.queries)
        k_BGKN, v_BGKN = (_cut(x, tile, tile.keys) for x in (k_BSGD, v_BSGV))
        out_BHQN, lse_BHQ = softmax_with_lse(q_BHQN, k_BGKN, v_BGKN, tile.visible_BQK, tile.causal, scale)
        partial.add(tile, out_BHQN[..., :value_features], lse_BHQ)


def attend_backward(
    attended: Attended,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    tiles: Sequence[Tile],
    scale: float,
    dk_BSGD: Tensor,
    dv_BSGV: Tensor,
) -> None:
    """Add the gradients over these keys to `attended.dq_BSHD`, `dk` and `dv`, which are in the internal dtype."""
    if not tiles:
        return
    features, value_features = k_BSGD.shape[3], v_BSGV.shape[3]
    q_BSHN, k_BSGN, v_BSGN, grad_BSHN, out_BSHN = _to_one_width(
        attended.q_BSHD, k_BSGD, v_BSGV, attended.grad_BSHV, attended.out_BSHV
    )
    for tile in tiles:
        grad_BHQN, q_BHQN, out_BHQN = (_cut(x, tile, tile.queries) for x in (grad_BSHN, q_BSHN, out_BSHN))
        k_BGKN, v_BGKN = (_cut(x, tile, tile.keys) for x in (k_BSGN, v_BSGN))
        lse_BHQ = attended.lse_BHS[tile.rows, :, tile.queries]
        dq_BHQN, dk_BGKN, dv_BGKN = softmax_backward(
            grad_BHQN, q_BHQN, k_BGKN, v_BGKN, out_BHQN, lse_BHQ, tile.visible_BQK, tile.causal, scale
        )
        attended.dq_BSHD[tile.rows, tile.queries] += dq_BHQN[..., :features].transpose(1, 2)
        dk_BSGD[tile.rows, tile.keys] += dk_BGKN[..., :features].transpose(1, 2)
        dv_BSGV[tile.rows, tile.keys] += dv_BGKN[..., :value_features].transpose(1, 2)


def softmax_with_lse(
    q_BHQN: Tensor, k_BGKN: Tensor, v_BGKN: Tensor, visible_BQK: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out_BHQN and lse_BHQ by torch's fused kernels; 0 and -inf for a query that sees no key.

    Equal to `plain_softmax_with_lse`.
    """
    if _has_no_kernel(q_BHQN):
        return plain_softmax_with_lse(q_BHQN, k_BGKN, v_BGKN, visible_BQK, causal, scale)
    bias_B1QK = _bias(visible_BQK, q_BHQN)
    out_BHQN, lse_BHQ = fused_attention(q_BHQN, k_BGKN, v_BGKN, bias_B1QK, causal, scale)
    if visible_BQK is not None:
        blind_B1Q = ~visible_BQK.any(2).unsqueeze(1)  # the kernel says 0 and not -inf
        lse_BHQ = lse_BHQ.masked_fill(blind_B1Q, -torch.inf)
        out_BHQN = out_BHQN.masked_fill(blind_B1Q.unsqueeze(3), 0)
    return out_BHQN, lse_BHQ


def softmax_backward(
    grad_BHQN: Tensor,
    q_BHQN: Tensor,
    k_BGKN: Tensor,
    v_BGKN: Tensor,
    out_BHQN: Tensor,
    lse_BHQ: Tensor,
    visible_BQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a part of the keys, by torch's fused kernels; `out` and `lse` are those over all keys.

    Equal to `plain_softmax_backward`.
    """
    if _has_no_kernel(q_BHQN):
        return plain_softmax_backward(grad_BHQN, q_BHQN, k_BGKN, v_BGKN, out_BHQN, lse_BHQ, visible_BQK, causal, scale)
    lse_BHQ = lse_BHQ.masked_fill(lse_BHQ == -torch.inf, 0)  # who saw nothing at all; the mask hides everything here
    return fused_attention_backward(
        grad_BHQN, q_BHQN, k_BGKN, v_BGKN, out_BHQN, lse_BHQ, _bias(visible_BQK, q_BHQN), causal, scale
    )


def plain_softmax_with_lse(
    q_BHQN: Tensor, k_BGKN: Tensor, v_BGKN: Tensor, visible_BQK: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`softmax_with_lse` written out; holds all scores at once."""
    wide = internal_dtype(q_BHQN.dtype)
    scores_BHQK = _scores(q_BHQN.to(wide), k_BGKN.to(wide), visible_BQK, causal, scale)
    lse_BHQ = scores_BHQK.logsumexp(3)
    v_BHKN = _for_every_head(v_BGKN.to(wide), q_BHQN)
    return (_weights(scores_BHQK, lse_BHQ) @ v_BHKN).to(q_BHQN.dtype), lse_BHQ


def plain_softmax_backward(
    grad_BHQN: Tensor,
    q_BHQN: Tensor,
    k_BGKN: Tensor,
    v_BGKN: Tensor,
    out_BHQN: Tensor,
    lse_BHQ: Tensor,
    visible_BQK: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_backward` written out; holds all scores at once."""
    dtype, heads = q_BHQN.dtype, k_BGKN.shape[1]
    grad_BHQN, q_BHQN, k_BGKN, v_BGKN, out_BHQN = (
        x.to(internal_dtype(dtype)) for x in (grad_BHQN, q_BHQN, k_BGKN, v_BGKN, out_BHQN)
    )
    weights_BHQK = _weights(_scores(q_BHQN, k_BGKN, visible_BQK, causal, scale), lse_BHQ)
    d_weights_BHQK = grad_BHQN @ _for_every_head(v_BGKN, q_BHQN).transpose(2, 3)
    d_scores_BHQK = weights_BHQK * (d_weights_BHQK - (grad_BHQN * out_BHQN).sum(3, keepdim=True)) * scale
    dq_BHQN = d_scores_BHQK @ _for_every_head(k_BGKN, q_BHQN)
    dk_BHKN, dv_BHKN = d_scores_BHQK.transpose(2, 3) @ q_BHQN, weights_BHQK.transpose(2, 3) @ grad_BHQN
    dk_BGKN, dv_BGKN = (torch.unflatten(x, 1, (heads, -1)).sum(2) for x in (dk_BHKN, dv_BHKN))
    return dq_BHQN.to(dtype), dk_BGKN.to(dtype), dv_BGKN.to(dtype)


def _scores(q_BHQN: Tensor, k_BGKN: Tensor, visible_BQK: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores_BHQK = q_BHQN @ _for_every_head(k_BGKN, q_BHQN).transpose(2, 3) * scale
    if causal:
        visible_BQK = torch.ones_like(scores_BHQK[:1, 0], dtype=torch.bool).tril()
    return scores_BHQK if visible_BQK is None else scores_BHQK.masked_fill(~visible_BQK.unsqueeze(1), -torch.inf)


def _weights(scores_BHQK: Tensor, lse_BHQ: Tensor) -> Tensor:
    """The softmax; 0 for a query that sees no key, of which lse is -inf."""
    return (scores_BHQK - lse_BHQ.masked_fill(lse_BHQ == -torch.inf, 0).unsqueeze(3)).exp()


def _has_no_kernel(q_BHQN: Tensor) -> bool:
    return q_BHQN.dtype == torch.float64 if q_BHQN.is_cuda else not q_BHQN.is_cpu


def _bias(visible_BQK: Tensor | None, q_BHQN: Tensor) -> Tensor | None:
    """What the kernels take for a mask: 0 or -inf, in the dtype of the queries."""
    if visible_BQK is None:
        return None
    zeros = torch.zeros(visible_BQK.shape, dtype=q_BHQN.dtype, device=q_BHQN.device)
    return zeros.masked_fill_(~visible_BQK, -torch.inf).unsqueeze(1)


def _to_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With as many features as the widest, by zeros, which change no product; the fused kernels know one width only."""
    features = max(x.shape[-1] for x in tensors)
    if tensors[0].is_cuda:
        features += -features % 8  # what the kernels ask for there
    return tuple(x if x.shape[-1] == features else F.pad(x, (0, features - x.shape[-1])) for x in tensors)


def _cut(x_BSHN: Tensor, tile: Tile, slots: slice) -> Tensor:
    return x_BSHN[tile.rows, slots].transpose(1, 2)


def _for_every_head(x_BGKN: Tensor, q_BHQN: Tensor) -> Tensor:
    return x_BGKN.repeat_interleave(q_BHQN.shape[1] // x_BGKN.shape[1], dim=1)
