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
from moe_train.models.plan import decoder_plan


@dataclass(frozen=True, kw_only=True)
class AcmeConfig(DecoderConfig):
    kind: Literal["acme_parallel"] = "acme_parallel"


class ParallelBlock(nn.Module):
    def __init__(self, config, layer, parts):
        super().__init__()
        self.norm = RMSNorm(config.model_features, config.norm_eps, dtype=parts.dtype)
        self.attention = build_attention(config, layer, parts)
        self.moe = build_moe(config, layer, parts)

    def forward(self, replay, x_TD, info, rope, scale):
        h_TD = self.norm(x_TD)
        y_TD, statistics = self.moe(h_TD, info.valid_BS.flatten(), scale, replay, info)
        return x_TD + self.attention(h_TD, info, rope) + y_TD, statistics


def build(config, vocab_size, parts):
    return Decoder(config, vocab_size, parts, block=ParallelBlock)


def plan(config, parallel):
    """How it is spread over ranks: as the decoder, but for the names of the norms."""
    return decoder_plan(config, parallel, norms=["norm"])


def costs(config, vocab_size):
    """A norm less in each layer."""
    found = decoder_costs(config, vocab_size)
    norms = (config.num_layers + config.mtp_layers) * config.model_features
    return replace(found, parameters=found.parameters - norms, active_parameters=found.active_parameters - norms)


SPEC = replace(DECODER, name="acme_parallel", config=AcmeConfig, build=build, plan=plan, costs=costs)
