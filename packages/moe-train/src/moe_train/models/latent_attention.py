"""Multi-head latent attention (MLA, arXiv 2405.04434): keys and values of a token are made from one small vector.

Shape legend: B sequences, S slots, T = B*S tokens, D model, H heads, R rotated features of a query or key head, N its
other features, V features of a value head, C features of the latent vector of keys and values.
"""

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_kernels.rope import apply_rope
from moe_parallel import AttentionCore, SequenceInfo
from moe_train.models.config import LatentConfig


class LatentAttention(nn.Module):
    """Projections and norms around an `AttentionCore`.

    Rotated features come first in a head. All key heads share theirs, which are a part of the projection to the latent
    vector.

    Args:
        head_features: N.
        softmax_factor: on the scale of the softmax, `(R + N) ** -0.5`.
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
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.rotary_features = latent.rotary_features
        self.head_features = head_features
        self.value_features = latent.value_features
        self.core = core
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
        rotary, plain, value = self.rotary_features, self.head_features, self.value_features
        batch = info.position_BS.shape
        q = self.q_up_proj(self.q_norm(self.q_down_proj(x_TD))) if self.has_query_latent else self.q_proj(x_TD)
        q_BSHF = apply_rope(q.view(*batch, -1, rotary + plain), *rope)
        kv_features = self.kv_norm.weight.shape[0]
        c_TC, k_rotary_TR = self.kv_down_proj(x_TD).split([kv_features, rotary], -1)
        kv_BSHF = self.kv_up_proj(self.kv_norm(c_TC)).view(*batch, -1, plain + value)
        k_plain_BSHN, v_BSHV = kv_BSHF.split([plain, value], -1)
        k_rotary_BS1R = apply_rope(k_rotary_TR.view(*batch, 1, rotary), *rope)
        k_BSHF = torch.cat((k_rotary_BS1R.expand(-1, -1, k_plain_BSHN.shape[2], -1), k_plain_BSHN), -1)
        out_BSHV = self.core(q_BSHF, k_BSHF, v_BSHV, info, scale=self.scale, window=self.window)
        out_TD: Tensor = self.o_proj(out_BSHV.flatten(2).flatten(0, 1))
        return out_TD
