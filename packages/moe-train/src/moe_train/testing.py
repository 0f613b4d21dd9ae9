"""Small trainings for tests of this package and of plug-ins: real components, steps of milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from moe_train import assemble
from moe_train.config.load import load_config
from moe_train.config.tree import TrainConfig
from moe_train.data.corpus import load_documents

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
    "train.threads=1",
    "train.valid_sequences=4",
    "optim.warmup_steps=0",
    "observe.sample_tokens=3",
)
ALL_LOSSES = ("model.balance.aux=0.02", "model.balance.seq=0.03", "model.balance.glob=0.05", "model.balance.z=0.01")


def small_config(*overrides: str) -> TrainConfig:
    """The recipe `tiny_moe` with small sizes; later overrides win."""
    return load_config("tiny_moe", [], [*SMALL, *overrides]).config


@cache
def _few_documents(name: str) -> list[str]:
    return [document[:4000] for document in load_documents(name)[:4]]


@contextmanager
def short_corpus() -> Iterator[None]:
    """Inside, a training is assembled from the beginning of four documents of the corpus, which takes no time."""
    with patch.object(assemble, "load_documents", _few_documents):
        yield
