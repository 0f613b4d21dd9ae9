"""A dispatcher as a third party would write it: `acme-allgather`, in one file, on public names only.

Every rank gets all tokens of all ranks (one all-gather) and keeps the rows of its own experts; on the way back it sends
every rank the partial sums of that rank's tokens (one all-to-all). Ranks may hold different numbers of tokens: tokens
are padded to the largest number with tokens that choose no expert.

Shape legend: T tokens here, M most tokens of any rank, W ranks, K choices per token, D model, R rows here, E experts
here. Tensors over all ranks are [W * M, ..], rank after rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm import (
    EXACT,
    Capabilities,
    Dispatched,
    DispatcherPlugin,
    MoeCommError,
    Parcel,
    Plan,
    Sizing,
    check_routing,
    check_tokens,
    wrong_ids,
)
from moe_kernels import Routing, internal_dtype
from moe_kernels.permute import RowMap, permute, permute_probs, row_map, unpermute
from moe_parallel import Groups, Pending


@dataclass(frozen=True, kw_only=True)
class AcmeConfig:
    """Options of the dispatcher; there are none but its name."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["acme-allgather"] = "acme-allgather"


@dataclass(frozen=True, kw_only=True)
class AcmePlan(Plan):
    """Plan of one dispatch.

    Attributes:
        most_tokens: M.
        map: rows of the local experts among the tokens of all ranks.
    """

    most_tokens: int
    map: RowMap


class AcmeDispatcher:
    """All-gather dispatcher.

    Args:
        group: the expert-parallel ranks; None where there is one.
        rank: this rank in the group.
        world: W.
        num_experts: experts over all ranks.
    """

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}), largest_ep=8
    )

    def __init__(self, group: ProcessGroup | None, rank: int, world: int, num_experts: int) -> None:
        self.group = group
        self.rank = rank
        self.world = world
        self.num_experts = num_experts

    def plan(self, routing: Routing, sizing: Sizing = EXACT) -> AcmePlan:
        check_routing(routing, sizing, num_experts=self.num_experts, capabilities=self.capabilities)
        ids_TK = routing.ids_TK
        num_tokens, num_choices = ids_TK.shape
        problem = wrong_ids(routing)
        # Sizes and health of all ranks first, so that a fault on one rank is an error on every rank.
        sizes = self._all_gather(ids_TK.new_tensor([[num_tokens, problem is not None]])).tolist()
        if problem is not None:
            raise MoeCommError(problem)
        bad = [rank for rank, (_, is_bad) in enumerate(sizes) if is_bad]
        if bad:
            raise MoeCommError(f"expert ids of ranks {bad} are out of range")
        most_tokens = max(tokens for tokens, _ in sizes)
        all_ids = self._all_gather(F.pad(ids_TK, (0, 0, 0, most_tokens - num_tokens), value=-1))
        local_experts = self.num_experts // self.world
        local_ids = all_ids - self.rank * local_experts
        local_ids = torch.where((all_ids >= 0) & (local_ids >= 0) & (local_ids < local_experts), local_ids, -1)
        rows = row_map(local_ids, local_experts, row_multiple=sizing.row_multiple)
        return AcmePlan(
            num_tokens=num_tokens,
            num_choices=num_choices,
            num_local_experts=local_experts,
            num_rows=rows.num_rows,
            counts_E=rows.counts_E,
            offsets_E=rows.offsets_E,
            overflow=rows.counts_E.new_zeros(()),
            most_tokens=most_tokens,
            map=rows,
        )

    def prepare(self, plan: AcmePlan, x_TD: Tensor, probs_TK: Tensor) -> Parcel:
        check_tokens(plan, x_TD, probs_TK, self.capabilities)
        missing = plan.most_tokens - plan.num_tokens
        return Parcel(rows=F.pad(x_TD, (0, 0, 0, missing)), probs=F.pad(probs_TK, (0, 0, 0, missing)))

    def exchange(self, plan: AcmePlan, parcel: Parcel) -> Pending[Parcel]:
        if self.group is None:
            return Pending.completed(parcel)
        assert parcel.probs is not None, "prepare puts them in"
        return Pending.completed(Parcel(rows=_gather(parcel.rows, self.group), probs=_gather(parcel.probs, self.group)))

    def arrange(self, plan: AcmePlan, received: Parcel) -> Dispatched:
        assert received.probs is not None, "exchange passes them on"
        return Dispatched(
            rows_RD=permute(received.rows, plan.map),
            probs_R=permute_probs(received.probs, plan.map),
            counts_E=plan.counts_E,
            offsets_E=plan.offsets_E,
            plan=plan,
        )

    def prepare_return(self, plan: AcmePlan, rows_RD: Tensor) -> Parcel:
        return Parcel(rows=unpermute(rows_RD, plan.map))

    def exchange_return(self, plan: AcmePlan, parcel: Parcel) -> Pending[Parcel]:
        return Pending.completed(parcel if self.group is None else Parcel(rows=_transpose(parcel.rows, self.group)))

    def merge(self, plan: AcmePlan, received: Parcel) -> Tensor:
        # Sizes in full: view cannot infer one of them from an empty tensor.
        rows = received.rows.view(self.world, plan.most_tokens, received.rows.shape[1])[:, : plan.num_tokens]
        return rows.sum(0, dtype=internal_dtype(rows.dtype)).to(rows.dtype)

    def _all_gather(self, mine: Tensor) -> Tensor:
        return mine if self.group is None else _all_gather(mine, self.group)


def _all_gather(mine: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts)


def _all_to_all(rows: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


class _Gather(torch.autograd.Function):
    """All-gather; backward sends every rank the gradients of its rows, which adds them up in the internal dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        world = ctx.group.size()
        parts = _all_to_all(grad, ctx.group).view(world, grad.shape[0] // world, grad.shape[1])
        return parts.sum(0, dtype=internal_dtype(grad.dtype)).to(grad.dtype), None


class _Transpose(torch.autograd.Function):
    """All-to-all of equal parts; it is its own backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


_gather: Callable[..., Tensor] = _Gather.apply
_transpose: Callable[..., Tensor] = _Transpose.apply


def _build(config: AcmeConfig, groups: Groups, num_experts: int) -> AcmeDispatcher:
    return AcmeDispatcher(groups.group("ep"), groups.rank("ep"), groups.size("ep"), num_experts)


PLUGIN = DispatcherPlugin(
    name="acme-allgather", interface_version=1, config=AcmeConfig, available=lambda: None, build=_build
)
