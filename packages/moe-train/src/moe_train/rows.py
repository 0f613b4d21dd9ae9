"""Tokens of a rank in a forward pass, and what follows from them: the sizes a dispatcher is chosen and planned by."""

from dataclasses import replace
from typing import Any

import torch

from moe_comm import EXACT, Sizing
from moe_comm.config import AutoConfig, LayerConfig, RowsConfig
from moe_parallel import Groups
from moe_train.config.tree import TrainConfig
from moe_train.data.tokens import padded_row


def most_tokens(config: TrainConfig, groups: Groups) -> int:
    """Tokens that a rank has in any microbatch of training at most, padding included."""
    cp, tp, train = groups.size("cp"), groups.size("tp"), config.train
    if config.parallel.dynamic_cp_tokens is not None:
        return config.parallel.dynamic_cp_tokens // tp
    units = -(-train.global_batch_sequences // train.balance_sequences)
    share = -(-units // groups.size("dp")) * train.balance_sequences
    sequences = min(train.microbatch_sequences, share)
    return sequences * padded_row(config.data.sequence_length, cp, tp) // (cp * tp)


def sizing_of(config: TrainConfig, groups: Groups) -> Sizing:
    """How many rows the experts of a rank get in training."""
    if not isinstance(config.comm, RowsConfig):  # a dispatcher of somebody else
        return EXACT
    tokens = most_tokens(config, groups)
    rows = config.comm.capacity_rows(tokens, config.model.router.top_k, groups.size("etp"))
    return EXACT if rows is None else Sizing(capacity_rows=rows, overflow=config.comm.overflow, most_tokens=tokens)


def dispatcher_config(config: TrainConfig, groups: Groups, dtype: torch.dtype) -> Any:
    """The section `comm`, with the sizes of the layers of this model where a dispatcher is chosen by them."""
    if not isinstance(config.comm, AutoConfig) or config.comm.layer is not None:
        return config.comm
    model = config.model
    layer = LayerConfig(
        tokens=most_tokens(config, groups),
        hidden=model.moe_latent_features or model.model_features,
        itemsize=dtype.itemsize,
        top_k=model.router.top_k,
        groups=model.router.groups,
        chosen_groups=model.router.group_top_k,
    )
    return replace(config.comm, layer=layer)
