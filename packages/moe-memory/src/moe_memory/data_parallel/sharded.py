"""`ShardedEngine`: the seam over stores, each of which keeps some of the parameters; what engines have in common."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor, nn

from moe_memory.config import OptimConfig
from moe_memory.copies import CopyEngine
from moe_memory.data_parallel.bucket import Bucket, BucketKey
from moe_memory.data_parallel.engine import StateTensor
from moe_memory.data_parallel.norm import power_sum
from moe_memory.data_parallel.ownership import StepOrder, check_parameters, updates_from
from moe_memory.data_parallel.partial import sum_partial
from moe_memory.data_parallel.replicas import Replicas, replicas_of
from moe_memory.data_parallel.sections import cut, inside
from moe_memory.data_parallel.store import Store
from moe_memory.data_parallel.units import is_called
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.buffer import Buffer, Part
from moe_memory.optim.decay import is_decayed
from moe_memory.optim.optimizer import SLOT_NAMES, Optimizer
from moe_memory.optim.rules import check_precision, update_rule
from moe_memory.precision import compute_dtypes
from moe_parallel import Groups, ParameterKind, ShardSpec, local_box


class ShardedEngine(ABC):
    """An optimizer that computes in at least float32, with master weights and moments sharded over the replicas.

    Dense parameters are replicated over `cp dp`, experts over `edp`: there gradients are summed and the state is
    sharded. Ranks of `tp`, or of `etp` and `ep`, that hold the same part of a parameter have a copy of its state each.
    They get the same gradient, summed over them if it is partial (`ShardSpec.grad_sum_axes`), so that copies stay equal
    without being sent.

    Every parameter must get a gradient in every backward before it is reported as ready: an expert without tokens has a
    zero gradient, not an absent one, so an absent one is a mistake and raises.

    Args:
        config: of the optimizer.
        groups: of this rank.
        compute_dtype: dtype of weights and activations.
        keep_internal: patterns of global names that compute in the internal dtype all the same.
        decayed: which parameters have weight decay.
        bucket_bytes: a bucket that is communicated, or whose state is offloaded, has gradients of at most this size, or
            one parameter of a quarter of it or more; so has a sum of partial gradients. Smaller ones start earlier and
            spare copies, larger ones are fewer collectives.
        shard_replicas: state is sharded over runs of so many replicas (`replicas_of`); None shards over all.
        seed: of the run, for stochastic rounding.
        copies: of state that is offloaded (`optim.offload`), by default the engine of the device.

    Raises:
        MoeMemoryError: dtypes of state without effect, a frozen parameter or one that does not fit its spec, a call out
            of order.
    """

    def __init__(
        self,
        config: OptimConfig,
        groups: Groups,
        *,
        compute_dtype: torch.dtype,
        keep_internal: Sequence[str] = (),
        decayed: Callable[[ShardSpec], bool] = is_decayed,
        bucket_bytes: int = 64 * 2**20,
        shard_replicas: int | None = None,
        seed: int = 0,
        copies: CopyEngine | None = None,
    ) -> None:
        check_precision(config, compute_dtype)
        self._config = config
        self._groups = groups
        self._compute_dtype = compute_dtype
        self._keep_internal = keep_internal
        self._decayed = decayed
        self._bucket_bytes = bucket_bytes
        self._seed = seed
        self._copies = copies
        self._shard_replicas = shard_replicas
        self._stores: Sequence[Store] = ()
        self._reducing: Store | None = None

    @abstractmethod
    def _build_stores(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], keys: Mapping[str, BucketKey]
    ) -> Sequence[Store]:
        """Take the parameters over, in the order in which a forward first needs them."""

    def wrap(self, model: nn.Module, specs: Mapping[str, ShardSpec]) -> nn.Module:
        """As the seam says; returns the same module."""
        if self._stores:
            raise MoeMemoryError("this engine owns a model already; build another engine for another model")
        parameters = dict(model.named_parameters())
        check_parameters(parameters, specs, self._groups)
        self._replicas = replicas_of(self._groups, self._shard_replicas)
        dtypes = compute_dtypes(parameters, self._compute_dtype, self._keep_internal)
        # In the order of the model, whatever that of the specs.
        self._specs = {name: specs[name] for name in parameters}
        self._keys = {
            name: BucketKey.of(
                spec,
                self._groups,
                rule=update_rule(self._config, spec, dtypes[name], self._decayed),
                compute_dtype=dtypes[name],
                is_first_copy=self._replicas[spec.kind].is_first_copy,
            )
            for name, spec in self._specs.items()
        }
        readers = _readers(model, parameters)
        self._stores = tuple(self._build_stores(model, parameters, self._keys))
        self._store_of = {name: store for store in self._stores for name in store.names}
        for module, names in readers.items():
            module.register_forward_pre_hook(
                partial(_wait_for_weights, _unique(self._store_of[name] for name in names))
            )
        self._build_optimizer()
        self._order = StepOrder(parameters)
        self._refresh()
        return model

    def grads_ready(self, names: Collection[str], *, last: bool) -> None:
        self._require_model()
        self._order.report(names, last=last, has_gradient=lambda name: self._store_of[name].has_gradient(name))
        for name in names:
            self._store_of[name].collect(name)
        if last:
            for store in _unique(self._store_of[name] for name in names):
                if not self._order.is_open(store.names):
                    store.start_reduction()
                    # By the order of the calls and not by what has arrived, so that it is the same on all ranks.
                    if self._reducing is not None:
                        self._reducing.continue_reduction()
                    self._reducing = store

    def finish(self) -> None:
        self._require_model()
        self._order.finish()
        for store in self._stores:
            store.continue_reduction()
        for store in self._stores:
            store.finish_reduction()
        self._reducing = None
        gradients = ((gradient, key.sum_axes) for key, gradient in self._gradients())
        sum_partial(gradients, self._groups, limit_bytes=self._bucket_bytes)
        self._optimizer.prepare(self._flat_gradients())

    def gradient_tensors(self) -> Iterator[StateTensor]:
        self._require_finished()
        for name, store in self._in_model_order():
            yield from self._part(name, name, store.gradients())

    def norm_parts(self, order: float) -> dict[str, Tensor]:
        self._require_finished()
        parts = {kind.value: [power_sum(self._nothing, order)] for kind in ParameterKind}
        for key, gradient in self._gradients():
            if key.counted:
                parts[key.kind.value].append(power_sum(gradient, order))
        return {
            kind: torch.stack(found).amax() if order == inf else torch.stack(found).sum()
            for kind, found in parts.items()
        }

    def step(self, learning_rate: float, gradient_factor: Tensor | float) -> None:
        self._require_finished()
        gradients = self._flat_gradients()
        missing = Counter(map(id, self._store_at))

        def updated(index: int, weights: Tensor | None) -> None:
            """Weights of a store go out as soon as all are updated, while the next ones are."""
            store = self._store_at[index]
            missing[id(store)] -= 1
            if not missing[id(store)]:
                store.start_refresh(weights)

        self._optimizer.step(learning_rate, gradients, gradient_factor, updated)
        self._begin_step()

    def skip(self) -> None:
        self._require_finished()
        self._begin_step()

    def synchronize(self) -> None:
        self._require_model()
        for store in self._stores:
            store.synchronize()

    def state_tensors(self) -> Iterator[StateTensor]:
        self._require_model()
        parts: dict[str, list[StateTensor]] = {slot: [] for slot in SLOT_NAMES}
        for name, (index, part) in self._places.items():
            for slot, shape, box, tensor in self._optimizer.state(index, part):
                owned = self._keys[name].counted
                parts[slot].append(
                    StateTensor(name=f"{slot}/{name}", global_shape=shape, box=box, tensor=tensor, owned=owned)
                )
        for found in parts.values():
            yield from found

    def state_values(self) -> dict[str, int | float]:
        self._require_model()
        return {"updates": self._optimizer.updates}

    def load_finished(self, values: Mapping[str, int | float]) -> None:
        """As the seam says; gradients of a step that was begun are dropped."""
        self._require_model()
        self._optimizer.updates = updates_from(values)
        self._refresh()
        self._begin_step()

    def _build_buckets(self, parameters: Mapping[str, nn.Parameter], keys: Mapping[str, BucketKey]) -> list[Bucket]:
        """Buckets of parameters that behave alike, each in the order of the model."""
        sizes = {name: p.numel() * keys[name].rule.gradient.itemsize for name, p in parameters.items()}
        buckets = []
        for key in dict.fromkeys(keys[name] for name in parameters):
            replicas = self._replicas[key.kind]
            names = [name for name in parameters if keys[name] == key]
            # What neither travels to other ranks nor to the host need not be cut.
            stays = replicas == Replicas(None) and self._config.offload == "none"
            for part in [names] if stays else cut(names, sizes, self._bucket_bytes):
                buckets.append(Bucket(key, {name: parameters[name] for name in part}, self._specs, replicas))
        return buckets

    def _build_optimizer(self) -> None:
        places: dict[str, tuple[int, Part]] = {}
        buffers: list[Buffer] = []
        self._store_at: list[Store] = []
        for store in self._stores:
            first = len(buffers)
            buffers += [
                Buffer(
                    weights=master.view(-1),
                    parts=[],
                    rule=key.rule,
                    kind=key.kind,
                    has_copies=bool(key.copy_axes),
                    compute=key.compute_dtype,
                    may_leave=store.masters_may_leave,
                )
                for master, key in store.masters()
            ]
            self._store_at += [store] * (len(buffers) - first)
            for name in store.names:
                box = store.box(name)
                if box is not None:
                    index, start = store.place(name)
                    spec = self._specs[name]
                    part = Part(spec=spec, box=inside(local_box(spec, self._groups), box), start=start)
                    buffers[first + index].parts.append(part)
                    places[name] = first + index, part
        self._places = {name: places[name] for name in self._specs if name in places}
        self._nothing = buffers[0].weights[:0]
        parameters = [(spec, self._keys[name].rule) for name, spec in self._specs.items()]
        device = self._nothing.device
        self._optimizer = Optimizer(
            self._config, parameters, buffers, self._groups, device, seed=self._seed, copies=self._copies
        )

    def _gradients(self) -> Iterator[tuple[BucketKey, Tensor]]:
        """Tensors of gradients, and what the parameters in each have in common."""
        for store in self._stores:
            for (_, key), gradient in zip(store.masters(), store.gradients(), strict=True):
                yield key, gradient

    def _in_model_order(self) -> Iterator[tuple[str, Store]]:
        return ((name, self._store_of[name]) for name in self._specs)

    def _part(self, label: str, name: str, tensors: Sequence[Tensor]) -> Iterator[StateTensor]:
        store, spec = self._store_of[name], self._specs[name]
        box = store.box(name)
        if box is not None:
            yield StateTensor(
                name=label,
                global_shape=spec.shape,
                box=inside(local_box(spec, self._groups), box),
                tensor=store.part(tensors, name),
                owned=self._keys[name].counted,
            )

    def _flat_gradients(self) -> list[Tensor]:
        return [gradient.reshape(-1) for _, gradient in self._gradients()]

    def _refresh(self) -> None:
        # Only a store of one master may have it elsewhere.
        for index, store in {id(store): (index, store) for index, store in enumerate(self._store_at)}.values():
            with self._optimizer.present(index) as weights:
                store.start_refresh(weights)

    def _begin_step(self) -> None:
        self._optimizer.drop_gradients()
        for store in self._stores:
            store.clear_gradients()
        self._order.begin()

    def _require_model(self) -> None:
        if not self._stores:
            raise MoeMemoryError("this engine owns no model yet: wrap() comes first")

    def _require_finished(self) -> None:
        self._require_model()
        self._order.require_finished()


def _readers(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Module, list[str]]:
    """Modules and the global names of the parameters that their forward reads: their own, and those of containers in
    them. A shared parameter has several readers."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, reader: nn.Module) -> None:
        reader = module if is_called(module) else reader
        found.setdefault(reader, []).extend(name_of[id(own)] for own in module.parameters(recurse=False))
        for child in module.children():
            visit(child, reader)

    visit(model, model)
    return {module: names for module, names in found.items() if names}


def _unique(stores: Iterable[Store]) -> list[Store]:
    return list({id(store): store for store in stores}.values())


def _wait_for_weights(stores: Sequence[Store], module: nn.Module, arguments: object) -> None:
    for store in stores:
        store.wait_for_weights()
