"""`Zero1`: flat buckets of gradients, master weights and moments; the engine at one data-parallel rank.

Parameters that behave alike (same kind, decay and compute dtype) lie in one bucket, so that an update, a norm or a
reduction is one operation on one tensor. Parameters become views of the bucket: of the master weights themselves where
they compute in the master's dtype, else of a copy in the compute dtype.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_memory.config import OptimConfig
from moe_memory.data_parallel.engine import StateTensor
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.decay import is_decayed
from moe_memory.precision import compute_dtypes
from moe_parallel import Box, Groups, ParameterKind, ShardSpec

# Every parameter starts at a multiple of this many elements, so that its rows are aligned for vector loads.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _BucketKey:
    kind: ParameterKind
    decayed: bool
    compute_dtype: torch.dtype
    device: torch.device


class _Bucket:
    """Flat storage of parameters that behave alike."""

    def __init__(self, key: _BucketKey, parameters: Mapping[str, nn.Parameter]) -> None:
        self.key = key
        self.parameters = dict(parameters)
        starts, size = {}, 0
        for name, parameter in parameters.items():
            starts[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._starts = starts
        dtype = internal_dtype(key.compute_dtype)
        self.master = torch.zeros(size, dtype=dtype, device=key.device)
        self.grad = torch.zeros_like(self.master)
        self.compute = self.master
        if key.compute_dtype != dtype:
            self.compute = torch.zeros(size, dtype=key.compute_dtype, device=key.device)
        for name, parameter in parameters.items():
            self.view(self.master, name).copy_(parameter.detach())
            self.view(self.compute, name).copy_(parameter.detach())
            parameter.data = self.view(self.compute, name)
        self.clear_gradients()

    def view(self, flat: Tensor, name: str) -> Tensor:
        parameter, start = self.parameters[name], self._starts[name]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def collect(self, name: str) -> None:
        """Move the gradient of one backward into the main gradient, unless autograd added it there itself."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            raise MoeMemoryError(
                f"the parameter {name} got no gradient in this backward; one without effect must have a zero gradient"
            )
        if self.compute is not self.master:
            self.view(self.grad, name).add_(parameter.grad)
            parameter.grad = None

    def clear_gradients(self) -> None:
        self.grad.zero_()
        for name, parameter in self.parameters.items():
            # Where dtypes agree autograd accumulates in place, straight into the bucket.
            parameter.grad = self.view(self.grad, name) if self.compute is self.master else None


