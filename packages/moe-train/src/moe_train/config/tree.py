"""`TrainConfig`: everything that a run is configured by, as one frozen tree. Imports nothing heavy.

The sections `model` and `comm` are open unions: their field `kind` names an installed model family or dispatcher, whose
plug-in brings the dataclass. Every other section is fixed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from moe_comm.config import AutoConfig
from moe_kernels.config import KernelsConfig
from moe_memory.config import MemoryConfig, OptimConfig
from moe_parallel.config import ParallelConfig
from moe_parallel.problem import Problem
from moe_train.models.config import DecoderConfig

SequenceKind = Literal["windows", "documents", "sentences"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
        corpus: a text that ships with the package.
        tokenizer: `bytes`: UTF-8 bytes and one token that ends a document.
        sequences: `windows` of the text, all of the same length; whole `documents`; or `sentences`.
        sequence_length: tokens of a window; longer documents and sentences are cut into such pieces.
        separate_documents: the documents that share a sequence do not see each other; positions begin at 0 in each, and
            its last token has no target.
        valid_fraction: share of the tokens, at the end of the corpus, that is held out for validation.
        seed: of the order of the sequences.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    corpus: str = "state_of_the_union"
    tokenizer: Literal["bytes"] = "bytes"
    sequences: SequenceKind = "windows"
    sequence_length: int = 256
    separate_documents: bool = False
    valid_fraction: float = 0.05
    seed: int = 0

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        found = _too_small("data", self, 1, ["sequence_length"]) + _too_small("data", self, 0, ["seed"])
        if not 0 < self.valid_fraction < 1:
            rule = "a share of the tokens is above 0 and below 1, because every run ends with a validation"
            found.append(Problem(key="data.valid_fraction", value=self.valid_fraction, rule=rule))
        return found


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of a run is saved.

    Attributes:
        interval_steps: steps between checkpoints; None saves after the last step only.
        keep: newest checkpoints that stay.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    interval_steps: int | None = 100
    keep: int = 2

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        return _too_small("checkpoint", self, 1, ["interval_steps", "keep"])


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What a run tells about itself.

    Attributes:
        log_interval_steps: steps between two lines on the console; sinks receive every step.
        sinks: installed sinks that receive the metrics.
        record_choices: keep which experts every token chose, in the folder `choices` of the run.
        sample_tokens: tokens of the text that the trained model writes at the end; 0 writes none.
        sample_prompt: the beginning of that text.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    log_interval_steps: int = 10
    sinks: tuple[str, ...] = ("jsonl",)
    record_choices: bool = False
    sample_tokens: int = 200
    sample_prompt: str = "The state of"

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        found = _too_small("observe", self, 1, ["log_interval_steps"]) + _too_small(
            "observe", self, 0, ["sample_tokens"]
        )
        if len(set(self.sinks)) < len(self.sinks):
            found.append(Problem(key="observe.sinks", value=self.sinks, rule="a sink is named at most once"))
        return found


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The section `train`: what one step is, and how many there are.

    Attributes:
        steps: optimizer steps of the whole run.
        global_batch_sequences: sequences of one step, over all ranks.
        microbatch_sequences: sequences of one forward and backward; the last one of a step may be smaller. With
            `parallel.dynamic_cp_tokens` that of validation alone.
        balance_sequences: sequences over which the auxiliary balance loss is computed; divides `microbatch_sequences`,
            so that the loss does not depend on how a step is cut.
        loss_norm: `token`: every target weighs the same; `microbatch`: mean over balance microbatches of their means.
        valid_interval_steps: steps between validations; None validates after the last step only.
        valid_sequences: sequences of one validation.
        replay_choices: directory of a run whose recorded choices routers repeat; the data must be the same.
        seed: of initial weights and of everything random in training.
        threads: threads of one process; None leaves torch's choice.
        device: `auto` takes a GPU where there is one.
        deterministic: the same configuration gives the same bits again.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    steps: int = 300
    global_batch_sequences: int = 16
    microbatch_sequences: int = 16
    balance_sequences: int = 1
    loss_norm: Literal["token", "microbatch"] = "token"
    valid_interval_steps: int | None = 100
    valid_sequences: int = 64
    replay_choices: str | None = None
    seed: int = 0
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = True

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        names = [
            *["steps", "global_batch_sequences", "microbatch_sequences", "balance_sequences"],
            *["valid_interval_steps", "valid_sequences", "threads"],
        ]
        return _too_small("train", self, 1, names) + _too_small("train", self, 0, ["seed"])


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run, one attribute per section.

    Attributes:
        model: options of the model family that `model.kind` names; by default `moe_train.models.config.DecoderConfig`.
        parallel: degrees of parallelism.
        comm: options of the dispatcher that `comm.kind` names; by default `moe_comm.config.AutoConfig`.
        kernels: implementations of the mathematics.
        memory: precision, recompute, sharding.
        data: tokens.
        optim: optimizer and learning rate.
        checkpoint: saving.
        observe: metrics.
        train: the loop.
    """

    model: Any = field(default_factory=DecoderConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    comm: Any = field(default_factory=AutoConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    train: LoopConfig = field(default_factory=LoopConfig)


def _too_small(section: str, config: object, least: int, names: Iterable[str]) -> list[Problem]:
    return [
        Problem(key=f"{section}.{name}", value=value, rule=f"must be at least {least}")
        for name in names
        if (value := getattr(config, name)) is not None and value < least
    ]
