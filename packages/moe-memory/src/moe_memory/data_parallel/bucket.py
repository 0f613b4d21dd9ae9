"""`Bucket`: flat storage of parameters that behave alike, and its two collectives.

Shape legend: R ranks, S elements of a section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_memory._torch_compat import write_count
from moe_memory.data_parallel.ownership import check_in_place
from moe_memory.data_parallel.replicas import Replicas
from moe_memory.data_parallel.sections import BucketLayout, owned
from moe_memory.measure.account import within
from moe_memory.optim.blocks import block_dim
from moe_memory.optim.rules import UpdateRule
from moe_parallel import (
    Box,
    Groups,
    ParameterKind,
    Pending,
    ShardSpec,
    all_gather,
    all_reduce,
    counts_here,
    reduce_scatter,
)


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common.

    Ranks that hold copies of a parameter have the same buckets of such parameters, at the same places, whatever else
    they hold: so that copies are reduced in the same order and stay equal, and a bucket is summed as a whole.

    Attributes:
        rule: how they are updated.
        copy_axes: axes besides the replica axes of the kind over which several ranks hold the same part.
        sum_axes: those of them over which gradients are partial and must be summed.
        counted: whether this rank counts the part: `moe_parallel.counts_here`, which follows from `copy_axes`, and
            among several runs of replicas the first (`Replicas`).
    """

    kind: ParameterKind
    rule: UpdateRule
    compute_dtype: torch.dtype
    copy_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    counted: bool

    @classmethod
    def of(
        cls,
        spec: ShardSpec,
        groups: Groups,
        *,
        rule: UpdateRule,
        compute_dtype: torch.dtype,
        is_first_copy: bool = True,
    ) -> "BucketKey":
        copy_axes = tuple(axis for axis in spec.copy_axes if groups.size(axis) > 1)
        return cls(
            kind=spec.kind,
            rule=rule,
            compute_dtype=compute_dtype,
            copy_axes=copy_axes,
            sum_axes=tuple(axis for axis in copy_axes if axis in spec.grad_sum_axes),
            counted=counts_here(spec, groups) and is_first_copy,
        )


