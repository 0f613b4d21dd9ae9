"""Output discarding: a tensor's memory is freed once it has been consumed, and filled again before a backward reads it.

It suits a tensor that is cheap to make from what is kept anyway, and that its consumer keeps: the output of a norm or
of an activation. What is freed is the storage, so that it makes no difference which views of it autograd saved; a
consumer that saved a copy still has that, and nothing is gained.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_memory.errors import MoeMemoryError
from moe_memory.storage import resize


def discard_outputs(
    outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], kept: Sequence[Tensor]
) -> None:
    """Free the storages of the outputs until the gradient of `before` is there, then fill them by `again(*kept)`.

    Nobody may read the outputs in the meantime. Where nothing is differentiated nothing happens. `kept` is saved as
    autograd saves tensors, and so is seen by hooks on these. Torch's random state is neither kept nor repeated.

    Raises:
        MoeMemoryError: an output shares the storage of what is kept or of `before`, which would be lost with it; in
            the backward, `again` returned something else than the outputs.
    """
    if not (torch.is_grad_enabled() and before.requires_grad):
        return
    storages = [output.untyped_storage() for output in outputs]
    if any(tensor.untyped_storage() is storage for storage in storages for tensor in (*kept, before)):
        raise MoeMemoryError(
            "an output that shares memory with what is kept, or with what was made of it, cannot be freed"
        )
    sizes = [storage.nbytes() for storage in storages]
    # Empty once the outputs are filled, so that they live no longer than their consumer needs them.
    waiting: list[Any] = [(storages, sizes, _saved(kept))]
    del storages, outputs, kept

    def fill(_: Tensor) -> None:
        if not waiting:
            return
        storages, sizes, saved = waiting.pop()
        with torch.no_grad():
            made = again(*saved.saved_tensors)
        made = (made,) if isinstance(made, Tensor) else made
        found = [tensor.untyped_storage().nbytes() for tensor in made]
        if found != sizes:
            raise MoeMemoryError(f"recomputed outputs have {found} bytes, and in the forward they had {sizes}")
        for storage, size, tensor in zip(storages, sizes, made, strict=True):
            resize(storage, size)
            storage.copy_(tensor.untyped_storage())

    before.register_hook(fill)  # type: ignore[no-untyped-call]
    for storage in waiting[0][0]:
        resize(storage, 0)


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
