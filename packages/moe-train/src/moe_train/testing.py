"""Small trainings for tests of this package and of plug-ins: real components, steps of milliseconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch

from moe_comm import EXACT
from moe_comm.local import LocalDispatcher
from moe_kernels.grouped_gemm import select_grouped_gemm
from moe_memory.measure import Peak
from moe_memory.recompute import activation_policy
from moe_parallel import AxisGroups, LocalAttention
from moe_train import assemble
from moe_train.config.load import load_config
from moe_train.config.tree import TrainConfig
from moe_train.data.batch import Batch
from moe_train.data.corpus import load_documents
from moe_train.data.microbatches import Microbatch, next_step, whole_rows
from moe_train.memory.watch import MEASURED_STEPS
from moe_train.models.config import DecoderConfig
from moe_train.models.decoder import Decoder
from moe_train.models.spec import ModelParts
from moe_train.step import run_step

# Sizes are pairwise different, so that no test passes because two axes were swapped.
SMALL = (
    "model.num_layers=2",
    "model.model_features=24",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_features=8",
    "model.num_experts=5",
    "model.expert_features=11",
    "model.router.top_k=2",
    "data.sequence_length=13",
    "train.global_batch_sequences=8",
    "train.microbatch_sequences=8",
    # Where there are GPUs, too: limits are those of one backend, and most tests fork.
    "train.device=cpu",
    "train.threads=1",
    "train.valid_sequences=4",
    "optim.warmup_steps=0",
    "observe.sample_tokens=3",
)
# The standard models: what most features of the families are in, at the sizes of SMALL.
SMALL_QWEN3 = (*SMALL, "model.num_layers=3", "model.num_experts=8", "model.expert_features=12")
SMALL_DEEPSEEK = (
    *SMALL,
    "model.num_layers=3",
    "model.num_kv_heads=4",
    "model.num_experts=8",
    "model.router.top_k=4",
    "model.latent.kv_features=9",
    "model.latent.query_features=10",
    "model.latent.rotary_features=6",
    "model.latent.value_features=7",
    "model.expert_features=12",
    "model.dense_features=20",
    "model.shared_features=28",
    "model.mtp_layers=2",
)
STANDARD = {"tiny_qwen3_moe": SMALL_QWEN3, "tiny_deepseek_v3": SMALL_DEEPSEEK}
ALL_LOSSES = ("model.balance.aux=0.02", "model.balance.seq=0.03", "model.balance.glob=0.05", "model.balance.z=0.01")


def small_config(*overrides: str, recipe: str = "tiny_moe") -> TrainConfig:
    """A recipe, `tiny_moe` or one of `STANDARD`, with small sizes; later overrides win."""
    return load_config(recipe, [], [*STANDARD.get(recipe, SMALL), *overrides]).config


@cache
def _few_documents(name: str) -> list[str]:
    return [document[:4000] for document in load_documents(name)[:4]]


@contextmanager
def short_corpus() -> Iterator[None]:
    """Inside, a training is assembled from the beginning of four documents of the corpus, which takes no time."""
    with patch.object(assemble, "load_documents", _few_documents):
        yield


def small_model(
    config: DecoderConfig, vocab_size: int, dtype: torch.dtype, recompute: str | Sequence[str] = "none"
) -> Decoder:
    """A decoder alone, of one rank, with uninitialised parameters that belong to no engine."""
    parts = ModelParts(
        attention=LocalAttention(),
        dispatcher=LocalDispatcher(config.num_experts),
        sizing=EXACT,
        grouped_gemm=select_grouped_gemm("auto", dtype, "cpu"),
        activations=activation_policy(recompute),
        cross_entropy=assemble.target_losses(AxisGroups(), vocab_size),
        dtype=dtype,
    )
    return Decoder(config, vocab_size, parts)


def microbatches(training: assemble.Training, batch: Batch) -> list[Microbatch]:
    """The rows of a batch as a training cuts them."""
    return whole_rows(batch, training.config.train.microbatch_sequences)


def measured_steps(training: assemble.Training, number: int = MEASURED_STEPS) -> Peak:
    """Tensors at the fullest moment of the last of some steps, the first ones of a training."""
    for updates in range(number):
        with training.memory.step():
            run_step(training, next_step(training.data.train, training.cut).microbatches, updates=updates, window=None)
    return max(training.memory.account.peaks.values(), key=lambda peak: peak.total_bytes)