class Bucket:
    """Gradients and compute weights of whole parameters; master weights and moments of this rank's section.

    Parameters become views of `compute`. At one rank nothing is copied: the section is the whole, and where a model
    computes in the dtype of the masters these are the weights themselves. Nor is it where a single large parameter is a
    bucket, which is reduced and gathered in place.

    Args:
        parameters: what this rank holds, by global name; replicated over the group.
        specs: of them at least.
        replicas: over which gradients are summed and the rest is sharded.

    Attributes:
        master: master weights [S].
        grad: gradients of whole parameters, of this rank's tokens.
        reduced: gradients [S] summed over the replicas, once `finish_reduction` has returned.
        compute: weights of whole parameters in the compute dtype.
    """

    def __init__(
        self,
        key: BucketKey,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        replicas: Replicas,
    ) -> None:
        group = replicas.shard
        self.key = key
        self.parameters = dict(parameters)
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._group = group
        self._copies = replicas.copy
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        dims = {name: block_dim(specs[name]) for name in parameters} if key.rule.has_blocks else {}
        blocks = {name: dim for name, dim in dims.items() if dim is not None}
        self._layout = BucketLayout(shapes, self.ranks, blocks)
        device = next(iter(parameters.values())).device
        self.master = torch.zeros(self._layout.section_elements, dtype=key.rule.master, device=device)
        with within("in buckets", "gradients"):
            self.grad = torch.zeros(self._layout.whole_elements, dtype=key.rule.gradient, device=device)
        self.compute = self.master
        if key.compute_dtype != key.rule.master or group is not None:
            self.compute = torch.zeros_like(self.grad, dtype=key.compute_dtype)
        for name, parameter in parameters.items():
            box = self._layout.box(name, self.rank)
            index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
            self.part([self.master], name).copy_(parameter.detach()[index])
            self._whole(self.compute, name).copy_(parameter.detach())
            parameter.data = self._whole(self.compute, name)
        if self._copies is not None:
            if not replicas.is_first_copy:
                self.master.zero_()
            all_reduce(self.master, self._copies).wait()  # what the first has
        self._reduction: Pending[Tensor] | None = None
        self._sum: Pending[Tensor] | None = None
        self._gather: Pending[Tensor] | None = None
        # `.data` gives each view a count of writes of its own: it tells whether a backward has added to it.
        self._grad_views = {name: self._whole(self.grad, name).data for name in parameters}
        self._writes_seen = dict.fromkeys(parameters, 0)
        self.clear_gradients()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    @property
    def masters_may_leave(self) -> bool:
        return self.compute is not self.master

    def masters(self) -> Sequence[tuple[Tensor, BucketKey]]:
        return [(self.master, self.key)]

    def gradients(self) -> Sequence[Tensor]:
        return [self.reduced]

    def box(self, name: str) -> Box | None:
        return owned(self._layout.box(name, self.rank), self.rank)

    def place(self, name: str) -> tuple[int, int]:
        return 0, self._layout.start(name)

    def part(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        return self._layout.part(tensors[0], name, self.rank)

    def has_gradient(self, name: str) -> bool:
        grad, main = self.parameters[name].grad, self._grad_views[name]
        return write_count(main) != self._writes_seen[name] if grad is main else grad is not None

    def collect(self, name: str) -> None:
        parameter, main = self.parameters[name], self._grad_views[name]
        check_in_place(name, parameter, self.compute)
        if parameter.grad is not None and parameter.grad is not main:
            main.add_(parameter.grad)  # else autograd did it
        self._offer(name)

    def start_reduction(self) -> None:
        """Sum gradients, each section on its rank; nothing may be added to them until the next step."""
        if self._group is None:
            if self._copies is not None:
                self._sum = all_reduce(self.grad, self._copies)
            return
        sections = self.grad
        if not self._layout.same:
            # Zeros where there is no part: a section is updated and normed as a whole.
            make = self.grad.new_zeros if self._layout.padded else self.grad.new_empty
            sections = make(self.ranks * self._layout.section_elements)
            for whole, section in self._layout.pairs(self.grad, sections.view(self.ranks, -1)):
                section.copy_(whole)
        self._reduction = reduce_scatter(sections, self._group)

    def continue_reduction(self) -> None:
        """Sections are summed inside a run of replicas: sum them over the runs."""
        if self._reduction is not None and self._copies is not None:
            self._sum = all_reduce(self._reduction.wait(), self._copies)
            self._reduction = None

    def finish_reduction(self) -> None:
        self.continue_reduction()
        pending = self._reduction or self._sum
        if pending is not None:
            self.reduced = pending.wait()
            self._reduction = self._sum = None

    def start_refresh(self, weights: Tensor | None = None) -> None:
        """Bring the compute weights up to the master weights of all ranks."""
        if self._gather is not None:
            self._gather.wait()
        if self._group is not None:
            # A copy in any dtype: the masters may change, by a checkpoint, while it is sent.
            section_S = self.master.to(self.key.compute_dtype, copy=True) if weights is None else weights
            self._gather = all_gather(section_S, self._group, self.compute if self._layout.same else None)
        elif self.compute is not self.master:
            self.compute.copy_(self.master if weights is None else weights)

    def wait_for_weights(self) -> None:
        if self._gather is None:
            return
        sections = self._gather.wait()
        self._gather = None
        if not self._layout.same:
            for whole, section in self._layout.pairs(self.compute, sections.view(self.ranks, -1)):
                whole.copy_(section)

    def synchronize(self) -> None:
        self.wait_for_weights()

    def clear_gradients(self) -> None:
        self.finish_reduction()
        self.reduced = self.grad if self._group is None else self.grad[:0]
        self.grad.zero_()
        for name in self.parameters:
            self._offer(name)

    def _whole(self, flat: Tensor, name: str) -> Tensor:
        return self._layout.whole(flat, name)

    def _offer(self, name: str) -> None:
        """Make ready for the next backward: where dtypes agree autograd accumulates straight into the bucket."""
        parameter, main = self.parameters[name], self._grad_views[name]
        parameter.grad = main if parameter.dtype == main.dtype else None
        self._writes_seen[name] = write_count(main)
