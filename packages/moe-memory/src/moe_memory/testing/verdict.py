"""How the kit reads an engine and how it judges: whole-sentence failures that survive `python -O`."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_memory.data_parallel.engine import DataParallelEngine
from moe_memory.errors import MoeMemoryError


def state_of(engine: DataParallelEngine) -> dict[str, Tensor]:
    """A copy of the state by name."""
    return {part.name: part.tensor.detach().clone() for part in engine.state_tensors()}


def masters_of(engine: DataParallelEngine) -> dict[str, Tensor]:
    prefix = "master/"
    return {name.removeprefix(prefix): t for name, t in state_of(engine).items() if name.startswith(prefix)}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what the model computes with."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def absolute_values(tensors: Iterable[Tensor]) -> Tensor:
    """All absolute values, in float64."""
    return torch.cat([tensor.detach().double().abs().flatten() for tensor in tensors])


def require(holds: bool, message: str) -> None:
    """Fail with the message unless the condition holds; `python -O` does not change that."""
    if not holds:
        raise AssertionError(message)


def same_tables(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], when: str, *, exact: bool, tolerance: float = 1e-12
) -> None:
    """Fail unless names, dtypes, shapes and values agree: in every bit, or within a share of the largest value."""
    require(set(got) == set(want), f"{when}: {sorted(got)}, expected {sorted(want)}")
    for name, expected in want.items():
        found, what = got[name], f"{when}: {name}"
        require(found.dtype == expected.dtype, f"{what} is {found.dtype}, expected {expected.dtype}")
        require(found.shape == expected.shape, f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        if exact:
            require(torch.equal(found, expected), f"{what} differs from the expected bits")
        elif expected.numel():
            error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
            require(error <= tolerance, f"{what} is off by {error:.3g} of its size")


def near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    require(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = float((got.double() - want).abs())
    require(error <= tolerance * float(want.abs()), f"{what} is {float(got):.9g}, expected {float(want):.9g}")


def refused(mentions: str, call: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Fail unless the call raises a `MoeMemoryError` that mentions this."""
    try:
        call(*args, **kwargs)
    except MoeMemoryError as error:
        require(mentions in str(error), f"the error does not mention {mentions!r}: {error}")
        return
    raise AssertionError(f"accepted, expected a MoeMemoryError that mentions {mentions!r}")
