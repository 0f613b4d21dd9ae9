"""`Zero1`: flat buckets of gradients, master weights and moments; the engine at one data-parallel rank.

Parameters that behave alike (same kind, decay and compute dtype) lie in one bucket, so that an update, a norm or a
reduction is one operation on one tensor. Parameters become views of the bucket: of the master weights themselves where
they compute in the master's dtype, else of a copy in the compute dtype.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_memory._torch_compat import write_count
from moe_memory.config import OptimConfig
from moe_memory.data_parallel.engine import StateTensor
from moe_memory.data_parallel.norm import power_sum
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.adamw import AdamW
from moe_memory.optim.decay import is_decayed
from moe_memory.precision import compute_dtypes
from moe_parallel import Box, Groups, ParameterKind, ShardSpec

# Every parameter starts at a multiple of this many elements, and a bucket ends at one. All lie in whole vectors of 64
# bytes then: what does not fill one torch's fused AdamW rounds differently, and values would depend on their place.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _BucketKey:
    kind: ParameterKind
    decayed: bool
    compute_dtype: torch.dtype


class _Bucket:
    """Flat storage of parameters that behave alike."""

    def __init__(self, key: _BucketKey, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.key = key
        self.parameters = dict(parameters)
        self._starts, size = {}, 0
        for name, parameter in parameters.items():
            self._starts[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        dtype = internal_dtype(key.compute_dtype)
        self.master = torch.zeros(size, dtype=dtype, device=device)
        self.state = {"master": self.master}
        self.grad = torch.zeros_like(self.master)
        self.compute = self.master
        if key.compute_dtype != dtype:
            self.compute = torch.zeros(size, dtype=key.compute_dtype, device=device)
        for name, parameter in parameters.items():
            self.view(self.master, name).copy_(parameter.detach())
            self.view(self.compute, name).copy_(parameter.detach())
            parameter.data = self.view(self.compute, name)
        # `.data` gives each view a count of writes of its own: it tells whether a backward has added to it.
        self._grad_views = {name: self.view(self.grad, name).data for name in parameters}
        self._writes_seen = dict.fromkeys(parameters, 0)
        self.clear_gradients()

    def view(self, flat: Tensor, name: str) -> Tensor:
        parameter, start = self.parameters[name], self._starts[name]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def has_gradient(self, name: str) -> bool:
        """Whether a backward has reached the parameter since the last `collect`."""
        grad, main = self.parameters[name].grad, self._grad_views[name]
        return write_count(main) != self._writes_seen[name] if grad is main else grad is not None

    def collect(self, name: str) -> None:
        """Move the gradient of one backward into the main gradient, unless autograd added it there itself."""
        parameter, main = self.parameters[name], self._grad_views[name]
        if parameter.grad is not None and parameter.grad is not main:
            main.add_(parameter.grad)
        self._offer(name)

    def clear_gradients(self) -> None:
        self.grad.zero_()
        for name in self.parameters:
            self._offer(name)

    def refresh(self) -> None:
        """Bring the compute weights up to the master weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def _offer(self, name: str) -> None:
        """Make ready for the next backward: where dtypes agree autograd accumulates straight into the bucket."""
        main = self._grad_views[name]
        self.parameters[name].grad = main if self.compute is self.master else None
        self._writes_seen[name] = write_count(main)


