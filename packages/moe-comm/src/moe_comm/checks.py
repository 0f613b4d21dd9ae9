"""What every dispatcher refuses, in the same words.

Faults are of two kinds. What is wrong on every rank alike (types, shapes, limits) is raised on the spot, before any
communication. An expert id out of range may exist on one rank only: `wrong_ids` reports it, and a dispatcher that
communicates carries the report along with its metadata exchange, so that every rank raises and none is left waiting.
"""

import torch
from torch import Tensor

from moe_comm.dispatcher import Capabilities, Parcel, Plan, Sizing
from moe_comm.errors import MoeCommError
from moe_kernels import Routing, internal_dtype


def check_routing(routing: Routing, sizing: Sizing, *, num_experts: int, capabilities: Capabilities) -> None:
    """Refuse a routing or sizing whose form does not fit; the ids themselves are not read.

    Args:
        routing: what `plan` was given.
        sizing: what `plan` was given.
        num_experts: experts over all ranks that the dispatcher was built for.
        capabilities: the dispatcher's.

    Raises:
        MoeCommError: the message names the value, the limit and what helps. The host is not synchronised.
    """
    ids_TK, probs_TK = routing.ids_TK, routing.probs_TK
    if routing.num_experts != num_experts:
        raise MoeCommError(
            f"the routing is over {routing.num_experts} experts, the dispatcher was built for {num_experts}"
        )
    if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
        raise MoeCommError(
            f"expert ids are int64 of shape [tokens, choices], not {ids_TK.dtype} of shape {tuple(ids_TK.shape)}"
        )
    if probs_TK.shape != ids_TK.shape or probs_TK.device != ids_TK.device:
        raise MoeCommError(
            f"probabilities have the shape and device of the ids, {tuple(ids_TK.shape)} on {ids_TK.device}, "
            f"not {tuple(probs_TK.shape)} on {probs_TK.device}"
        )
    _check_probs_dtype(probs_TK)
    num_choices, limit = ids_TK.shape[1], capabilities.largest_top_k
    if limit is not None and num_choices > limit:
        raise MoeCommError(f"{num_choices} choices per token, this dispatcher carries at most {limit}")
    if sizing.row_multiple < 1:
        raise MoeCommError(f"rows are padded to a multiple of at least 1, not {sizing.row_multiple}")
    if sizing.capacity_rows is not None and not capabilities.static_shapes:
        raise MoeCommError(
            f"this dispatcher sizes its result exactly and cannot keep to {sizing.capacity_rows} rows; "
            "leave capacity_rows out, or choose a dispatcher with static shapes"
        )
    if sizing.capacity_rows is not None and sizing.capacity_rows < 0:
        raise MoeCommError(f"capacity_rows = {sizing.capacity_rows} is no number of rows; it must be at least 0")
    if sizing.most_tokens is not None and sizing.capacity_rows is None:
        raise MoeCommError("most_tokens is for fixed sizes; give capacity_rows with it")
    if sizing.most_tokens is not None and sizing.most_tokens < 0:
        raise MoeCommError(f"most_tokens = {sizing.most_tokens} is no number of tokens; it must be at least 0")


def check_most_tokens(routing: Routing, sizing: Sizing) -> None:
    """Refuse more tokens than the sizing says any rank has."""
    num_tokens = routing.ids_TK.shape[0]
    if sizing.most_tokens is not None and num_tokens > sizing.most_tokens:
        raise MoeCommError(f"sizing.most_tokens is {sizing.most_tokens}, but this rank brings {num_tokens} tokens")


def refuse_overflow(choices: int, sizing: Sizing) -> None:
    """Raise if choices found no row and the sizing says that this is an error; for where the host reads anyway.

    Args:
        choices: `Plan.overflow`, or the sum of several, over ranks too.
        sizing: what the plans were made with.
    """
    if choices and sizing.overflow == "raise":
        raise MoeCommError(
            f"{choices} choices found no row: capacity_rows = {sizing.capacity_rows} is too few for this routing, or "
            "expert ids are out of range; give more rows, or size the result exactly, which names such ids"
        )


def wrong_ids(routing: Routing) -> str | None:
    """What is wrong with the expert ids, or None: they are -1 (no expert) or a global expert id.

    One pass for the smallest and the largest id; synchronises the host.
    """
    found = int(id_out_of_range(routing.ids_TK, routing.num_experts))
    return None if found == -1 else words_for_id(found, routing.num_experts)


def id_out_of_range(ids_TK: Tensor, num_experts: int) -> Tensor:
    """An expert id that is out of range, or -1, which is legal, if there is none; int64 scalar on the device.

    For dispatchers that read it with their metadata, and make a message of it with `words_for_id`. The host is not
    synchronised.
    """
    if ids_TK.numel() == 0:
        return ids_TK.new_full((), -1)
    smallest, largest = torch.aminmax(ids_TK)
    return torch.where(smallest < -1, smallest, torch.where(largest >= num_experts, largest, -1))


def words_for_id(found: int, num_experts: int) -> str:
    """The message about an id out of range."""
    return f"expert id {found} is out of range; legal are -1 (no expert) and 0 to {num_experts - 1}"


def check_tokens(plan: Plan, x_TD: Tensor, probs_TK: Tensor, capabilities: Capabilities) -> None:
    """Refuse tokens that do not fit their plan; call it first in `prepare`.

    Raises:
        MoeCommError: the message names the value and the limit. The host is not synchronised.
    """
    if x_TD.dim() != 2 or x_TD.shape[0] != plan.num_tokens:
        raise MoeCommError(f"the plan is for {plan.num_tokens} tokens [tokens, features], not {tuple(x_TD.shape)}")
    if probs_TK.shape != (plan.num_tokens, plan.num_choices):
        raise MoeCommError(
            f"the plan is for probabilities of shape {(plan.num_tokens, plan.num_choices)}, not {tuple(probs_TK.shape)}"
        )
    if x_TD.dtype not in capabilities.dtypes:
        legal = ", ".join(sorted(str(dtype) for dtype in capabilities.dtypes))
        raise MoeCommError(f"this dispatcher does not carry tokens of {x_TD.dtype}; legal here: {legal}")
    if x_TD.shape[1] % capabilities.hidden_multiple:
        raise MoeCommError(
            f"{x_TD.shape[1]} features per token, this dispatcher needs a multiple of {capabilities.hidden_multiple}"
        )
    _check_probs_dtype(probs_TK)
    if not x_TD.device == probs_TK.device == plan.counts_E.device:
        raise MoeCommError(
            f"tokens ({x_TD.device}), probabilities ({probs_TK.device}) and plan ({plan.counts_E.device}) "
            "must be on one device"
        )


def probs_of(received: Parcel) -> Tensor:
    """The probabilities of a parcel that has come to its experts.

    Raises:
        MoeCommError: it has none.
    """
    if received.probs is None:
        raise MoeCommError("a parcel on the way to the experts carries probabilities, this one has none")
    return received.probs


def check_rows(plan: Plan, rows_RD: Tensor) -> None:
    """Refuse expert outputs that are not the rows of their plan; call it first in `prepare_return`."""
    if rows_RD.dim() != 2 or rows_RD.shape[0] != plan.num_rows:
        raise MoeCommError(f"the plan has {plan.num_rows} rows [rows, features], not {tuple(rows_RD.shape)}")


def _check_probs_dtype(probs_TK: Tensor) -> None:
    if not probs_TK.is_floating_point() or internal_dtype(probs_TK.dtype) != probs_TK.dtype:
        raise MoeCommError(f"probabilities are float32, or float64 in float64 runs, not {probs_TK.dtype}")
