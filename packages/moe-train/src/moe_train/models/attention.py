"""Grouped-query self-attention with rotary positions.

Shape legend: B sequences, S slots, T = B*S tokens, D model, H query heads, G key/value heads, F features of a head.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_kernels.rope import apply_rope
from moe_memory.recompute import KEPT_UNITS, LayerUnits, Replay
from moe_parallel import AttentionCore, SequenceInfo


class Attention(nn.Module):
    """Projections and normalisation around an `AttentionCore`; head counts follow from the weights' shapes.

    Args:
        qk_norm: RMSNorm of queries and keys before the rotation: over each head, over all features, or none.
        norm_eps: its epsilon.
        qkv_bias: query, key and value projections have a bias.
        window: tokens that a token sees; None is all before it.
        softmax_factor: on the scale of the softmax, `head_features ** -0.5`.
        units: of the layer.
    """

    def __init__(
        self,
        model_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_features: int,
        core: AttentionCore,
        *,
        qk_norm: Literal["none", "head", "all"],
        norm_eps: float,
        qkv_bias: bool = False,
        window: int | None = None,
        softmax_factor: float = 1.0,
        units: LayerUnits = KEPT_UNITS,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.head_features = head_features
        self.core = core
        self.units = units
        self.window = window
        self.scale = softmax_factor * head_features**-0.5
        query, key_value = num_heads * head_features, num_kv_heads * head_features
        self.q_proj = nn.Linear(model_features, query, bias=qkv_bias, dtype=dtype)
        self.k_proj = nn.Linear(model_features, key_value, bias=qkv_bias, dtype=dtype)
        self.v_proj = nn.Linear(model_features, key_value, bias=qkv_bias, dtype=dtype)
        self.o_proj = nn.Linear(query, model_features, bias=False, dtype=dtype)
        self.norm_heads = qk_norm == "head"
        self.q_norm = self.k_norm = None
        if qk_norm != "none":
            self.q_norm = RMSNorm(head_features if self.norm_heads else query, norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(head_features if self.norm_heads else key_value, norm_eps, dtype=dtype)

    def forward(self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [T, D]; `rope` holds cosine and sine of the positions in `info`."""
        heads = (*info.position_BS.shape, -1, self.head_features)
        q, k = self.q_proj(x_TD), self.k_proj(x_TD)
        v_BSGF = self.v_proj(x_TD).view(heads)
        if self.norm_heads:
            q, k = q.view(heads), k.view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHF, k_BSGF = apply_rope(q.view(heads), *rope), apply_rope(k.view(heads), *rope)
        out_BSHF = self.units.run("core_attn", self._attend, q_BSHF, k_BSGF, v_BSGF, info)
        self.units.idle("core_attn", (q_BSHF, k_BSGF, v_BSGF), out_BSHF)
        joined_TF = out_BSHF.flatten(2).flatten(0, 1)
        out_TD: Tensor = self.o_proj(joined_TF)
        self.units.idle("attn_proj", (joined_TF,), out_TD)
        return out_TD

    def _attend(self, _: Replay, q_BSHF: Tensor, k_BSGF: Tensor, v_BSGF: Tensor, info: SequenceInfo) -> Tensor:
        return self.core(q_BSHF, k_BSGF, v_BSGF, info, scale=self.scale, window=self.window)
