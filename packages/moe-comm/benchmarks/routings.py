"""Routings that dispatchers are compared on: which experts tokens choose, the same for every dispatcher.

Shape legend: T tokens of one rank, K choices per token, E experts, G groups of them.
"""

import torch
from torch import Tensor

NAMES = ("uniform", "grouped", "zipf", "hot")
GROUPS, CHOSEN_GROUPS = 8, 4  # of DeepSeek-V3
ZIPF_EXPONENT = 1.2


def draw(name: str, *, tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    """Ids [T, K] without duplicates.

    `uniform` chooses all experts equally often; `grouped` first chooses 4 of 8 groups; of `zipf` the n-th expert, in an
    order that ranks share, has weight n^-1.2; with `hot` one expert is chosen by every token and the others equally
    often.
    """
    generator = torch.Generator().manual_seed(seed)
    # The largest of log(weight) + Gumbel noise are a draw without replacement by weight.
    noise_TE = -torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64).log().neg().log()
    scores_TE = noise_TE + _log_weights(name, num_experts)
    if name == "grouped":
        order_TG = torch.rand(tokens, GROUPS, generator=generator).argsort(1)
        is_open_TE = (order_TG < CHOSEN_GROUPS).repeat_interleave(num_experts // GROUPS, 1)
        scores_TE = scores_TE.masked_fill(~is_open_TE, -torch.inf)
    return scores_TE.topk(top_k, 1).indices


def _log_weights(name: str, num_experts: int) -> Tensor:
    log_weight_E = torch.zeros(num_experts, dtype=torch.float64)
    if name == "zipf":
        place_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0)) + 1
        log_weight_E = -ZIPF_EXPONENT * place_E.to(torch.float64).log()
    elif name == "hot":
        log_weight_E[num_experts // 3] = 1e6
    elif name not in NAMES:
        raise ValueError(f"there is no routing {name!r}; routings are {', '.join(NAMES)}")
    return log_weight_E
