"""The router of a MoE layer: gate, choices, and the losses that keep experts balanced.

Shape legend: T tokens here, D model, E experts, K choices per token, M balance microbatches, G segments.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import Routing, internal_dtype
from moe_kernels.config import RouterConfig
from moe_kernels.losses import balance_loss, global_balance_loss, inject_gradient, plain_choices, z_loss
from moe_kernels.routing import route, scores
from moe_train.models.config import BalanceConfig
from moe_train.scale import MicrobatchScale


class Router(nn.Module):
    """Gate of one layer. The weight [E, D] stays in the internal dtype, whatever the model computes in.

    Args:
        layer: number of the layer, the row of the load window that belongs to it.
    """

    def __init__(
        self,
        num_experts: int,
        model_features: int,
        config: RouterConfig,
        balance: BalanceConfig,
        *,
        layer: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_features, dtype=internal_dtype(dtype)))
        self.config = config
        self.balance = balance
        self.layer = layer
        self.name = f"layers.{layer}"

    def forward(self, x_TD: Tensor, valid_T: Tensor, ids_TK: Tensor | None) -> tuple[Routing, Tensor]:
        """Routing and logits [T, E]; `ids_TK` repeats earlier choices, with probabilities from the logits of now."""
        logits_TE = F.linear(x_TD.to(self.weight.dtype), self.weight)
        return route(logits_TE, self.config, valid_T=valid_T, ids_TK=ids_TK), logits_TE

    def balanced(self, routing: Routing, logits_TE: Tensor, scale: MicrobatchScale) -> tuple[Tensor, dict[str, Tensor]]:
        """The probabilities with the gradients of the balance losses attached, and the value of each loss.

        Values are weighted by the step's weights and not by the coefficients, and detached.
        """
        balance = self.balance
        probs_TK = routing.probs_TK
        values = dict.fromkeys(("aux", "seq", "glob", "z"), logits_TE.new_zeros(()))

        def add(name: str, loss: Tensor, coefficient: float) -> None:
            nonlocal probs_TK
            values[name] = loss.detach()
            probs_TK = inject_gradient(probs_TK, loss, coefficient)

        if balance.z > 0:
            add("z", (z_loss(logits_TE) * scale.token_weight_T).sum(), balance.z)
        if not balance.aux > 0 and not balance.seq > 0 and not balance.glob > 0:
            return probs_TK, values
        scores_TE = scores(logits_TE, self.config.score)
        ids_TK = routing.ids_TK if balance.routing == "routed" else plain_choices(scores_TE.detach(), self.config.top_k)
        if balance.aux > 0:
            loss_M = balance_loss(
                scores_TE, ids_TK, scale.balance_T, scale.balance_weight_M.numel(), valid_T=scale.valid_T
            )
            add("aux", (loss_M * scale.balance_weight_M).sum(), balance.aux)
        if balance.seq > 0:
            loss_G = balance_loss(
                scores_TE, ids_TK, scale.segment_T, scale.segment_weight_G.numel(), valid_T=scale.valid_T
            )
            add("seq", (loss_G * scale.segment_weight_G).sum(), balance.seq)
        if balance.glob > 0 and scale.window is not None:
            loss = global_balance_loss(
                scores_TE,
                scale.window.counts_LE[self.layer],
                scale.window.num_tokens,
                scale.num_tokens,
                self.config.top_k,
                valid_T=scale.valid_T,
            )
            add("glob", loss, balance.glob)
        return probs_TK, values
