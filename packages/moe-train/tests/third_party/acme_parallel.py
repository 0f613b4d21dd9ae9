"""A model family of somebody else: attention and experts side by side, behind one norm."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from moe_kernels import RMSNorm
from moe_train.models.build import build_attention, build_moe
from moe_train.models.config import DecoderConfig
from moe_train.models.decoder import Decoder
from moe_train.models.families import DECODER
from moe_train.models.flops import decoder_costs


@dataclass(frozen=True, kw_only=True)
class AcmeConfig(DecoderConfig):
    kind: Literal["acme_parallel"] = "acme_parallel"


class ParallelBlock(nn.Module):
    def __init__(self, config, layer, parts):
        super().__init__()
        self.norm = RMSNorm(config.model_features, config.norm_eps, dtype=parts.dtype)
        self.attention = build_attention(config, layer, parts)
        self.moe = build_moe(config, layer, parts)

    def forward(self, replay, x_BSD, info, rope, scale):
        h_BSD = self.norm(x_BSD)
        y_BSD, statistics = self.moe(h_BSD, info.valid_BS, scale, replay)
        return x_BSD + self.attention(h_BSD, info, rope) + y_BSD, statistics


def build(config, vocab_size, parts):
    return Decoder(config, vocab_size, parts, block=ParallelBlock)


def costs(config, vocab_size):
    """A norm less in each layer."""
    found = decoder_costs(config, vocab_size)
    norms = (config.num_layers + config.mtp_layers) * config.model_features
    return replace(found, parameters=found.parameters - norms, active_parameters=found.active_parameters - norms)


SPEC = replace(DECODER, name="acme_parallel", config=AcmeConfig, build=build, costs=costs)
