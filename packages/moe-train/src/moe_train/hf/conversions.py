"""How one of our tensors is made of tensors of a file, and the other way round.

Shape legend: D model, F inner features of a feed-forward network, E experts, H heads, R rotated features of a head, N
its other features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_train.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Both directions; neither changes a bit.

    Attributes:
        to_ours: parts, in the order of their names, to our tensor.
        to_theirs: our tensor to its parts.
    """

    to_ours: Callable[[Sequence[Tensor], DecoderConfig], Tensor]
    to_theirs: Callable[[Tensor, DecoderConfig], Sequence[Tensor]]


# The same tensor.
SAME = Conversion(to_ours=lambda parts, _: parts[0], to_theirs=lambda x, _: [x])

# Gate and up projection, each [F, D]; ours is [2, F, D].
GATE_UP = Conversion(to_ours=lambda parts, _: torch.stack(tuple(parts)), to_theirs=lambda x, _: x.unbind())

# Experts that are one tensor [E, out, in]; ours is [E, in, out].
STACKED = Conversion(to_ours=lambda parts, _: parts[0].transpose(1, 2), to_theirs=lambda x, _: [x.transpose(1, 2)])

# As one tensor [E, 2F, D], gate above up; ours is [E, D, 2, F].
STACKED_GATE_UP = Conversion(
    to_ours=lambda parts, _: torch.stack(parts[0].transpose(1, 2).chunk(2, 2), 2),
    to_theirs=lambda x, _: [x.flatten(2).transpose(1, 2)],
)

# Experts one by one, [out, in].
PER_EXPERT = Conversion(
    to_ours=lambda parts, _: torch.stack([part.t() for part in parts]),
    to_theirs=lambda x, _: [expert.t() for expert in x],
)

# Experts one by one, each a gate and an up projection [F, D]; ours is [E, D, 2, F].
PER_EXPERT_GATE_UP = Conversion(
    to_ours=lambda parts, _: torch.stack(
        [torch.stack((gate.t(), up.t()), 1) for gate, up in zip(parts[::2], parts[1::2], strict=True)]
    ),
    to_theirs=lambda x, _: [half.t() for expert in x for half in expert.unbind(1)],
)


def _halves(x_RD: Tensor) -> Tensor:
    """Rotated features from neighbouring pairs to pairs that are half of them apart."""
    return torch.cat((x_RD[..., 0::2, :], x_RD[..., 1::2, :]), -2)


def _neighbours(x_RD: Tensor) -> Tensor:
    return torch.stack(x_RD.chunk(2, -2), -2).flatten(-3, -2)


def _query_to_ours(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    x_HFD = parts[0].view(config.num_heads, -1, parts[0].shape[1])
    plain_HND, rotary_HRD = torch.split(x_HFD, [config.head_features, config.rotary_features], 1)
    return torch.cat((_halves(rotary_HRD), plain_HND), 1).flatten(0, 1)


def _query_to_theirs(x: Tensor, config: DecoderConfig) -> list[Tensor]:
    x_HFD = x.view(config.num_heads, -1, x.shape[1])
    rotary_HRD, plain_HND = torch.split(x_HFD, [config.rotary_features, config.head_features], 1)
    return [torch.cat((plain_HND, _neighbours(rotary_HRD)), 1).flatten(0, 1)]


def _kv_down_to_ours(parts: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    latent, rotary_RD = torch.split(parts[0], [config.latent.kv_features, config.rotary_features])
    return torch.cat((latent, _halves(rotary_RD)))


def _kv_down_to_theirs(x: Tensor, config: DecoderConfig) -> list[Tensor]:
    latent, rotary_RD = torch.split(x, [config.latent.kv_features, config.rotary_features])
    return [torch.cat((latent, _neighbours(rotary_RD)))]


# Query heads of DeepSeek: rotated features last, in neighbouring pairs; ours come first, in halves.
LATENT_QUERY = Conversion(to_ours=_query_to_ours, to_theirs=_query_to_theirs)

# The projection to the latent vector, behind which the rotated features of all keys are.
LATENT_KV_DOWN = Conversion(to_ours=_kv_down_to_ours, to_theirs=_kv_down_to_theirs)
