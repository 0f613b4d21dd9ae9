"""Grouped-query self-attention with rotary positions.

Shape legend: B sequences, S slots, D model, H query heads, G key/value heads, F features of a head.
"""

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_kernels.rope import apply_rope
from moe_parallel import AttentionCore, SequenceInfo


class Attention(nn.Module):
    """Projections and normalisation around an `AttentionCore`; head counts follow from the weights' shapes.

    Args:
        qk_norm_eps: epsilon of the RMSNorm over each query and key head; None leaves it out.
    """

    def __init__(
        self,
        model_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_features: int,
        core: AttentionCore,
        *,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.head_features = head_features
        self.core = core
        self.q_proj = nn.Linear(model_features, num_heads * head_features, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(model_features, num_kv_heads * head_features, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(model_features, num_kv_heads * head_features, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * head_features, model_features, bias=False, dtype=dtype)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_features, qk_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(head_features, qk_norm_eps, dtype=dtype)

    def forward(self, x_BSD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [B, S, D]; `rope` holds cosine and sine of the positions in `info`."""
        heads = (*x_BSD.shape[:2], -1, self.head_features)
        q_BSHF = self.q_proj(x_BSD).view(heads)
        k_BSGF = self.k_proj(x_BSD).view(heads)
        v_BSGF = self.v_proj(x_BSD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHF, k_BSGF = self.q_norm(q_BSHF), self.k_norm(k_BSGF)
        out_BSHF = self.core(apply_rope(q_BSHF, *rope), apply_rope(k_BSGF, *rope), v_BSGF, info)
        out_BSD: Tensor = self.o_proj(out_BSHF.flatten(2))
        return out_BSD
