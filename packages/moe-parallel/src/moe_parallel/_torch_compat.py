"""Names of torch that are private or differ between releases; nothing else in this package uses such names.

They are reached by module name, untyped, because torch does not export them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

THREADED_BACKEND = "moe_threads"

Observer = Callable[[ProcessGroup, str], AbstractContextManager[object]]
OperatorHandler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def threaded_world() -> Iterator[None]:
    """Give every thread its own `torch.distributed` world while the context is open."""
    threaded, c10d = _threaded(), import_module("torch._C._distributed_c10d")
    hook = sys.excepthook  # every init_process_group puts another "[rank0]:" in front of it
    c10d._set_thread_isolation_mode(True)  # else the registry of functional collectives is one for all threads
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        stop_threaded_collectives()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook


def stop_threaded_collectives() -> None:
    """End every thread that waits in a collective of a threaded world, or will enter one, with `SystemExit`."""
    group_type = _threaded().ProcessLocalGroup
    group_type._terminate.set()
    with group_type._coll_lock:
        open_collectives = list(group_type._cur_coll_on_pgs.values())
    for collective in open_collectives:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


@cache
def register_threaded_backend(observe: Observer) -> None:
    """Register `THREADED_BACKEND`: torch's threaded group with `observe(group, name)` around each collective."""
    base = _threaded().ProcessLocalGroup
    methods = {name: _observed(getattr(base, name), name, observe) for name in threaded_collectives()}
    observed_group = type("ObservedGroup", (base,), methods)

    def create(store: object, rank: int, size: int, timeout: object) -> ProcessGroup:
        group: ProcessGroup = observed_group(rank, size)
        _threaded()._store_based_barrier(rank, store, "", size, timeout)
        return group

    dist.Backend.register_backend(THREADED_BACKEND, create, devices=["cpu"])


def threaded_collectives() -> list[str]:
    """Names of the methods of torch's threaded group that communicate; they differ between releases."""
    silent = {"__init__", "__repr__", "size", "getBackendName"}
    members = vars(_threaded().ProcessLocalGroup).items()
    return [name for name, member in members if inspect.isfunction(member) and name not in silent]


def operator_mode(handle: OperatorHandler) -> AbstractContextManager[object]:
    """A context in which `handle(operator, args, kwargs)` runs in place of every operator that this thread calls."""
    base = import_module("torch.utils._python_dispatch").TorchDispatchMode

    def dispatch(
        mode: object, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return handle(func, args, kwargs or {})

    # torch otherwise imports its compiler (2 s) to keep it out of `__torch_dispatch__`.
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": classmethod(lambda mode_type: False)}
    mode: AbstractContextManager[object] = type("OperatorMode", (base,), members)()
    return mode


def in_memory_store() -> Any:
    """A key-value store that the threads of this process share."""
    return import_module("torch.distributed").HashStore()


def file_store(path: Path, world: int) -> Any:
    """A key-value store in a file that the processes of one machine share."""
    return import_module("torch.distributed").FileStore(str(path), world)


def viewed(x: Tensor) -> Tensor:
    """The tensor of which `x` is a view, however many views lie between; `x` itself where it is none."""
    base: Tensor | None = x._base
    return x if base is None else base


def _threaded() -> Any:
    return import_module("torch.testing._internal.distributed.multi_threaded_pg")


def _observed(method: Callable[..., object], name: str, observe: Observer) -> Callable[..., object]:
    @wraps(method)
    def call(group: ProcessGroup, *args: object, **kwargs: object) -> object:
        with observe(group, name):
            return method(group, *args, **kwargs)

    return call


def all_gather_into(out: Any, x: Any, group: ProcessGroup) -> Any:
    """`all_gather_into_tensor`, which 2.13 renames; asynchronous."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, x, group=group, async_op=True)


def reduce_scatter_into(out: Any, x: Any, group: ProcessGroup) -> Any:
    """`reduce_scatter_tensor`, which 2.13 renames; asynchronous."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, x, group=group, async_op=True)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective raised it because a peer was lost. Gloo has no type for that; it names its own source."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))


