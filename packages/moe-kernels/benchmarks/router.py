"""The router and its balance losses beside the sequence of PyTorch operations that a model would write out.

    OMP_NUM_THREADS=1 python packages/moe-kernels/benchmarks/router.py [--device cuda] [--tokens 4096]

For the routers of DeepSeek-V3 and Qwen3-30B-A3B: the median time of forward and backward as a share of the written-out
sequence's, which takes turns with it, so that a busy machine slows both; below one is faster. `choice` goes from logits
to ids, weights and counts; `losses` are the sequence loss over 8 segments and the z-loss. On a CPU it measures the
plain implementation, on a GPU both, and there it also counts the kernels that are launched.

The written-out sequence promises no order of ties, and no host synchronisation either.

Shape legend: T tokens, K choices per token, E experts, S segments.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timing import in_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_kernels import RouterConfig, balance_loss, plain_choices, route, scores, z_loss
from moe_kernels.implementation import implementation

SEGMENTS = 8


@dataclass(frozen=True)
class Model:
    """A router of a public model."""

    name: str
    experts: int
    config: RouterConfig
    bias: bool


MODELS = (
    Model(
        "DeepSeek-V3, E 256, K 8, groups 4/8",
        256,
        RouterConfig(top_k=8, score="sigmoid", scale=2.5, groups=8, group_top_k=4),
        bias=True,
    ),
    Model("Qwen3-30B-A3B, E 128, K 8", 128, RouterConfig(top_k=8), bias=False),
)


def written_choice(model: Model, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    config = model.config
    scores_TE = logits_TE.sigmoid() if config.score == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if config.groups > 1:
        choice_TGE = choice_TE.view(-1, config.groups, model.experts // config.groups)
        best_TG = choice_TGE.topk(config.top_k // config.group_top_k).values.sum(-1)
        open_TG = torch.zeros_like(best_TG).scatter_(-1, best_TG.topk(config.group_top_k).indices, 1)
        choice_TE = choice_TGE.masked_fill(open_TG[..., None] == 0, -torch.inf).view_as(choice_TE)
    ids_TK = choice_TE.topk(config.top_k).indices
    probs_TK = scores_TE.gather(-1, ids_TK)
    probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20) * config.scale
    return probs_TK, F.one_hot(ids_TK, model.experts).sum((0, 1))


def our_choice(model: Model, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    routing = route(logits_TE, model.config, bias_E=bias_E)
    return routing.probs_TK, routing.counts_E()


def written_losses(model: Model, logits_TE: Tensor, segment_T: Tensor) -> Tensor:
    raw_TE = logits_TE.sigmoid() if model.config.score == "sigmoid" else logits_TE.softmax(-1)
    scores_STE = (raw_TE / raw_TE.sum(-1, keepdim=True)).view(SEGMENTS, -1, model.experts)
    ids_STK = scores_STE.detach().topk(model.config.top_k).indices
    counts_SE = F.one_hot(ids_STK, model.experts).sum((1, 2))
    factor = model.experts / (model.config.top_k * scores_STE.shape[1] ** 2)
    return factor * (counts_SE * scores_STE.sum(1)).sum() + logits_TE.logsumexp(-1).square().sum()


def our_losses(model: Model, logits_TE: Tensor, segment_T: Tensor) -> Tensor:
    scores_TE = scores(logits_TE, model.config.score)
    ids_TK = plain_choices(scores_TE.detach(), model.config.top_k)
    return balance_loss(scores_TE, ids_TK, segment_T, SEGMENTS).sum() + z_loss(logits_TE).sum()


def calls_of(model: Model, tokens: int, device: str) -> dict[str, dict[str, Callable[[], object]]]:
    """For each measure the written-out sequence and ours, each as forward and backward."""
    logits_TE = torch.randn(tokens, model.experts, device=device, requires_grad=True)
    grad_TK = torch.randn(tokens, model.config.top_k, device=device)
    bias_E = torch.randn(model.experts, device=device) / 10 if model.bias else None
    segment_T = torch.arange(SEGMENTS, device=device).repeat_interleave(tokens // SEGMENTS)

    def choice(call: Callable[[Model, Tensor, Tensor | None], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(model, logits_TE, bias_E)[0], logits_TE, grad_TK)

    def losses(call: Callable[[Model, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(model, logits_TE, segment_T), logits_TE)

    return {
        "choice": {"written out": choice(written_choice), "ours": choice(our_choice)},
        "losses": {"written out": losses(written_losses), "ours": losses(our_losses)},
    }


def launches(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiler.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=None, help="a multiple of 8; 1024 on a CPU, 8192 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tokens = options.tokens or (8192 if options.device == "cuda" else 1024)
    for model in MODELS:
        for measure, calls in calls_of(model, tokens, options.device).items():
            for name in ("plain", "triton") if options.device == "cuda" else ("plain",):
                with implementation(name):
                    median = dict(
                        zip(calls, in_turns(list(calls.values()), options.device, options.rounds), strict=True)
                    )
                    counted = {side: launches(call) for side, call in calls.items()} if options.device == "cuda" else {}
                more = f", launches {counted['ours']} beside {counted['written out']}" if counted else ""
                print(
                    f"{model.name}, T {tokens}, {measure}, {name}: {median['ours'] / median['written out']:.2f} "
                    f"of {median['written out'] * 1e3:.2f} ms{more}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
