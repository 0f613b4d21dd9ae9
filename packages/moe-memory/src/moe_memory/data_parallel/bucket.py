"""`Bucket`: flat storage of parameters that behave alike, and its two collectives.

Shape legend: R ranks, S elements of a section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_memory._torch_compat import write_count
from moe_memory.data_parallel.sections import BucketLayout, owned, shard_box
from moe_parallel import Box, Groups, ParameterKind, Pending, ShardSpec, all_gather, counts_here, reduce_scatter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common.

    Ranks that hold copies of a parameter have the same buckets of such parameters, at the same places, whatever else
    they hold: so that copies are reduced in the same order and stay equal, and a bucket is summed as a whole.

    Attributes:
        copy_axes: axes besides the replica axes of the kind over which several ranks hold the same part.
        sum_axes: those of them over which gradients are partial and must be summed.
        counted: whether this rank counts the part (`moe_parallel.counts_here`); it follows from `copy_axes`.
    """

    kind: ParameterKind
    decayed: bool
    compute_dtype: torch.dtype
    copy_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    counted: bool

    @classmethod
    def of(cls, spec: ShardSpec, groups: Groups, *, decayed: bool, compute_dtype: torch.dtype) -> "BucketKey":
        copy_axes = tuple(axis for axis in spec.copy_axes if groups.size(axis) > 1)
        return cls(
            kind=spec.kind,
            decayed=decayed,
            compute_dtype=compute_dtype,
            copy_axes=copy_axes,
            sum_axes=tuple(axis for axis in copy_axes if axis in spec.grad_sum_axes),
            counted=counts_here(spec, groups),
        )


class Bucket:
    """Gradients and compute weights of whole parameters; master weights and moments of this rank's section.

    Parameters become views of `compute`. At one rank nothing is copied: the section is the whole, and where a model
    computes in the dtype of the masters these are the weights themselves. Nor is it where a single large parameter is a
    bucket, which is reduced and gathered in place.

    Args:
        parameters: what this rank holds, by global name; replicated over the group.
        group: over which gradients are summed and the rest is sharded; None for one rank.

    Attributes:
        master: master weights [S].
        grad: gradients of whole parameters, of this rank's tokens.
        reduced: gradients [S] summed over the group, once `finish_reduction` has returned.
        compute: weights of whole parameters in the compute dtype.
    """

    def __init__(self, key: BucketKey, parameters: Mapping[str, nn.Parameter], group: "ProcessGroup | None") -> None:
        self.key = key
        self.parameters = dict(parameters)
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._group = group
        self._layout = BucketLayout({name: tuple(p.shape) for name, p in parameters.items()}, self.ranks)
        dtype = internal_dtype(key.compute_dtype)
        device = next(iter(parameters.values())).device
        self.master = torch.zeros(self._layout.section_elements, dtype=dtype, device=device)
        self.grad = torch.zeros(self._layout.whole_elements, dtype=dtype, device=device)
        self.compute = self.master
        if key.compute_dtype != dtype or group is not None:
            self.compute = torch.zeros_like(self.grad, dtype=key.compute_dtype)
        for name, parameter in parameters.items():
            box = shard_box(parameter.shape, self.ranks, self.rank)
            index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
            self.part([self.master], name).copy_(parameter.detach()[index])
            self._whole(self.compute, name).copy_(parameter.detach())
            parameter.data = self._whole(self.compute, name)
        self._reduction: Pending[Tensor] | None = None
        self._gather: Pending[Tensor] | None = None
        # `.data` gives each view a count of writes of its own: it tells whether a backward has added to it.
        self._grad_views = {name: self._whole(self.grad, name).data for name in parameters}
        self._writes_seen = dict.fromkeys(parameters, 0)
        self.clear_gradients()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parameters)

    @property
    def late(self) -> bool:
        return self._group is not None

    def masters(self) -> Sequence[tuple[Tensor, BucketKey]]:
        return [(self.master, self.key)]

    def gradients(self) -> Sequence[Tensor]:
        return [self.reduced]

    def box(self, name: str) -> Box | None:
        return owned(shard_box(self.parameters[name].shape, self.ranks, self.rank), self.rank)

    def part(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        return self._layout.part(tensors[0], name, self.rank)

    def has_gradient(self, name: str) -> bool:
        grad, main = self.parameters[name].grad, self._grad_views[name]
        return write_count(main) != self._writes_seen[name] if grad is main else grad is not None

    def collect(self, name: str) -> None:
        parameter, main = self.parameters[name], self._grad_views[name]
        if parameter.grad is not None and parameter.grad is not main:
            main.add_(parameter.grad)  # else autograd did it
        self._offer(name)

    def start_reduction(self) -> None:
        """Sum gradients over the group, each section on its rank; nothing may be added to them until the next step."""
        if self._group is None:
            return
        sections = self.grad
        if not self._layout.same:
            # Zeros where there is no part: a section is updated and normed as a whole.
            make = self.grad.new_zeros if self._layout.padded else self.grad.new_empty
            sections = make(self.ranks * self._layout.section_elements)
            for whole, section in self._layout.pairs(self.grad, sections.view(self.ranks, -1)):
                section.copy_(whole)
        self._reduction = reduce_scatter(sections, self._group)

    def finish_reduction(self) -> None:
        if self._reduction is not None:
            self.reduced = self._reduction.wait()
            self._reduction = None

    def start_refresh(self) -> None:
        """Bring the compute weights up to the master weights of all ranks."""
        if self._gather is not None:
            self._gather.wait()
        if self._group is not None:
            # A copy in any dtype: the masters may change, by a checkpoint, while it is sent.
            section_S = self.master.to(self.key.compute_dtype, copy=True)
            self._gather = all_gather(section_S, self._group, self.compute if self._layout.same else None)
        elif self.compute is not self.master:
            self.compute.copy_(self.master)

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
