"""The router of a MoE layer: gate, choices, and the losses that keep experts balanced.

Shape legend: T tokens here, D model, E experts, K choices per token, M balance microbatches, G segments.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import Routing, internal_dtype, update_expert_bias
from moe_kernels.config import RouterConfig
from moe_kernels.jitter import jitter
from moe_kernels.losses import balance_loss, global_balance_loss, inject_gradient, plain_choices, z_loss
from moe_kernels.routing import route, scores
from moe_train.models.config import BalanceConfig
from moe_train.scale import RoutingScale


class Router(nn.Module):
    """Gate of one layer. The weight [E, D] stays in the internal dtype, whatever the model computes in.

    Args:
        name: of the layer.
        row: its place among the layers with a router, and so the row of the load window that belongs to it.

    Attributes:
        bias_E: the expert bias, a buffer in the internal dtype under every move and cast; None where it is not used.
    """

    bias_E: Tensor | None

    def __init__(
        self,
        num_experts: int,
        model_features: int,
        config: RouterConfig,
        balance: BalanceConfig,
        *,
        name: str,
        row: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, model_features, dtype=internal_dtype(dtype)))
        self.config = config
        self.balance = balance
        self.name = name
        self.row = row
        # It has a value from the start, where parameters may have no storage yet.
        bias_E = (
            None if balance.bias_rate is None else torch.zeros(num_experts, dtype=internal_dtype(dtype), device="cpu")
        )
        self.register_buffer("bias_E", bias_E)

    def forward(
        self, x_TD: Tensor, valid_T: Tensor, ids_TK: Tensor | None, scale: RoutingScale | None
    ) -> tuple[Routing, Tensor]:
        """Routing and logits [T, E]; `ids_TK` repeats earlier choices, with probabilities from the logits of now.

        What acts in training only does so where there is a scale.
        """
        x_TD = x_TD.to(self.weight.dtype)
        random = None if scale is None else scale.random.of(self.name)
        if random is not None and self.config.jitter:
            x_TD = jitter(x_TD, self.config.jitter, random.of("jitter"))
        logits_TE = F.linear(x_TD, self.weight)
        routing = route(
            logits_TE,
            self.config,
            bias_E=self.bias_E,
            valid_T=valid_T,
            ids_TK=ids_TK,
            random=random,
            reduce=None if scale is None else scale.reduce,
        )
        return routing, logits_TE

    def update_bias(self, counts_E: Tensor) -> None:
        """Move the expert bias, if there is one, against the load of an optimizer step, counted over all ranks."""
        if self.bias_E is not None and self.balance.bias_rate:
            update_expert_bias(self.bias_E, counts_E, self.balance.bias_rate, recentred=self.balance.bias_recentred)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        """As every module's `to`, `half` and so on, which move the bias and do not cast it: what a cast to bfloat16
        takes from it no later cast brings back."""
        bias_E = self.bias_E
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias_E is not None and self.bias_E is not None and self.bias_E.dtype != bias_E.dtype:
            self.bias_E = bias_E.to(self.bias_E.device)
        return self

    def balanced(self, routing: Routing, logits_TE: Tensor, scale: RoutingScale) -> tuple[Tensor, dict[str, Tensor]]:
        """The probabilities with the gradients of the balance losses attached, and the value of each loss.

        Values are this rank's part of a sum over all that share the step, weighted by the step's weights and not by the
        coefficients, and detached.
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
                scores_TE,
                ids_TK,
                scale.balance_T,
                scale.balance_weight_M.numel(),
                valid_T=scale.valid_T,
                reduce=scale.reduce,
            )
            add("aux", (loss_M * scale.balance_weight_M).sum(), balance.aux)
        if balance.seq > 0:
            loss_G = balance_loss(
                scores_TE,
                ids_TK,
                scale.segment_T,
                scale.segment_weight_G.numel(),
                valid_T=scale.valid_T,
                reduce=scale.reduce,
            )
            add("seq", (loss_G * scale.segment_weight_G).sum(), balance.seq)
        if balance.glob > 0 and scale.window is not None:
            loss = global_balance_loss(
                scores_TE,
                scale.window.counts_LE[self.row],
                scale.window.num_tokens,
                scale.num_tokens,
                self.config.top_k,
                valid_T=scale.valid_T,
            )
            add("glob", loss, balance.glob)
        return probs_TK, values
