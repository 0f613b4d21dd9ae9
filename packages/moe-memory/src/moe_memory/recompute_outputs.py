"""Output discarding: a tensor's memory is freed once it has been consumed, and filled again before a backward reads it.

It suits a tensor that is cheap to make from what is kept anyway, and that its consumer keeps: the output of a norm or
of an activation. What is freed is the storage, so that it makes no difference which views of it autograd saved; a
consumer that saved a copy still has that, and nothing is gained.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_memory._torch_compat import withhold
from moe_memory.errors import MoeMemoryError
from moe_memory.storage import resize


def discard_outputs(
    outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], kept: Sequence[Tensor]
) -> None:
    """Free the storages of the outputs until the gradient of `before` is there, then fill them by `again(*kept)`.

    Nobody may read the outputs in the meantime: a backward that would is refused by autograd, and where autograd does
    not look there is no memory to read. Where nothing is differentiated nothing happens. `kept` is saved as autograd
    saves tensors, and so is seen by hooks on these.

    Raises:
        MoeMemoryError: an output shares the storage of what is kept or of `before`, which would be lost with it, or has
            been freed already; in the backward, `again` returned something else than the outputs, or drew random
            numbers, which cannot have been those of the forward.
    """
    if not (torch.is_grad_enabled() and before.requires_grad):
        return
    storages = [output.untyped_storage() for output in outputs]
    if any(tensor.untyped_storage() is storage for storage in storages for tensor in (*kept, before)):
        raise MoeMemoryError(
            "an output that shares memory with what is kept, or with what was made of it, cannot be freed"
        )
    if any(output.numel() and not storage.nbytes() for output, storage in zip(outputs, storages, strict=True)):
        raise MoeMemoryError("an output has been freed already: it has one consumer, and is an output of one unit")
    # Empty once the outputs are filled, so that they live no longer than their consumer needs them.
    waiting: list[Any] = [(storages, [_Form.of(output) for output in outputs], withhold(outputs), _saved(kept))]
    del storages, outputs, kept

    def fill(_: Tensor) -> None:
        if not waiting:
            return
        storages, forms, give_back, saved = waiting.pop()
        made = _made(again, saved.saved_tensors)
        found = [_Form.of(tensor) for tensor in made]
        if found != forms:
            raise MoeMemoryError(
                f"recomputed outputs are {_listed(found)}, and in the forward they were {_listed(forms)}"
            )
        for storage, form, tensor in zip(storages, forms, made, strict=True):
            resize(storage, form.storage_bytes)
            storage.copy_(tensor.untyped_storage())
        give_back()

    before.register_hook(fill)  # type: ignore[no-untyped-call]
    for storage in waiting[0][0]:
        resize(storage, 0)


class _Form(NamedTuple):
    """How a tensor lies in its storage."""

    shape: list[int]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Form":
        offset, size_bytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
        return cls(list(tensor.shape), tensor.stride(), offset, tensor.dtype, size_bytes)

    def __str__(self) -> str:
        where = f"strides {self.strides} from {self.offset} of {self.storage_bytes} bytes"
        return f"{self.shape} in {self.dtype} with {where}"


def _listed(forms: Sequence[_Form]) -> str:
    return f"{len(forms)}: {'; '.join(map(str, forms))}"


def _made(again: Callable[..., Any], kept: Sequence[Tensor]) -> Sequence[Tensor]:
    """What `again` returns, which draws nothing: the state that the forward drew from is gone."""
    states = _random_states(kept)
    with torch.no_grad():
        made = again(*kept)
    if _random_states(kept) != states:
        raise MoeMemoryError("an output that is made again drew random numbers; recompute the unit around it instead")
    return (made,) if isinstance(made, Tensor) else made


def _random_states(tensors: Sequence[Tensor]) -> list[bytes]:
    """Of the generators that operations on these tensors draw from."""
    # Those without memory are of another type, and beside them a state is one of them and says nothing.
    devices = {tensor.device for tensor in tensors if type(tensor) in (Tensor, Parameter)}
    others = [torch.get_device_module(device).get_rng_state(device) for device in devices if device.type != "cpu"]
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *others)] if devices else []


class _Saver(torch.autograd.Function):
    """A node that does nothing but save."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is made of the output of this node")


def _saved(kept: Sequence[Tensor]) -> Any:
    start: Any = _Saver.apply(torch.empty(0, requires_grad=True), *kept)  # type: ignore[no-untyped-call]
    return start.grad_fn
