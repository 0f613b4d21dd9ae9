"""CUDA graphs in a training: the first part of each layer is replayed, dispatch, experts and combine run as they are.

The first step is recorded, and what it did in a layer is captured behind it. A step of other shapes than the recorded
one runs without graphs, and so does everything outside steps. Graphs of one rank contain no communication.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from moe_kernels.config import GraphScope
from moe_kernels.graphs import GraphPool
from moe_kernels.graphs.programs import Backend
from moe_memory.measure import within
from moe_memory.recompute import Replay
from moe_parallel import SequenceInfo
from moe_train.data.microbatches import Microbatch
from moe_train.errors import MoeTrainError
from moe_train.models.block import Block, DenseBlock
from moe_train.models.moe import Routed
from moe_train.models.router import Router
from moe_train.scale import LoadWindow, MicrobatchScale, RoutingScale


class StepGraphs:
    """Graphs of the layers of a model.

    Args:
        model: its layers are called as they are but inside `step`.
        scopes: parts of a layer that are captured.
        backend, poison: of the pool.

    Raises:
        MoeTrainError: the model has no layer with such a part.
    """

    def __init__(
        self, model: nn.Module, scopes: Sequence[GraphScope], *, backend: Backend = "auto", poison: bool = False
    ) -> None:
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (Block, DenseBlock))}
        names = [name for name, layer in layers.items() if _graphed_parts(layer, scopes)]
        # A stage of a pipeline may have none.
        if not names and any(isinstance(module, Router) for module in model.modules()):
            raise MoeTrainError(
                f"kernels.graphs: no layer of this {type(model).__name__} is a Block or DenseBlock of "
                f"moe_train.models.block with a part of {', '.join(scopes)}; use kernels.graphs = 'none'"
            )
        # A layer is differentiated on its own: when the backward below it begins, all of its gradients were read.
        below = dict(zip(names[1:], names, strict=False))
        self.pool = GraphPool(backend=backend, read_before=below, poison=poison)
        self._layers = [_GraphedLayer(self.pool, name, layers[name], scopes) for name in names]
        self._form: object = None
        self._is_captured = False

    @contextmanager
    def step(self, microbatches: Sequence[Microbatch], window: LoadWindow | None) -> Iterator[bool]:
        """Forwards and backwards of a step; gives whether graphs take part. They are captured when the first is over.

        Weights must be current when layers are called.
        """
        form = ([(part.axis, part.batch.token_BS.shape) for part in microbatches], window is None)
        self._form = self._form or form
        if form != self._form:
            yield False
            return
        for layer in self._layers:
            layer.install()
        try:
            yield True
        finally:
            for layer in self._layers:
                layer.remove()
        if not self._is_captured and self._layers:
            with within("static buffers of graphs"):
                self.pool.capture()
            self._is_captured = True


def readable(scale: MicrobatchScale) -> MicrobatchScale:
    """The weights of a microbatch in a form that graphs read anew."""
    return replace(scale, routing=scale.routing.with_tensors())


class _GraphedLayer:
    """A layer and the graphs that are called in the place of its opening."""

    def __init__(self, pool: GraphPool, name: str, layer: Block | DenseBlock, scopes: Sequence[GraphScope]) -> None:
        self._layer = layer
        parts = _graphed_parts(layer, scopes)
        norm = layer.moe_norm if isinstance(layer, Block) else layer.mlp_norm
        attention = (layer.attention_norm, layer.attention, norm)
        self._both = self._attention = self._router = None
        if parts == ("attn", "moe_router"):
            assert isinstance(layer, Block)
            self._both = pool.graphed(name, self._attend_and_route, *attention, layer.moe.router)
        elif parts == ("attn",):
            self._attention = pool.graphed(name, layer.attend, *attention)
        else:
            assert isinstance(layer, Block)
            self._router = pool.graphed(name, self._route, layer.moe.router)

    def install(self) -> None:
        # A method of the instance, which hides that of its class.
        setattr(self._layer, "opening", self._open)  # noqa: B010

    def remove(self) -> None:
        delattr(self._layer, "opening")

    def _open(
        self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor], scale: RoutingScale
    ) -> tuple[Tensor, Tensor, Routed | None]:
        # Without what it says about other ranks.
        info = SequenceInfo(
            position_BS=info.position_BS,
            token_index_BS=info.token_index_BS,
            valid_BS=info.valid_BS,
            document_BS=info.document_BS,
        )
        if isinstance(self._layer, Block) and not self._layer.moe.router.balance.seq > 0:
            # There are as many segments as documents, and nothing reads them.
            scale = replace(scale, segment_T=scale.segment_T[:0], segment_weight_G=scale.segment_weight_G[:0])
        if self._both is not None:
            x_TD, normed_TD, routed = self._both(x_TD, info, rope, scale)
            return x_TD, normed_TD, _lasting(routed)
        if self._attention is not None:
            return (*self._attention(x_TD, info, rope), None)
        assert self._router is not None
        x_TD, normed_TD = self._layer.attend(x_TD, info, rope)
        return x_TD, normed_TD, _lasting(self._router(normed_TD, info.valid_BS, scale))

    def _attend_and_route(
        self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor], scale: RoutingScale
    ) -> tuple[Tensor, Tensor, Routed]:
        x_TD, normed_TD = self._layer.attend(x_TD, info, rope)
        return x_TD, normed_TD, self._route(normed_TD, info.valid_BS, scale)

    def _route(self, normed_TD: Tensor, valid_BS: Tensor, scale: RoutingScale) -> Routed:
        assert isinstance(self._layer, Block)
        return self._layer.moe.route(normed_TD, valid_BS.flatten(), scale, Replay())


def _graphed_parts(layer: nn.Module, scopes: Sequence[GraphScope]) -> tuple[GraphScope, ...]:
    """Of the scopes, those of which the layer has a part, in their order in it."""
    legal: tuple[GraphScope, ...] = ("attn", "moe_router") if isinstance(layer, Block) else ("attn",)
    return tuple(scope for scope in legal if scope in scopes)


def _lasting(routed: Routed) -> Routed:
    """With copies of what is reported, as a later microbatch writes over what graphs return."""
    routing = routed.routing
    counted = None if routing.counted is None else (routing.counted[0], routing.counted[1].clone())
    return replace(
        routed,
        routing=replace(routing, bad_rows=routing.bad_rows.clone(), counted=counted),
        losses={name: value.clone() for name, value in routed.losses.items()},
    )