class Zero1:
    """The default data-parallel engine, with AdamW in at least float32.

    Every parameter must get a gradient in every backward before it is reported as ready: an expert without tokens has a
    zero gradient, not an absent one, so an absent one is a mistake and raises.

    Args:
        config: of the optimizer.
        groups: `dp`, `cp` and `edp` must have one rank each in this release.
        compute_dtype: dtype of weights and activations.
        keep_internal: patterns of global names that compute in the internal dtype all the same.
        decayed: which parameters have weight decay.

    Raises:
        MoeMemoryError: more than one data-parallel rank, a sharded or frozen parameter, a call out of order.
    """

    def __init__(
        self,
        config: OptimConfig,
        groups: Groups,
        *,
        compute_dtype: torch.dtype,
        keep_internal: Sequence[str] = (),
        decayed: Callable[[ShardSpec], bool] = is_decayed,
    ) -> None:
        for axis in ("dp", "cp", "edp"):
            if groups.size(axis) > 1:
                raise MoeMemoryError(
                    f"zero1 runs on one data-parallel rank in this release; {axis} has {groups.size(axis)}"
                )
        self._config = config
        self._compute_dtype = compute_dtype
        self._keep_internal = keep_internal
        self._decayed = decayed
        self._buckets: list[_Bucket] = []
        self._specs: dict[str, ShardSpec] = {}
        self._bucket_of: dict[str, _Bucket] = {}
        # Parameters of which the last gradient of this step is still to come.
        self._open: set[str] = set()
        self._finished = False

    def wrap(self, model: nn.Module, specs: Mapping[str, ShardSpec]) -> nn.Module:
        """Move the parameters into buckets; their values stay. Returns the same module."""
        if self._buckets:
            raise MoeMemoryError("this engine owns a model already; build another engine for another model")
        parameters = dict(model.named_parameters())
        device = _check_parameters(parameters, specs)
        dtypes = compute_dtypes(parameters, self._compute_dtype, self._keep_internal)
        members: dict[_BucketKey, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            spec = specs[name]
            key = _BucketKey(spec.kind, self._decayed(spec), dtypes[name])
            members.setdefault(key, {})[name] = parameter
        self._specs = dict(specs)
        self._buckets = [_Bucket(key, group, device) for key, group in members.items()]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        self._optimizer = AdamW(self._config, [(bucket.master, bucket.key.decayed) for bucket in self._buckets])
        for index, bucket in enumerate(self._buckets):
            bucket.state |= {slot: self._optimizer.slot(index, slot) for slot in AdamW.SLOTS}
        self._open = set(self._specs)
        return model

    def grads_ready(self, names: Collection[str], *, last: bool) -> None:
        unknown = [name for name in names if name not in self._bucket_of]
        if unknown:
            raise MoeMemoryError(f"this engine owns no parameters named {', '.join(unknown)}")
        closed = [name for name in names if name not in self._open]
        if closed:
            raise MoeMemoryError(
                f"gradients of {', '.join(closed)} come after their last of this step; step() or skip() begins another"
            )
        absent = [name for name in names if not self._bucket_of[name].has_gradient(name)]
        if absent:
            raise MoeMemoryError(
                f"this backward gave no gradient for {', '.join(absent)}; where there is no effect it must be zero"
            )
        for name in names:
            self._bucket_of[name].collect(name)
        if last:
            self._open.difference_update(names)

    def finish(self) -> None:
        self._require_model()
        if self._open:
            missing = [name for name in self._specs if name in self._open]
            raise MoeMemoryError(f"the last gradients of {', '.join(missing)} were not reported with grads_ready()")
        self._finished = True

    def norm_parts(self, order: float) -> dict[str, Tensor]:
        self._require_finished()
        add = torch.maximum if order == inf else torch.add
        parts = {kind.value: power_sum(self._buckets[0].grad[:0], order) for kind in ParameterKind}
        for bucket in self._buckets:
            kind = bucket.key.kind.value
            parts[kind] = add(parts[kind], power_sum(bucket.grad, order))
        return parts

    def step(self, learning_rate: float, gradient_factor: Tensor | float) -> None:
        self._require_finished()
        for bucket in self._buckets:
            bucket.grad.mul_(gradient_factor)
        self._optimizer.step(learning_rate, [bucket.grad for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.refresh()
        self._begin_step()

    def skip(self) -> None:
        self._require_finished()
        self._begin_step()

    def state_tensors(self) -> Iterator[StateTensor]:
        self._require_model()
        for slot in ("master", *AdamW.SLOTS):
            for name, spec in self._specs.items():
                bucket = self._bucket_of[name]
                yield StateTensor(
                    name=f"{slot}/{name}",
                    global_shape=spec.shape,
                    box=Box.whole(spec.shape),
                    tensor=bucket.view(bucket.state[slot], name),
                )

    def state_values(self) -> dict[str, int | float]:
        self._require_model()
        return {"updates": self._optimizer.updates}

    def load_finished(self, values: Mapping[str, int | float]) -> None:
        """As the seam says; gradients of a step that was begun are dropped."""
        self._require_model()
        updates = values.get("updates")
        if set(values) != {"updates"} or not isinstance(updates, int) or updates < 0:
            raise MoeMemoryError(f"the saved engine state is {dict(values)}, expected {{'updates': a count}}")
        self._optimizer.updates = updates
        for bucket in self._buckets:
            bucket.refresh()
        self._begin_step()

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.clear_gradients()
        self._open = set(self._specs)
        self._finished = False

    def _require_model(self) -> None:
        if not self._buckets:
            raise MoeMemoryError("this engine owns no model yet: wrap() comes first")

    def _require_finished(self) -> None:
        self._require_model()
        if not self._finished:
            raise MoeMemoryError(
                "the gradients of this step are not complete: finish() comes after the last grads_ready()"
            )


def _check_parameters(parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec]) -> torch.device:
    """The device of all parameters, if this engine can own them."""
    if parameters.keys() != specs.keys():
        different = sorted(parameters.keys() ^ specs.keys())
        raise MoeMemoryError(f"parameters and specs must have the same names; they differ in {', '.join(different)}")
    if not parameters:
        raise MoeMemoryError("the model has no parameters, so there is nothing to train")
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if shape != specs[name].shape:
            raise MoeMemoryError(
                f"the parameter {name} has shape {shape} here and {specs[name].shape} globally; zero1 runs on whole "
                f"parameters in this release"
            )
        if not parameter.requires_grad:
            raise MoeMemoryError(f"the parameter {name} requires no gradient; zero1 trains every parameter")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise MoeMemoryError(f"all parameters must be on one device; they are on {', '.join(map(str, devices))}")
    return devices.pop()