class Zero1:
    """The default data-parallel engine, with AdamW in at least float32 (torch's fused implementation).

    Args:
        config: of the optimizer.
        groups: `dp`, `cp` and `edp` must have one rank each in this release.
        compute_dtype: dtype of weights and activations.
        keep_internal: patterns of global names that compute in the internal dtype all the same.

    Raises:
        MoeMemoryError: more than one data-parallel rank, or a call out of order.
    """

    def __init__(
        self, config: OptimConfig, groups: Groups, *, compute_dtype: torch.dtype, keep_internal: Sequence[str] = ()
    ) -> None:
        for axis in ("dp", "cp", "edp"):
            if groups.size(axis) > 1:
                raise MoeMemoryError(
                    f"zero1 runs on one data-parallel rank in this release; {axis} has {groups.size(axis)}"
                )
        self._config = config
        self._compute_dtype = compute_dtype
        self._keep_internal = keep_internal
        self._buckets: list[_Bucket] = []
        self._specs: dict[str, ShardSpec] = {}
        self._bucket_of: dict[str, _Bucket] = {}
        self._finished = False
        self._updates = 0

    def wrap(self, model: nn.Module, specs: Mapping[str, ShardSpec]) -> nn.Module:
        """Move the parameters into buckets; their values stay. Returns the same module."""
        if self._buckets:
            raise MoeMemoryError("this engine owns a model already; build another engine for another model")
        parameters = dict(model.named_parameters())
        if parameters.keys() != specs.keys():
            different = sorted(parameters.keys() ^ specs.keys())
            raise MoeMemoryError(
                f"parameters and specs must have the same names; they differ in {', '.join(different)}"
            )
        dtypes = compute_dtypes(parameters, self._compute_dtype, self._keep_internal)
        members: dict[_BucketKey, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            spec = specs[name]
            key = _BucketKey(spec.kind, is_decayed(spec), dtypes[name], parameter.device)
            members.setdefault(key, {})[name] = parameter
        self._specs = dict(specs)
        self._buckets = [_Bucket(key, group) for key, group in members.items()]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        config = self._config
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [bucket.master], "weight_decay": config.weight_decay if bucket.key.decayed else 0.0}
                for bucket in self._buckets
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for bucket in self._buckets:
            # What the optimizer would create at its first step, created now, so that a checkpoint can be loaded into it.
            self._optimizer.state[bucket.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=bucket.key.device),
                "exp_avg": torch.zeros_like(bucket.master),
                "exp_avg_sq": torch.zeros_like(bucket.master),
            }
        return model

    def grads_ready(self, names: Collection[str], *, last: bool) -> None:
        unknown = [name for name in names if name not in self._bucket_of]
        if unknown:
            raise MoeMemoryError(f"this engine owns no parameters named {', '.join(unknown)}")
        for name in names:
            self._bucket_of[name].collect(name)
        self._finished = False

    def finish(self) -> None:
        self._finished = True

    def norm_parts(self, order: float) -> dict[str, Tensor]:
        self._require_finished()
        parts: dict[str, Tensor] = {}
        for bucket in self._buckets:
            norm = torch.linalg.vector_norm(bucket.grad, order)
            kind = bucket.key.kind.value
            if order == inf:
                parts[kind] = torch.maximum(parts[kind], norm) if kind in parts else norm
            else:
                parts[kind] = parts.get(kind, torch.zeros_like(norm)) + norm**order
        return parts

    def step(self, learning_rate: float, gradient_factor: Tensor | float) -> None:
        self._require_finished()
        for bucket, group in zip(self._buckets, self._optimizer.param_groups, strict=True):
            bucket.grad.mul_(gradient_factor)
            bucket.master.grad = bucket.grad
            group["lr"] = learning_rate
        self._optimizer.step()
        self._updates += 1
        for bucket in self._buckets:
            bucket.master.grad = None
            self._refresh(bucket)
        self._clear()

    def skip(self) -> None:
        self._require_finished()
        self._clear()

    def state_tensors(self) -> Iterator[StateTensor]:
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            for name, spec in self._specs.items():
                bucket = self._bucket_of[name]
                flat = bucket.master if slot == "master" else self._optimizer.state[bucket.master][slot]
                yield StateTensor(
                    name=f"{slot}/{name}",
                    global_shape=spec.shape,
                    box=Box.whole(spec.shape),
                    tensor=bucket.view(flat, name),
                )

    def state_values(self) -> dict[str, int | float]:
        return {"updates": self._updates}

    def load_finished(self, values: Mapping[str, int | float]) -> None:
        if set(values) != {"updates"}:
            raise MoeMemoryError(f"the saved engine state has {sorted(values)}, expected ['updates']")
        self._updates = int(values["updates"])
        for bucket in self._buckets:
            self._optimizer.state[bucket.master]["step"].fill_(self._updates)
            self._refresh(bucket)

    def _refresh(self, bucket: _Bucket) -> None:
        if bucket.compute is not bucket.master:
            bucket.compute.copy_(bucket.master)

    def _clear(self) -> None:
        for bucket in self._buckets:
            bucket.clear_gradients()
        self._finished = False

    def _require_finished(self) -> None:
        if not self._finished:
            raise MoeMemoryError(
                "the gradients of this step are not complete: call finish() after the last grads_ready()"
            )
