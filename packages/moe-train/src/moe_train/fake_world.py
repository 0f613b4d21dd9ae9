"""One rank of a world of any size in this process: the trainer's own code on tensors without memory.

Weights, and with them activations, gradients and the state of the optimizer, are fake tensors: torch knows their shapes
and storages and computes no values. Process groups communicate with nobody. What the host reads is real: tokens,
documents, tiles of attention, and the experts that tokens choose, which have to be given, because a router without
values cannot choose. So a step makes, keeps and frees what it would on that rank of a real world, and
`moe_memory.SavedBytes` and `moe_memory.LiveBytes` say how much that is:

    with fake_rank(config, world=32, rank=5, vocab_size=151936) as training:
        microbatches = next_step(training.data.train, training.cut).microbatches
        with SavedBytes(training.model.parameters()) as saved:
            choices = choices_in_turn(training, microbatches)
            run_step(training, microbatches, updates=0, window=None, choices=choices)

With `training.memory.step()` around the step `training.memory.phases()` tells of what the peaks consist (see
benchmarks/deepseek_memory.py).

None of these sees what kernels and the backends of collectives take for themselves while they run, nor the holes
between tensors in a real device's memory. Losses and norms of such a step are zeros.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from moe_kernels.passes import at_most_passes
from moe_kernels.replay import RouterReplay
from moe_memory.data_parallel import DataParallelEngine
from moe_parallel import FoldedMesh
from moe_train._torch_compat import fake_tensors, fake_world
from moe_train.assemble import Data, Training, assemble, load_data
from moe_train.choices import StepChoices
from moe_train.config.checks import layout_of, mesh_of
from moe_train.config.tree import TrainConfig
from moe_train.data.microbatches import Microbatch
from moe_train.data.tokenizer import ByteTokenizer

# Pointwise mathematics of a CPU goes in passes that fit into its cache, of which a long row has thousands. A step of
# fewer takes seconds; its temporaries are a thirty-second of the tensor.
_MOST_PASSES = 32

# Groups are made without waiting for anybody, so that no time is too short.
_TIMEOUT_S = 60.0


@contextmanager
def fake_rank(
    config: TrainConfig, world: int, rank: int = 0, *, vocab_size: int | None = None, data: Data | None = None
) -> Iterator[Training]:
    """The training of one rank, as `assemble` makes it.

    The default process group must not exist, and is gone behind the context, as is the training.

    Args:
        config: validated for this world. Its device is a CPU: what a GPU would hold has the same shapes.
        rank: 0 <= rank < world.
        vocab_size: of the model; None is that of the tokenizer, whose tokens a larger one contains.
        data: as for `assemble`.
    """
    data = load_data(config) if data is None else data
    if vocab_size is not None:
        data = replace(data, tokenizer=_WiderTokenizer(vocab_size))
    layout = layout_of(config, world)
    with fake_world(rank, world), at_most_passes(_MOST_PASSES):
        mesh = FoldedMesh(layout, timeout_s=_TIMEOUT_S, **mesh_of(config, layout))
        with fake_tensors():
            training = assemble(config, mesh, data)
        # Stages of other ranks are cycles of garbage. They have no memory in a real world, and would count here.
        gc.collect()
        yield replace(training, engine=cast(DataParallelEngine, _WithoutNorm(training.engine)))


def choices_in_turn(training: Training, microbatches: Sequence[Microbatch]) -> StepChoices:
    """Choices for every router: tokens take the experts in turn, so that each expert has as many of them.

    So as many rows arrive at a rank as leave it, and it may be told that all peers send what it sends itself. This is
    exact where every rank has as many tokens, in runs that go round the experts: rows of one document, of a length that
    twice the ranks times the experts divides. A real training can be forced to the same choices.
    """
    model = training.config.model
    top_k: int = model.router.top_k
    choices = StepChoices(step=0, mode="force", table=RouterReplay())
    for microbatch in microbatches:
        here = choices.of(microbatch.batch)
        if not here.sequences:
            continue
        ids_TK = torch.arange(len(here.sequences) * here.slots * top_k).view(-1, top_k) % model.num_experts
        for name in training.router_names:
            choices.table.record(choices.step, here.sequences, name, ids_TK)
    return choices


class _WiderTokenizer(ByteTokenizer):
    """Has ids that no text contains."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


class _WithoutNorm:
    """An engine that says that gradients are zero, because the host reads their norm and fake ones have none."""

    def __init__(self, engine: DataParallelEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def norm_parts(self, order: float) -> Mapping[str, Tensor]:
        return {name: torch.zeros((), dtype=torch.float64) for name in self._engine.norm_parts(order)}
