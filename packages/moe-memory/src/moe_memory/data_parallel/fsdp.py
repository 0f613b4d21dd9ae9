"""`Fsdp`: weights sharded over the replicas too, by torch's `fully_shard` (ZeRO-3, arXiv 2304.11277).

Units are gathered when they are called and cut again afterwards; what torch calls a DTensor stays in this file, as
local shards are handed out. Imported only where the configuration chooses it: torch's part takes three seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moe_kernels import internal_dtype
from moe_memory._torch_compat import import_compiler
from moe_memory.data_parallel.bucket import BucketKey
from moe_memory.data_parallel.sections import owned, shard_box, shard_dim
from moe_memory.data_parallel.sharded import ShardedEngine
from moe_memory.data_parallel.store import Store
from moe_memory.data_parallel.units import UnitPlan, find_units
from moe_parallel import Box, ParameterKind, replica_axes

import_compiler()


class Fsdp(ShardedEngine):
    """The engine for models whose weights do not fit on every rank; arguments and errors are those of `ShardedEngine`.

    A unit is an element of an `nn.ModuleList`, or any other module without such units inside that has parameters of its
    own. Experts in a unit that form sub-modules are gathered over `edp`, the rest over `cp dp`. Units outside a list
    stay gathered from their first forward in a step to the end of the step, since another module may read their
    parameters (tied embeddings); those of a list must be read in their own forward only.

    The rest is kept as `Zero1` keeps it, in buckets: what `fully_shard` cannot shard (scalars, parameters without
    elements or in another dtype than the rest, such as routers, those that several modules share, or that a module or a
    container such as `nn.ParameterList` has besides the units), what is not replicated, and vectors outside a list,
    which are not worth a collective.

    Gradients are reduced in every microbatch, as it is known only afterwards which one is the last.
    """

    def _build_stores(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], keys: Mapping[str, BucketKey]
    ) -> Sequence[Store]:
        uses = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
        shardable = {
            name: keys[name].kind
            for name, parameter in parameters.items()
            if prod(self._specs[name].shape) > 0
            and parameter.ndim > 0
            and keys[name].compute_dtype == self._compute_dtype
            and uses[id(parameter)] == 1
            and self._groups.group(*replica_axes(keys[name].kind)) is not None
        }
        # Found by what parameters are globally, so that ranks that hold copies of one all keep it alike. What is empty
        # on this rank alone, as the last parts of an uneven split may be, is left out afterwards.
        units = [
            replace(unit, names=names)
            for unit in find_units(model, shardable)
            if (names := tuple(name for name in unit.names if parameters[name].numel() > 0))
        ]
        managed = {name for unit in units for name in unit.names}
        left = {name: parameter for name, parameter in parameters.items() if name not in managed}
        buckets = self._build_buckets(left, keys) if left else []
        meshes = {
            kind: self._mesh(kind, next(iter(parameters.values())).device)
            for kind in dict.fromkeys(u.kind for u in units)
        }
        left_ids = {id(parameter) for parameter in left.values()}
        stores: list[Store] = [
            _Unit(
                unit,
                {name: parameters[name] for name in unit.names},
                {name: keys[name] for name in unit.names},
                meshes[unit.kind],
                self._compute_dtype,
                {parameter for parameter in unit.module.parameters() if id(parameter) in left_ids},
            )
            for unit in units
        ]
        return [*stores, *buckets]

    def _mesh(self, kind: ParameterKind, device: torch.device) -> DeviceMesh:
        group = self._groups.group(*replica_axes(kind))
        assert group is not None, "what is not replicated is no part of a unit"
        return DeviceMesh.from_group(group, device.type)


class _Unit:
    """A module under `fully_shard`, whose shards are master weights."""

    late = False

    def __init__(
        self,
        plan: UnitPlan,
        parameters: Mapping[str, nn.Parameter],
        keys: Mapping[str, BucketKey],
        mesh: DeviceMesh,
        compute_dtype: torch.dtype,
        ignored: set[nn.Parameter],
    ) -> None:
        self.names = plan.names
        dtype = internal_dtype(compute_dtype)
        ranks, self._rank = mesh.size(), mesh.get_local_rank()
        dims = {name: _dim(tuple(parameter.shape), ranks) for name, parameter in parameters.items()}
        self._boxes = {
            name: shard_box(parameter.shape, ranks, self._rank, dims[name]) for name, parameter in parameters.items()
        }
        for parameter in parameters.values():
            parameter.data = parameter.data.to(dtype).contiguous()  # a part may be a view of the whole
        name_of = {parameter: name for name, parameter in parameters.items()}
        places = {
            name_of[parameter]: (module, attribute)
            for module in plan.module.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if parameter in name_of
        }
        module = fully_shard(
            plan.module,
            mesh=mesh,
            reshard_after_forward=not plan.stays,
            shard_placement_fn=lambda parameter: Shard(dims[name_of[parameter]]),
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=dtype, cast_forward_inputs=False),
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        self._module: FSDPModule = module
        # The gradient is that of one scalar: contributions are added. Gloo also knows no scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(not plan.stays, recurse=False)
        self._places = places
        self._shards = {name: getattr(*places[name]) for name in self.names}
        self._keys = keys
        self._masters = [_local(self._shards[name]) for name in self.names]
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> Sequence[tuple[Tensor, BucketKey]]:
        return [(master, self._keys[name]) for name, master in zip(self.names, self._masters, strict=True)]

    def gradients(self) -> Sequence[Tensor]:
        return [self._gradients[name] for name in self.names]

    def box(self, name: str) -> Box | None:
        return owned(self._boxes[name], self._rank)

    def part(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        return tensors[self.names.index(name)]

    def has_gradient(self, name: str) -> bool:
        return self._shards[name].grad is not None

    def collect(self, name: str) -> None:
        gradient = _local(self._shards[name].grad)
        self._shards[name].grad = None
        if name in self._gradients:
            self._gradients[name].add_(gradient)
        else:
            self._gradients[name] = gradient

    def start_reduction(self) -> None:
        """Each backward did it."""

    def finish_reduction(self) -> None:
        """Each backward did it."""

    def clear_gradients(self) -> None:
        self._gradients.clear()
        for shard in self._shards.values():
            shard.grad = None

    def start_refresh(self) -> None:
        for module, attribute in self._places.values():
            # Of the gathered parameter, if a backward has ended outside this unit and will not be continued.
            getattr(module, attribute).grad = None
        self._module.reshard()

    def wait_for_weights(self) -> None:
        """Calling the module gathers them."""

    def synchronize(self) -> None:
        self._module.unshard()


def _dim(shape: tuple[int, ...], ranks: int) -> int:
    """As `shard_dim`, but torch wants dims other than the first to divide."""
    dim = shard_dim(shape, ranks)
    if dim == 0:
        return 0
    return next((other for other in range(dim, len(shape)) if shape[other] % ranks == 0), 0)


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local().detach()
    return local
