"""Capacity: how many choices an expert takes at most, and which it keeps (numerics §4).

A dropped choice is one without an expert: its id is -1, it adds nothing to its token and gets no gradient. The weights
of the other choices stay as they are. Load statistics count the choices before any are dropped.

Shape legend: T tokens here, A tokens of all ranks that share a capacity, K choices per token, N choices (A K),
E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil

import torch
from torch import Tensor

from moe_kernels.config import CapacityConfig
from moe_kernels.errors import MoeKernelsError
from moe_kernels.routing import Routing


@dataclass(frozen=True, kw_only=True)
class CapacityGroup:
    """Ranks whose tokens share one capacity, such as those of a microbatch.

    Attributes:
        whole: [T, ..] of this rank to [A, ..] of all ranks, in the order by which `position` and ties go, the same
            whatever the ranks are. Collective: every rank calls it equally often.
        own: undoes it.
        num_tokens: token slots that the capacity is reckoned from, so that slots which were added to split the tokens
            among these ranks do not raise it.
    """

    whole: Callable[[Tensor], Tensor]
    own: Callable[[Tensor], Tensor]
    num_tokens: int


def expert_capacity(
    num_tokens: int, num_choices: int, num_experts: int, config: CapacityConfig, *, multiple: int = 1
) -> int:
    """C = ceil(T K / E factor), at least `min_capacity` and at most T, then rounded up to a multiple.

    Shapes alone decide: wherever there are equally many token slots, padding included, C is the same.

    Args:
        num_tokens: T, of all ranks that share the capacity.
        multiple: what the rows of an expert must be a multiple of.

    Raises:
        MoeKernelsError: the config violates a rule, or limits nothing because its factor is None.
    """
    (_require if torch.compiler.is_compiling() else _require_once)(config)
    if config.factor is None:
        raise MoeKernelsError("factor = None drops nothing, so that an expert has no capacity; set a number")
    # Exactly: in floats 1000 choices of 10 experts with a factor of 1.1 make 110.00000000000001, and so 111 places.
    rows = ceil(Fraction(num_tokens * num_choices, num_experts) * Fraction(str(config.factor)))
    return -(-min(max(rows, config.min_capacity), num_tokens) // multiple) * multiple


def drop_beyond_capacity(
    routing: Routing, config: CapacityConfig, *, multiple: int = 1, group: CapacityGroup | None = None
) -> Routing:
    """The routing without the choices that their expert has no place for; as it is where nothing is limited.

    For arguments and errors see `kept_choices`.
    """
    if config.factor is None:
        (_require if torch.compiler.is_compiling() else _require_once)(config)
        return routing
    return keep_choices(routing, kept_choices(routing, config, multiple=multiple, group=group))


def keep_choices(routing: Routing, kept_TK: Tensor) -> Routing:
    """The routing with -1, and weight zero without gradient, where `kept_TK` (bool) is False."""
    dropped_TK = ~kept_TK
    return replace(
        routing,
        ids_TK=routing.ids_TK.masked_fill(dropped_TK, -1),
        probs_TK=routing.probs_TK.masked_fill(dropped_TK, 0),
    )


def kept_choices(
    routing: Routing, config: CapacityConfig, *, multiple: int = 1, group: CapacityGroup | None = None
) -> Tensor:
    """bool [T, K], False for the choices of an expert beyond its C first: by weight or by position of the token.

    Of equal weights that of the earlier token comes first, and NaN comes last. A choice without an expert, as padding
    tokens have them, takes no place. The host is not synchronised.

    Args:
        multiple: of `expert_capacity`; what alignment adds is room for choices.
        group: ranks that share C; needed where `config.scope` is `microbatch`, without effect where it is `rank`.

    Raises:
        MoeKernelsError: the config violates a rule or limits nothing, or there is no group and the scope needs one.
    """
    ids_AK, probs_AK, num_tokens = routing.ids_TK, routing.probs_TK.detach(), routing.ids_TK.shape[0]
    shared = None
    if config.scope == "microbatch":
        if group is None:
            raise MoeKernelsError("scope = 'microbatch' needs the ranks that share a microbatch; pass their group")
        shared, num_tokens = group, group.num_tokens
        ids_AK = group.whole(ids_AK)
        probs_AK = group.whole(probs_AK) if config.policy == "probability" else probs_AK
    most = expert_capacity(num_tokens, ids_AK.shape[1], routing.num_experts, config, multiple=multiple)
    weight_N = probs_AK.reshape(-1) if config.policy == "probability" else None
    kept_AK = _first_of_each(ids_AK.reshape(-1), weight_N, routing.num_experts, most).view(ids_AK.shape)
    return kept_AK if shared is None else shared.own(kept_AK)


def _first_of_each(ids_N: Tensor, weight_N: Tensor | None, num_experts: int, most: int) -> Tensor:
    """Whether a choice is among the first `most` of its expert; True for one without, which the row map judges."""
    expert_N = ids_N.where((ids_N >= 0) & (ids_N < num_experts), num_experts)
    if weight_N is None:
        sorted_N, order_N = expert_N.sort(stable=True)
    else:
        heaviest_N = weight_N.nan_to_num(nan=-torch.inf).sort(descending=True, stable=True).indices
        sorted_N, order_N = expert_N[heaviest_N].sort(stable=True)
        order_N = heaviest_N[order_N]
    begin = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=ids_N.device))
    place_N = torch.arange(ids_N.numel(), device=ids_N.device) - begin[sorted_N]
    kept_N = (place_N < most) | (sorted_N == num_experts)
    return torch.empty_like(kept_N).scatter_(0, order_N, kept_N)


def _require(config: CapacityConfig) -> None:
    if problems := config.problems():
        raise MoeKernelsError(" ".join(f"{name} = {getattr(config, name)!r}: {rule}" for name, rule in problems))


# Dynamo warns of a cache, which a trace has no use for.
_require_once = cache(_require)
