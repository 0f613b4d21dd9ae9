"""Bytes of activations that a MoE layer keeps for its backward, as a closed formula. Imports nothing heavy.

The formula is explained in docs/activation-memory.md. What plans and replays remember, the ids of rows and choices, is
not saved by autograd and not counted. It is that of the plain implementation on a CPU; kernels keep less of the router.

Legend: T tokens, D model, L width at which experts work, K choices, E experts, R rows that arrive here, F features of
an expert, S features of the shared expert, b and i bytes of a number in the compute dtype and in the internal dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass

from moe_train.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class MoEActivations:
    """What one forward of a layer keeps.

    Attributes:
        tokens: its input, and the copy of it that the router reads.
        router: weights and choices of the tokens.
        losses: the balance losses.
        experts: rows and what is computed of them.
        shared: the shared expert; without its input, unless that is gathered over tp.
        latent: what is projected up again.
    """

    tokens: int
    router: int
    losses: int
    experts: int
    shared: int
    latent: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.tokens + self.router + self.losses + self.experts + self.shared + self.latent


def moe_layer_bytes(
    config: DecoderConfig,
    *,
    tokens: int,
    rows: int,
    local_experts: int,
    compute_bytes: int,
    internal_bytes: int,
    balance_groups: int = 1,
    segments: int = 1,
    tp: int = 1,
    etp: int = 1,
    sequence_parallel: bool = False,
    units: Collection[str] = (),
) -> MoEActivations:
    """The formula; how many ranks share experts, rows or layers does not occur in it.

    Args:
        tokens, rows: T and R, of this rank; of tokens that are whole on every rank of tp it works on a part.
        compute_bytes, internal_bytes: b and i.
        balance_groups, segments: groups of tokens with an auxiliary loss of their own, and of those with a loss of
            each sequence; they matter where the configuration has these losses.
        tp, etp, sequence_parallel: as `parallel` has them.
        units: of the layer that are recomputed (`memory.recompute`).
    """
    b, i = compute_bytes, internal_bytes
    t, d, k, e = tokens, config.model_features, config.router.top_k, config.num_experts
    if "moe" in units or "full" in units:
        whole = t if sequence_parallel else tp * t
        return MoEActivations(tokens=whole * d * b, router=0, losses=0, experts=0, shared=0, latent=0)
    has_latent = config.moe_latent_features is not None
    # The shared expert reads the tokens of all ranks of tp; of this one its gate, and what recomputes it.
    is_gathered = tp > 1 and not config.shared_gate and "shared_experts" not in units
    shared_reads = config.shared_features is not None and not is_gathered
    reads_copy = b != i or config.router.jitter > 0
    width, f = config.moe_latent_features or d, config.expert_features // etp
    kept_activation = 0 if "moe_act" in units else f
    return MoEActivations(
        tokens=t * d * ((i if reads_copy else 0) + (b if shared_reads or has_latent or not reads_copy else 0)),
        router=_router(config, t, k, e, i),
        losses=_losses(config, t, tp * t, e, i, balance_groups, segments),
        experts=rows * ((width + 2 * f + kept_activation) * b + i) + 4 * local_experts,
        shared=_shared(config, t, tp, d, b, recomputed="shared_experts" in units),
        latent=t * width * b if has_latent else 0,
    )


def _router(config: DecoderConfig, t: int, k: int, e: int, i: int) -> int:
    router = config.router
    # Which tokens are valid, choices, which of these are none, and the logits or scores that choices are taken of.
    found = t * (1 + 8 * k + k + e * i)
    if router.normalize or (router.score == "softmax" and router.softmax_order == "after_topk"):
        found += t * k * i * (3 if router.score == "sigmoid" else 1)
    elif router.score == "sigmoid":
        found += t * k * i
    else:
        # Of all scores; the logits of the chosen are taken in any case, and keep all logits.
        found += t * e * i
    return found + (t * k if config.capacity.factor is not None else 0)


def _losses(config: DecoderConfig, t: int, whole: int, e: int, i: int, groups: int, segments: int) -> int:
    balance = config.balance
    has_scores = balance.aux > 0 or balance.seq > 0 or balance.glob > 0
    is_sigmoid = config.router.score == "sigmoid"
    # Logits once for both, the logarithm of the sum of each token, and its weight. What is known of tokens beforehand
    # is that of all ranks of tp, of which a rank reads a part.
    found = t * e * i * (balance.z > 0 or (has_scores and is_sigmoid)) + (t + whole) * i * (balance.z > 0)
    found += t * e * i * has_scores * (2 if is_sigmoid else 1)
    found += whole * (balance.aux > 0 or balance.seq > 0)
    found += (8 * whole + groups * (e + 1) * i) * (balance.aux > 0)
    found += (8 * whole + segments * (e + 1) * i) * (balance.seq > 0)
    return found + (e * i + t) * (balance.glob > 0)


def _shared(config: DecoderConfig, t: int, tp: int, d: int, b: int, *, recomputed: bool) -> int:
    if config.shared_features is None or recomputed:
        return 0
    gathered = tp * t * d * b if tp > 1 else 0
    return gathered + t * b * (3 * config.shared_features + ((d + 1) if config.shared_gate else 0))
