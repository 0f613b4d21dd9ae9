"""From configuration to a training that can run: every choice of backend is made here, in one visible order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moe_comm import Sizing
from moe_comm.registry import build_dispatcher
from moe_kernels import internal_dtype
from moe_kernels.cross_entropy import cross_entropy
from moe_kernels.grouped_gemm import select_grouped_gemm
from moe_kernels.implementation import choose_implementation
from moe_memory.data_parallel import DataParallelEngine, build_engine
from moe_memory.initialise import initialise
from moe_memory.measure import within
from moe_memory.offload import memory_policy
from moe_memory.optim.rules import check_patterns as check_optim_patterns
from moe_parallel import (
    AttentionCore,
    AxisGroups,
    Groups,
    LocalAttention,
    ParallelConfig,
    Place,
    Topology,
    apply_plan,
    context_attention,
    vocabulary_cross_entropy,
    without_storage,
)
from moe_parallel.context.microbatches import SequenceWork
from moe_parallel.pipeline.layout import PipelineLayout
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedules.table import Schedule
from moe_parallel.plan import part_of
from moe_train.allocator import keep_freed_memory
from moe_train.config.checks import topology_of
from moe_train.config.tree import TrainConfig
from moe_train.data.corpus import load_documents
from moe_train.data.cuts import cut
from moe_train.data.entropy import TextEntropy, text_entropy
from moe_train.data.microbatches import DynamicCut, FixedCut, StepCut
from moe_train.data.share import Share
from moe_train.data.source import SequenceSource, TokenSource
from moe_train.data.tokenizer import ByteTokenizer
from moe_train.data.tokens import TokenSplit
from moe_train.errors import MoeTrainError
from moe_train.graphs import StepGraphs
from moe_train.memory.watch import MemoryWatch
from moe_train.models.flops import ModelCosts
from moe_train.models.spec import CausalModel, CrossEntropy, ModelParts
from moe_train.models.stages import schedule_of
from moe_train.plugins import MODELS
from moe_train.rows import dispatcher_config, sizing_of


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where tokens come from.

    Attributes:
        tokenizer: text to tokens and back.
        train: endless, shuffled batches.
        valid: the held-out sequences in the order of the text.
        entropy: of the whole corpus.
    """

    tokenizer: ByteTokenizer
    train: TokenSource
    valid: SequenceSource
    entropy: TextEntropy


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that one step needs.

    Attributes:
        groups: where this rank stands and with whom it communicates.
        topology: which ranks share a machine.
        stages: of the pipeline.
        schedule: in which order a rank of it works.
        messages: between its stages.
        router_names: of all layers with a router, in the order of their statistics.
        share: which sequences of a batch this rank works on where each has a row of its own.
        sizing: of the rows that experts get in training.
        cut: which sequences of a training step it works on, in which microbatches.
        tokens: which tokens of them.
        model: its parameters belong to the engine.
        engine: gradients in, weights out.
        graphs: of the layers; None where nothing is captured.
        memory: what this rank has in memory.
        dtype: internal dtype, of losses and weights of losses.
        costs: parameter counts and FLOPs of the model.
    """

    config: TrainConfig
    device: torch.device
    groups: Groups
    topology: Topology
    stages: PipelineLayout
    schedule: Schedule
    messages: Messages
    router_names: tuple[str, ...]
    share: Share
    sizing: Sizing
    cut: StepCut
    tokens: TokenSplit
    data: Data
    model: CausalModel
    cross_entropy: CrossEntropy
    engine: DataParallelEngine
    graphs: StepGraphs | None
    memory: MemoryWatch
    dtype: torch.dtype
    costs: ModelCosts


def assemble(
    config: TrainConfig,
    groups: Groups | None = None,
    data: Data | None = None,
    *,
    topology: Topology | None = None,
    memory: MemoryWatch | None = None,
) -> Training:
    """Build a training from a validated configuration.

    Collective: every rank assembles the same configuration. `groups` is by default a world of one process; `data` is
    loaded unless it is given; `topology` is what the configuration says of it (`topology_of`); `memory` is what watches
    the memory of this rank.

    Sets torch's thread count and deterministic mode for the process, as `train.threads` and `train.deterministic` say,
    which implementation computes (`kernels.implementation`), on CUDA the current device, and on a CPU the allocator.

    Raises:
        MoeTrainError and the packages' own errors: a chosen backend cannot run here.
    """
    device = choose_device(config.train.device)
    if device.type == "cuda":
        # What names no device, such as the synchronisation before a capture, is otherwise of the first one.
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    # As torch.use_deterministic_algorithms, which also imports torch's compiler: two seconds.
    torch.set_deterministic_debug_mode("error" if config.train.deterministic else "default")
    # Deterministic mode also fills fresh memory with NaN, a debugging aid that costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    dtype: torch.dtype = getattr(torch, config.memory.compute_dtype)
    choose_implementation(config.kernels.implementation, device.type)
    groups = AxisGroups() if groups is None else groups
    data = load_data(config) if data is None else data

    family = MODELS.get_available(config.model.kind)
    sizing = sizing_of(config, groups)
    parts = ModelParts(
        attention=attention_core(config.parallel, groups),
        dispatcher=build_dispatcher(dispatcher_config(config, groups, dtype), groups, config.model.num_experts),
        sizing=sizing,
        grouped_gemm=select_grouped_gemm(config.kernels.grouped_gemm, dtype, device.type),
        activations=memory_policy(config.memory, device),
        cross_entropy=target_losses(groups, data.tokenizer.vocab_size),
        dtype=dtype,
    )
    with without_storage():
        model = family.build(config.model, data.tokenizer.vocab_size, parts)
    assert isinstance(model, nn.Module)
    stages = family.stages(config.model, config.parallel)
    router_names = tuple(router.name for router in model.routers())
    keep = partial(model.keep, stages.on_rank(groups.rank("pp")))
    memory = MemoryWatch(device) if memory is None else memory
    with memory.building():
        with within("weights", "parameters"):
            specs = apply_plan(model, family.plan(config.model, config.parallel), groups, device=device, keep=keep)
        with within("initial values", "temporary"):
            initialise(model, specs, family.init_rules(config.model), config.train.seed, groups)
        check_patterns(family.internal_parameters, specs)
        here = [name for name, _ in model.named_parameters()]
        keep_internal = [p for p in family.internal_parameters if any(fnmatchcase(name, p) for name in here)]
        check_optim_patterns(config.optim, specs)
        engine = build_engine(
            config.memory,
            config.optim,
            groups,
            compute_dtype=dtype,
            keep_internal=keep_internal,
            seed=config.train.seed,
        )
        with within("state", "optimizer"):
            wrapped = engine.wrap(model, {name: specs[name] for name in here})
            memory.account.know(wrapped)
    messages = stage_messages(groups, stages.places)
    messages.connect(device)
    share = Share(rank=groups.rank("dp"), ranks=groups.size("dp"), unit=config.train.balance_sequences)
    costs = family.costs(config.model, data.tokenizer.vocab_size)
    return Training(
        config=config,
        device=device,
        groups=groups,
        topology=topology_of(config, groups.size("world")) if topology is None else topology,
        stages=stages,
        schedule=schedule_of(config.parallel),
        messages=messages,
        router_names=router_names,
        share=share,
        sizing=sizing,
        cut=step_cut(config, groups, share, costs.sequence_work()),
        tokens=TokenSplit(groups),
        data=data,
        cross_entropy=parts.cross_entropy,
        model=cast(CausalModel, wrapped),
        engine=engine,
        memory=memory,
        graphs=None if config.kernels.graphs == "none" else StepGraphs(wrapped, config.kernels.graph_scopes),
        dtype=internal_dtype(dtype),
        costs=costs,
    )


def check_patterns(patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raises:
    MoeTrainError: a pattern of parameters in the internal dtype that no parameter of the whole model has.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MoeTrainError(f"the pattern {pattern!r} of parameters in the internal dtype matches no parameter")


def stage_messages(groups: Groups, places: Placement) -> Messages:
    """Between this rank's stages and those of its neighbours."""
    return Messages(
        places,
        groups.rank("pp"),
        there=groups.group("pp"),
        back=groups.group("pp_back"),
        there_down=groups.group("pp_down"),
        back_up=groups.group("pp_back_up"),
    )