def abort_process_groups() -> None:
    """End all process groups without waiting for what is under way in them."""
    import_module("torch.distributed.distributed_c10d")._abort_process_group()


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A default process group of any size in this process, which communicates with nobody."""
    fake = import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fused_attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, bias_BHQK: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out_BHQD and the logarithm lse_BHQ of the sum of exponentials, by torch's own fused kernels.

    Queries that the bias hides everything from get anything for lse. FP64 has no kernel on CUDA.
    """
    aten = torch.ops.aten
    if not q_BHQD.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHQD, k_BGKD, v_BGKD, 0.0, is_causal, attn_mask=bias_BHQK, scale=scale
        )
    elif _flash_on_cuda(q_BHQD, bias_BHQK):
        out, lse = aten._scaled_dot_product_flash_attention(q_BHQD, k_BGKD, v_BGKD, 0.0, is_causal, scale=scale)[:2]
    else:
        bias = None if bias_BHQK is None else _aligned_bias(bias_BHQK, q_BHQD)
        k_BHKD, v_BHKD = (_for_every_head(x, q_BHQD) for x in (k_BGKD, v_BGKD))
        out, lse = aten._scaled_dot_product_efficient_attention(
            q_BHQD, k_BHKD, v_BHKD, bias, True, 0.0, is_causal, scale=scale
        )[:2]
        lse = lse.narrow(2, 0, q_BHQD.shape[2])  # padded to a multiple of 32
    return out, lse


def fused_attention_backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    bias_BHQK: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` may be those of more keys than are given."""
    aten = torch.ops.aten
    if not q_BHQD.is_cuda:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHQD, q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ, 0.0, is_causal, attn_mask=bias_BHQK, scale=scale
        )
        return dq, dk, dv
    seed = torch.zeros((), dtype=torch.int64, device=q_BHQD.device)  # of dropout, which there is none
    num_queries, num_keys = q_BHQD.shape[2], k_BGKD.shape[2]
    if _flash_on_cuda(q_BHQD, bias_BHQK):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad_BHQD, q_BHQD, k_BGKD, v_BGKD, out_BHQD, lse_BHQ.contiguous(), None, None, num_queries, num_keys,
            0.0, is_causal, seed, seed, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    bias = None if bias_BHQK is None else _aligned_bias(bias_BHQK, q_BHQD)
    lse = torch.nn.functional.pad(lse_BHQ, (0, -num_queries % 32))
    k_BHKD, v_BHKD = (_for_every_head(x, q_BHQD) for x in (k_BGKD, v_BGKD))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_BHQD, q_BHQD, k_BHKD, v_BHKD, bias, out_BHQD, lse, seed, seed, 0.0, [True, True, True, False],
        is_causal, scale=scale,
    )  # fmt: skip
    heads = k_BGKD.shape[1]
    return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


def _flash_on_cuda(q_BHQD: Tensor, bias_BHQK: Tensor | None) -> bool:
    return bias_BHQK is None and q_BHQD.dtype in (torch.float16, torch.bfloat16)


def _for_every_head(x_BGKD: Tensor, q_BHQD: Tensor) -> Tensor:
    return x_BGKD.repeat_interleave(q_BHQD.shape[1] // x_BGKD.shape[1], dim=1)


def _aligned_bias(bias_BHQK: Tensor, q_BHQD: Tensor) -> Tensor:
    """The bias for every row and head, in rows of memory that begin at multiples of eight elements."""
    keys = bias_BHQK.shape[-1]
    padded = torch.nn.functional.pad(bias_BHQK, (0, -keys % 8)).narrow(3, 0, keys)
    return padded.expand(*q_BHQD.shape[:2], -1, -1)
