"""`Fsdp`: weights sharded over the replicas too, by torch's `fully_shard` (ZeRO-3, arXiv 2304.11277).

Units are gathered when they are called and cut again afterwards; what torch calls a DTensor stays in this file, as
local shards are handed out. Imported only where the configuration chooses it: torch's part takes three seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moe_memory._torch_compat import import_compiler, in_backward
from moe_memory.config import OptimConfig, Reshard, ReshardConfig
from moe_memory.data_parallel.bucket import BucketKey
from moe_memory.data_parallel.ownership import check_in_place
from moe_memory.data_parallel.sections import owned, shard_box, shard_dim
from moe_memory.data_parallel.sharded import ShardedEngine
from moe_memory.data_parallel.store import Store
from moe_memory.data_parallel.units import UnitPlan, find_units
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.blocks import block_dim
from moe_parallel import Box, Groups, ParameterKind, ShardSpec, all_reduce, replica_axes
from moe_parallel.sharding import SHARED_AXES

import_compiler()


class Fsdp(ShardedEngine):
    """The engine for models whose weights do not fit on every rank; arguments and errors are those of `ShardedEngine`.

    A unit is an element of an `nn.ModuleList`, or any other module without such units inside that has parameters of its
    own. Experts in a unit that form sub-modules are gathered over `edp`, the rest over `cp dp`. Units outside a list
    stay gathered from their first forward in a step to the end of the step, since another module may read their
    parameters (tied embeddings); those of a list must be read in their own forward only.

    The rest is kept as `Zero1` keeps it, in buckets: what `fully_shard` cannot shard (scalars, parameters without
    elements or in another dtype than the rest, such as routers, those that several modules or stages of a pipeline
    share, or that a module or a container such as `nn.ParameterList` has besides the units), what is not replicated,
    and vectors outside a list, which are not worth a collective.

    Gradients are reduced in every microbatch, as it is known only afterwards which one is the last.

    Args:
        reshard: when units are cut again, by kind.
        prefetch_units: so many units are gathered ahead, in the order of the model.
    """

    def __init__(
        self,
        config: OptimConfig,
        groups: Groups,
        *,
        compute_dtype: torch.dtype,
        reshard: ReshardConfig | None = None,
        prefetch_units: int = 0,
        **options: Any,
    ) -> None:
        if config.master_dtype == "bfloat16" and config.gradient_dtype != "bfloat16":
            raise MoeMemoryError(
                "fully_shard gives gradients in the dtype of the weights that it shards, so that with "
                f"optim.master_dtype = 'bfloat16' {config.gradient_dtype} ones would be rounded in every microbatch; "
                "set optim.gradient_dtype = 'bfloat16' too, or memory.data_parallel = 'zero1'"
            )
        super().__init__(config, groups, compute_dtype=compute_dtype, **options)
        self._reshard = reshard or ReshardConfig()
        self._prefetch_units = prefetch_units

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
            # Another stage may read it by several modules, and all that sum its gradient must have it cut alike.
            and not set(SHARED_AXES) & set(keys[name].copy_axes)
            and self._replicas[keys[name].kind].shard is not None
            and self._can_cut(name, tuple(parameter.shape), keys[name])
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
        stores = [
            _Unit(
                unit,
                {name: parameters[name] for name in unit.names},
                self._specs,
                {name: keys[name] for name in unit.names},
                meshes[unit.kind],
                self._replicas[unit.kind].copy,
                "step" if unit.stays else getattr(self._reshard, unit.kind.value),
                self._compute_dtype,
                {parameter for parameter in unit.module.parameters() if id(parameter) in left_ids},
            )
            for unit in units
        ]
        _prefetch(stores, model, self._prefetch_units)
        return [*stores, *buckets]

    def _can_cut(self, name: str, shape: tuple[int, ...], key: BucketKey) -> bool:
        """Whether torch can cut it without cutting blocks of its state."""
        group = self._replicas[key.kind].shard
        ranks = 1 if group is None else group.size()
        return _dim(shape, ranks, _blocks(self._specs[name], key)) is not None

    def _mesh(self, kind: ParameterKind, device: torch.device) -> DeviceMesh:
        """One-dimensional, or of runs of replicas and places in a run: torch shards over the last and copies over the
        first."""
        shard, copy = self._replicas[kind].shard, self._replicas[kind].copy
        assert shard is not None, "what is not replicated is no part of a unit"
        if copy is None:
            return DeviceMesh.from_group(shard, device.type)
        whole = self._groups.group(*replica_axes(kind))
        assert whole is not None, "what has copies is replicated"
        rows = torch.tensor(dist.get_process_group_ranks(whole)).view(copy.size(), shard.size())
        return DeviceMesh.from_group([copy, shard], device.type, mesh=rows, mesh_dim_names=("copy", "shard"))


class _Unit:
    """A module under `fully_shard`, whose shards are master weights."""

    masters_may_leave = False

    def __init__(
        self,
        plan: UnitPlan,
        parameters: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        keys: Mapping[str, BucketKey],
        mesh: DeviceMesh,
        copies: "dist.ProcessGroup | None",
        reshard: Reshard,
        compute_dtype: torch.dtype,
        ignored: set[nn.Parameter],
    ) -> None:
        self.plan = plan
        self.names = plan.names
        rule = next(iter(keys.values())).rule
        ranks, self._rank = mesh.size(-1), mesh.get_local_rank(-1)
        dims = {}
        for name, parameter in parameters.items():
            dim = _dim(tuple(parameter.shape), ranks, _blocks(specs[name], keys[name]))
            assert dim is not None, "what cannot be cut is no part of a unit"
            dims[name] = dim
        self._boxes = {
            name: shard_box(parameter.shape, ranks, self._rank, dims[name]) for name, parameter in parameters.items()
        }
        for parameter in parameters.values():
            parameter.data = parameter.data.to(rule.master).contiguous()  # a part may be a view of the whole
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
            reshard_after_forward=reshard == "forward",
            shard_placement_fn=lambda parameter: Shard(dims[name_of[parameter]]),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=rule.gradient, cast_forward_inputs=False
            ),
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        self.module: FSDPModule = module
        # The gradient is that of one scalar: contributions are added. Gloo also knows no scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(reshard != "step", recurse=False)
        self._places = places
        self._shards = {name: getattr(*places[name]) for name in self.names}
        self._keys = keys
        self._masters = [_local(self._shards[name]) for name in self.names]
        if copies is not None:
            for master in self._masters:
                all_reduce(master if copies.rank() == 0 else master.zero_(), copies).wait()  # what the first has
        self._gradients: dict[str, Tensor] = {}

    def masters(self) -> Sequence[tuple[Tensor, BucketKey]]:
        return [(master, self._keys[name]) for name, master in zip(self.names, self._masters, strict=True)]

    def gradients(self) -> Sequence[Tensor]:
        return [self._gradients[name] for name in self.names]

    def box(self, name: str) -> Box | None:
        return owned(self._boxes[name], self._rank)

    def place(self, name: str) -> tuple[int, int]:
        return self.names.index(name), 0

    def part(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        return tensors[self.names.index(name)]

    def has_gradient(self, name: str) -> bool:
        return self._shards[name].grad is not None

    def collect(self, name: str) -> None:
        check_in_place(name, _local(self._shards[name]), self._masters[self.names.index(name)])
        gradient = _local(self._shards[name].grad).to(self._keys[name].rule.gradient)
        self._shards[name].grad = None
        if name in self._gradients:
            self._gradients[name].add_(gradient)
        else:
            self._gradients[name] = gradient

    def start_reduction(self) -> None:
        """Each backward did it."""

    def continue_reduction(self) -> None:
        """Each backward did it."""

    def finish_reduction(self) -> None:
        """Each backward did it."""

    def clear_gradients(self) -> None:
        self._gradients.clear()
        for shard in self._shards.values():
            shard.grad = None

    def start_refresh(self, weights: Tensor | None = None) -> None:
        for module, attribute in self._places.values():
            # Of the gathered parameter, if a backward has ended outside this unit and will not be continued.
            getattr(module, attribute).grad = None
        self.module.reshard()

    def wait_for_weights(self) -> None:
        """Calling the module gathers them."""

    def synchronize(self) -> None:
        self.module.unshard()


def _prefetch(units: Sequence[_Unit], model: nn.Module, ahead: int) -> None:
    """Let every unit gather those that come after it in a forward, and before it in a backward.

    Not by `set_modules_to_forward_prefetch`, which fails in the first forward where units have no root in common; and
    not in a forward that a backward repeats.
    """
    places = {module: place for place, module in enumerate(model.modules())}
    ordered = sorted(units, key=lambda unit: places[unit.plan.module]) if ahead else []
    modules = [unit.module for unit in ordered]
    for place, unit in enumerate(ordered):
        following = modules[place + 1 : place + 1 + ahead]
        unit.plan.module.register_forward_pre_hook(partial(_gather_ahead, following))
        before = modules[max(place - ahead, 0) : place]
        unit.module.set_modules_to_backward_prefetch(before[::-1])


def _gather_ahead(following: Sequence[FSDPModule], module: nn.Module, arguments: object) -> None:
    if not in_backward():
        for other in following:
            other.unshard(async_op=True)


def _blocks(spec: ShardSpec, key: BucketKey) -> int | None:
    return block_dim(spec) if key.rule.has_blocks else None


def _dim(shape: tuple[int, ...], ranks: int, blocks: int | None) -> int | None:
    """As `shard_dim`, but torch wants dims other than the first to divide; None where that would cut blocks."""
    dim = shard_dim(shape, ranks)
    fits = [other for other in range(dim, len(shape)) if other == 0 or shape[other] % ranks == 0]
    found = next((other for other in fits if other != blocks), None)
    return 0 if found is None and blocks != 0 else found


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local().detach()
    return local