def attention_core(parallel: ParallelConfig, groups: Groups) -> AttentionCore:
    """Attention over whole rows, or over rows that several ranks share."""
    if groups.size("cp") == 1 and parallel.dynamic_cp_tokens is None:
        return LocalAttention()
    if parallel.cp_kind != "hierarchical":
        return context_attention(parallel.cp_kind)
    return context_attention(parallel.cp_kind, inner=groups.group("cp_inner"), outer=groups.group("cp_outer"))


def step_cut(config: TrainConfig, groups: Groups, share: Share, work: SequenceWork) -> StepCut:
    """How steps are cut into microbatches."""
    rank_tokens = config.parallel.dynamic_cp_tokens
    if rank_tokens is None:
        return FixedCut(share=share, ranks=groups.size("cp"), size=config.train.microbatch_sequences, work=work)
    return DynamicCut(
        rank=groups.rank("cp", "dp"),
        ranks=groups.size("cp", "dp"),
        rank_slots=rank_tokens,
        slot_multiple=groups.size("tp"),
        least_microbatches=groups.size("pp"),
        work=work,
    )


def target_losses(groups: Groups, vocab_size: int) -> CrossEntropy:
    """Cross-entropy of each target, of logits that are split over `tp`."""
    group = groups.group("tp")
    if group is None:
        return lambda logits_TV, targets_T, valid_T: cross_entropy(logits_TV, targets_T, valid_T=valid_T)
    first, _ = part_of(vocab_size, groups.size("tp"), groups.rank("tp"))

    def split(logits_TV: Tensor, targets_T: Tensor, valid_T: Tensor) -> Tensor:
        return vocabulary_cross_entropy(
            logits_TV, targets_T, group, first=first, vocab_size=vocab_size, valid_T=valid_T
        )

    return split


