"""`DataParallelEngine`: who owns the gradients, the master weights and the optimizer state; the seam of the engines."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from moe_parallel.sharding import Box, ShardSpec


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of the training state, or the part of it that is here.

    Attributes:
        name: `<slot>/<global parameter name>`; slots are `master`, `exp_avg`, `exp_avg_sq` for AdamW.
        global_shape: shape of the whole tensor.
        box: the part that is here, in the coordinates of the whole: inside what this rank holds of the parameter
            (`moe_parallel.local_box`), cut further by the engine. Parts without elements are left out, except by the
            first of the replicas: it names every parameter it holds, scalars and those that are empty as a whole
            included.
        tensor: live storage with the shape of the box, until the next call of the engine; writing to it changes the
            state. It may be in host memory.
        owned: whether this rank answers for the part: who saves or counts takes the owned parts, of which every element
            of the whole is in exactly one over all ranks. Who loads fills all of them; ranks that hold the same part of
            a parameter (`moe_parallel.counts_here`) have a copy each.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    owned: bool = True


class DataParallelEngine(Protocol):
    """Gradients in, weights out.

    The gradient of a step is the gradient of ONE scalar (numerics §0): contributions of microbatches and ranks are
    added, never averaged here. One step is `grads_ready` for every parameter and microbatch, then `finish`, then
    `norm_parts` (optional), then `step` or `skip`. Another order is an error, a `MoeMemoryError` like all of them.

    Gradients arrive in `parameter.grad`, which belongs to the engine from `wrap` on: a backward adds to what is there,
    or puts a new tensor where there is none, as autograd does. Nobody else clears it.

    All methods but `norm_parts`, `gradient_tensors`, `state_tensors` and `state_values` may communicate: every rank
    calls them in the same order.
    """

    def wrap(self, model: nn.Module, specs: Mapping[str, ShardSpec]) -> nn.Module:
        """Take ownership of the parameters of the model, once; returns the module to call from now on.

        The parameters are what this rank holds of them, `moe_parallel.local_box` of the specs. Values stay, rounded to
        the compute dtype of each parameter; where replicas (`moe_parallel.replica_axes`) differ each part has the value
        of the one that keeps its state. Ranks that hold the same part over other axes must bring the same values.
        Master weights and moments exist from here on.
        """

    def grads_ready(self, names: Collection[str], *, last: bool) -> None:
        """The backward of the current microbatch has produced the gradients of these parameters (global names).

        With `last` no further microbatch of this step will add to them: their reduction may start. A parameter that got
        no gradient is an error that names it; one without effect on the loss must have a zero gradient.
        """

    def finish(self) -> None:
        """Wait until every gradient of the step is complete; an error if one was not reported with `last`."""

    def gradient_tensors(self) -> Iterator[StateTensor]:
        """The complete summed gradients of the parts that are here, between `finish` and `step` or `skip`.

        Names are those of parameters, without a slot; boxes and who owns them are those of `state_tensors`. Live views,
        to be read only.
        """

    def norm_parts(self, order: float) -> dict[str, Tensor]:
        """This rank's part of the global gradient norm by parameter kind; each unique element counts once.

        A part is a float64 scalar: the sum of `|g|**order`, or for `order = inf` the largest `|g|`. Not yet reduced
        over ranks. Every kind has a part, zero where the rank has no such parameter, so that all ranks reduce alike.
        """

    def step(self, learning_rate: float, gradient_factor: Tensor | float) -> None:
        """Scale gradients by the factor (clipping), update master weights, refresh compute weights, clear gradients.

        Weights may still be on their way when it returns. A module waits for its own, and for those of containers such
        as `nn.ParameterList` in it, when it is called.
        """

    def skip(self) -> None:
        """Clear gradients and leave weights, moments and counters unchanged."""

    def synchronize(self) -> None:
        """Every weight is current afterwards. Only who reads a parameter without calling its module needs this."""

    def state_tensors(self) -> Iterator[StateTensor]:
        """Everything of this rank that a checkpoint must hold, as live storage, in a fixed order; from `wrap` on.

        Copies of what another rank owns are among them: they are not saved, but filled when a checkpoint is loaded.
        """

    def state_values(self) -> dict[str, int | float]:
        """The rest of the state as JSON values (update counters)."""

    def load_finished(self, values: Mapping[str, int | float]) -> None:
        """`state_tensors` have been overwritten by a checkpoint: take over its values and refresh compute weights.

        Gradients of a step in progress are dropped.
        """
