"""From logits to the output of the experts with the counts on the device: nothing is read on the host.

Shape legend: T tokens, K choices, D model, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels import CapacityConfig, GroupedExperts, RouterConfig, drop_beyond_capacity, route, select_grouped_gemm
from moe_kernels.permute import most_rows, permute_with_probs, row_map, unpermute

T, D, K, E = 12, 8, 2, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, dict[str, int]] = {
    "dense": {"capacity_rows": most_rows(T, K, E)},
    "padded": {"row_multiple": 4, "capacity_rows": most_rows(T, K, E, row_multiple=4)},
    "per expert": {"rows_per_expert": T},
}
# What makes the host wait: a number is read, or a shape depends on values.
READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class Reads(TorchDispatchMode):
    """Collects the names of operators that read a tensor on the host.

    What an operator does inside is its own: on a CPU, where offsets are in its memory, a product reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexed = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if indexed or any(read in name for read in READS):
            self.names.append(name)
        self.inside = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside = False


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects every read; `tolist` and its like need no operator on a CPU."""
    with monkeypatch.context() as patch, Reads() as seen:
        for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "numpy"):
            original = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
                if not seen.inside:
                    seen.names.append(name)
                return original(self, *args)

            patch.setattr(Tensor, name, read)
        yield seen.names


@contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU the host must not wait for it inside operators either."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs() -> list[Tensor]:
    """Tokens, logits, and the weights of the experts."""
    shapes = ((T, D), (T, E), (E, D, 2, 6), (E, 6, D))
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def layer(leaves: list[Tensor], sizes: dict[str, int], capacity: CapacityConfig) -> tuple[Tensor, ...]:
    """Output and gradients."""
    x_TD, logits_TE, w1_ED2F, w2_EFD = leaves
    experts = GroupedExperts(E, D, 6, backend=select_grouped_gemm("torch", torch.float32, DEVICE), device="meta")
    routing = route(logits_TE, RouterConfig(top_k=K, normalize=False), valid_T=torch.arange(T, device=DEVICE) < T - 1)
    routing = drop_beyond_capacity(routing, capacity)
    layout = row_map(routing.ids_TK, E, **sizes)
    rows_RD, probs_R = permute_with_probs(x_TD, routing.probs_TK, layout)
    weights = {"w1_ED2F": w1_ED2F, "w2_EFD": w2_EFD}
    out_RD = torch.func.functional_call(experts, weights, (rows_RD, probs_R, layout.offsets_E))
    y_TD = unpermute(out_RD, layout)
    return y_TD, *torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("implementation")
def test_r082_nothing_is_read_on_the_host_and_results_are_those_of_exact_sizes(
    sizes: str, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, capacity = inputs(), CapacityConfig(factor=factor)
    with reads(monkeypatch) as seen, no_waiting():
        found = layer(leaves, SIZES[sizes], capacity)
    assert seen == []
    with reads(monkeypatch) as seen:
        expected = layer(leaves, {}, capacity)
    assert "tolist" in seen
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("implementation")
def test_it_traces_without_values(sizes: str) -> None:
    with FakeTensorMode():
        leaves = inputs()
        y_TD, *grads = layer(leaves, SIZES[sizes], CapacityConfig(factor=1.0, min_capacity=2))
        assert y_TD.shape == (T, D)
        assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            layer(leaves, {}, CapacityConfig())


@pytest.mark.parametrize("read", ["item", "tolist", "bool", "mask", "nonzero"])
def test_the_watch_sees_each_kind_of_read(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3)
    with reads(monkeypatch) as seen:
        match read:
            case "item":
                x[1].item()
            case "tolist":
                x.tolist()
            case "bool":
                bool(x[0])
            case "mask":
                x[x > 0]
            case _:
                x.nonzero()
    assert seen
