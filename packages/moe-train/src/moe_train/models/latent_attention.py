"""Multi-head latent attention (MLA, arXiv 2405.04434): keys and values of a token are made from one small vector.

Shape legend: B sequences, S slots, T = B*S tokens, D model, H heads, R rotated features of a query or key head, N its
other features, V features of a value head, C features of the latent vector of keys and values.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_kernels.rope import apply_rope
from moe_memory.recompute import KEPT_UNITS, LayerUnits, Replay
from moe_parallel import AttentionCore, SequenceInfo
from moe_train.models.config import LatentConfig


class LatentAttention(nn.Module):
    """Projections and norms around an `AttentionCore`.

    Rotated features come first in a head. All key heads share theirs, which are a part of the projection to the latent
    vector.

    Args:
        head_features: N.
        softmax_factor: on the scale of the softmax, `(R + N) ** -0.5`.
        units: of the layer.
    """

    def __init__(
        self,
        model_features: int,
        num_heads: int,
        head_features: int,
        latent: LatentConfig,
        core: AttentionCore,
        *,
        norm_eps: float,
        window: int | None = None,
        softmax_factor: float = 1.0,
        units: LayerUnits = KEPT_UNITS,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.rotary_features = latent.rotary_features
        self.head_features = head_features
        self.value_features = latent.value_features
        self.core = core
        self.units = units
        self.window = window
        width = latent.rotary_features + head_features
        self.scale = softmax_factor * width**-0.5
        if latent.query_features is None:
            self.q_proj = nn.Linear(model_features, num_heads * width, bias=False, dtype=dtype)
        else:
            self.q_down_proj = nn.Linear(model_features, latent.query_features, bias=False, dtype=dtype)
            self.q_norm = RMSNorm(latent.query_features, norm_eps, dtype=dtype)
            self.q_up_proj = nn.Linear(latent.query_features, num_heads * width, bias=False, dtype=dtype)
        self.has_query_latent = latent.query_features is not None
        kv_features = latent.kv_features
        self.kv_down_proj = nn.Linear(model_features, kv_features + latent.rotary_features, bias=False, dtype=dtype)
        self.kv_norm = RMSNorm(kv_features, norm_eps, dtype=dtype)
        key_value = num_heads * (head_features + latent.value_features)
        self.kv_up_proj = nn.Linear(kv_features, key_value, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * latent.value_features, model_features, bias=False, dtype=dtype)

    def forward(self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attention output [T, D]; `rope` holds cosine and sine of the positions in `info`."""
        batch = info.position_BS.shape
        kv_features = self.kv_norm.weight.shape[0]
        kept = (*self.kv_down_proj(x_TD).split([kv_features, self.rotary_features], -1), *rope)
        up: Callable[..., tuple[Tensor, ...]]
        if self.has_query_latent:
            kept, up = (*kept, self.q_down_proj(x_TD)), partial(self._project_up, batch=batch)
            with self.units.making("mla_up_proj"):
                q_BSHF, k_BSHF, v_BSHV, *_ = made = up(*kept)
        else:
            # The vector that queries are made of is that of the residual stream, and what comes between is no smaller.
            up = partial(self._keys_and_values, batch=batch)
            q_BSHF = self._rotated(self.q_proj(x_TD), rope, batch)
            with self.units.making("mla_up_proj"):
                k_BSHF, v_BSHV, _ = made = up(*kept)
        out_BSHV = self.units.run("core_attn", self._attend, q_BSHF, k_BSHF, v_BSHV, info)
        self.units.idle("core_attn", (q_BSHF, k_BSHF, v_BSHV), out_BSHV)
        self.units.consumed("mla_up_proj", made, out_BSHV, up, *kept)
        joined_TF = out_BSHV.flatten(2).flatten(0, 1)
        out_TD: Tensor = self.o_proj(joined_TF)
        self.units.idle("attn_proj", (joined_TF,), out_TD)
        return out_TD

    def _project_up(
        self, c_TC: Tensor, k_rotary_TR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, q_TC: Tensor, *, batch: torch.Size
    ) -> tuple[Tensor, ...]:
        """Queries, keys, values, and the normalised vectors that they are made of."""
        normed_TC = self.q_norm(q_TC)
        q_BSHF = self._rotated(self.q_up_proj(normed_TC), (cos_BSR, sin_BSR), batch)
        return q_BSHF, *self._keys_and_values(c_TC, k_rotary_TR, cos_BSR, sin_BSR, batch=batch), normed_TC

    def _keys_and_values(
        self, c_TC: Tensor, k_rotary_TR: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, batch: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values, and the normalised vector that they are made of."""
        plain = self.head_features
        normed_TC = self.kv_norm(c_TC)
        kv_BSHF = self.kv_up_proj(normed_TC).view(*batch, -1, plain + self.value_features)
        k_plain_BSHN, v_BSHV = kv_BSHF.split([plain, self.value_features], -1)
        k_rotary_BS1R = apply_rope(k_rotary_TR.view(*batch, 1, self.rotary_features), cos_BSR, sin_BSR)
        k_BSHF = torch.cat((k_rotary_BS1R.expand(-1, -1, k_plain_BSHN.shape[2], -1), k_plain_BSHN), -1)
        return k_BSHF, v_BSHV, normed_TC

    def _rotated(self, q: Tensor, rope: tuple[Tensor, Tensor], batch: torch.Size) -> Tensor:
        return apply_rope(q.view(*batch, -1, self.rotary_features + self.head_features), *rope)

    def _attend(self, _: Replay, q_BSHF: Tensor, k_BSHF: Tensor, v_BSHV: Tensor, info: SequenceInfo) -> Tensor:
        return self.core(q_BSHF, k_BSHF, v_BSHV, info, scale=self.scale, window=self.window)