def load_data(config: TrainConfig) -> Data:
    """Tokenise the corpus and split it: the last `data.valid_fraction` of its tokens is held out."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_documents(load_documents(config.data.corpus))
    split = tokens.size - int(tokens.size * config.data.valid_fraction)
    end = tokenizer.end_of_document
    kind, longest = config.data.sequences, config.data.sequence_length

    def source(part: npt.NDArray[np.int32], batch_sequences: int, seed: int | None) -> SequenceSource:
        return SequenceSource(
            part,
            cut(part, kind, longest=longest, end_of_document=end),
            row_slots=longest if kind == "windows" else None,
            batch_sequences=batch_sequences,
            seed=seed,
            end_of_document=end if config.data.separate_documents or kind != "windows" else None,
            separate_documents=config.data.separate_documents,
        )

    return Data(
        tokenizer=tokenizer,
        train=source(tokens[:split], config.train.global_batch_sequences, config.data.seed),
        valid=source(tokens[split:], config.train.valid_sequences, None),
        entropy=text_entropy(tokens, tokenizer.vocab_size),
    )


def choose_device(name: str) -> torch.device:
    """The device that `train.device` names; with several ranks on a machine each takes the CUDA device of its number.

    Raises:
        MoeTrainError: there is no such device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise MoeTrainError(
            "train.device = 'cuda': this torch sees no CUDA device; `moe-train doctor` says what it sees, "
            "and train.device = 'auto' takes the CPU then"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    number, seen = Place.from_environment().local_rank, torch.cuda.device_count()
    if number >= seen:
        raise MoeTrainError(
            f"LOCAL_RANK = {number}, and this process sees {seen} CUDA device{'s' if seen > 1 else ''}; ranks of a "
            "machine are numbered as the devices that each of them sees (CUDA_VISIBLE_DEVICES): start fewer, or let "
            "each see all"
        )
    return torch.device(name, number)
