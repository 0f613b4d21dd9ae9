"""Layout invariance, checked: short float64 runs of legal layouts against one process (numerics §9).

Rounding can neither hide a fault nor imitate one in float64, so that a difference beyond the limits is a fault of the
program. Every second step is ragged: some sequences are short, some targets masked.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, product
from math import gcd
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from moe_memory.data_parallel import StateTensor
from moe_parallel import FoldedMesh, ParallelConfig, ParallelLayout, run_distributed
from moe_parallel.config import CpKind, ScheduleName
from moe_parallel.testing import legal_layouts
from moe_train.assemble import Data, assemble, load_data
from moe_train.config.checks import layout_problems, mesh_of
from moe_train.config.tree import TrainConfig
from moe_train.data.batch import Batch
from moe_train.data.microbatches import next_step
from moe_train.errors import MoeTrainError
from moe_train.models.bias import bias_tensors
from moe_train.scale import LoadWindow
from moe_train.step import run_step

STEP_LIMIT = 1e-10
STATE_LIMIT = 1e-8

# At this rate a correct program drifts 3e-13 in twenty steps, at 1e-2 already 4e-7.
_LARGEST_LR = 3e-3
_LIMIT_S = 1200.0

Engine = Literal["zero1", "fsdp"]
ENGINES: tuple[Engine, ...] = ("zero1", "fsdp")
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")

_STRIDE = 7
# Schedules of a pipeline and chunks of a rank.
ORDERS: tuple[tuple[ScheduleName, int], ...] = (
    ("one_f_one_b", 1),
    ("interleaved", 2),
    ("gpipe", 1),
    ("zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zero_bubble_v", 2),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to spread the same training.

    Attributes:
        world: number of ranks.
        parallel: degrees, and how they work.
        engine: of data parallelism.
        microbatch_sequences: sequences of a forward, which sets how often gradients are accumulated.
    """

    world: int
    parallel: ParallelConfig
    engine: Engine
    microbatch_sequences: int

    @property
    def layout(self) -> ParallelLayout:
        degrees = self.parallel
        return ParallelLayout(
            world=self.world, tp=degrees.tp, cp=degrees.cp, pp=degrees.pp, ep=degrees.ep, etp=degrees.etp
        )

    @property
    def choices(self) -> dict[str, int | str]:
        """Everything that a case chooses, by name; what its degrees leave without effect is left out."""
        found: dict[str, int | str] = {axis: self.layout.size(axis) for axis in AXES}
        if self.parallel.tp > 1:
            found["sequence"] = "split" if self.parallel.sequence_parallel else "whole"
        if self.parallel.cp > 1 or self.parallel.dynamic_cp_tokens is not None:
            found["cp_kind"] = self.parallel.cp_kind
        if self.parallel.dynamic_cp_tokens is not None:
            found["context"] = "dynamic"
        if self.parallel.pp > 1 or self.parallel.vpp > 1:
            found |= {"schedule": self.parallel.schedule, "vpp": self.parallel.vpp}
        return {**found, "engine": self.engine, "microbatch": self.microbatch_sequences}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.choices.items() if value != 1 or name not in AXES)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The largest relative differences of a case from one process, each with where it is.

    Attributes:
        case: what was run.
        first_loss: of the loss of the first step.
        gradient: of a gradient of the first step, by norm per tensor.
        loss: of the loss of any step.
        state: of a master weight, moment or expert bias after the last step, by norm per tensor.
    """

    case: Case
    first_loss: float
    gradient: tuple[float, str]
    loss: float
    state: tuple[float, str]

    @property
    def holds(self) -> bool:
        """Whether all are within their limits; a NaN is not."""
        step = self.first_loss <= STEP_LIMIT and self.gradient[0] <= STEP_LIMIT
        return step and self.loss <= STATE_LIMIT and self.state[0] <= STATE_LIMIT


def cases(config: TrainConfig, world: int) -> list[Case]:
    """Every legal layout of the axes that exist; what else there is to choose changes from layout to layout.

    Between the layouts that share degrees of the dense view, every way to do context parallelism, sequence parallelism
    or not and the data-parallel engine take turns, so that all of them meet if there are enough layouts.

    Raises:
        MoeTrainError: there is none.
    """
    _check_layouts_can_agree(config)
    fixed = _competing_sequences(config)
    found: list[Case] = []
    places: Counter[tuple[int, int, int]] = Counter()
    for layout in legal_layouts(world):
        if layout.problems(num_experts=config.model.num_experts):
            continue
        ways = list(_ways(config, layout))
        if not ways or (fixed is not None and config.train.global_batch_sequences % (fixed * layout.dp)):
            continue
        dense = layout.tp, layout.cp, layout.pp
        place = places[dense]
        places[dense] += 1
        # A stride without a common divisor with any number of ways, so that neighbours differ in all they can.
        engine, parallel = ways[place * _STRIDE % len(ways)]
        share = -(-config.train.global_batch_sequences // layout.dp)
        whole = -(-share // config.train.balance_sequences)
        # In turn: all in one forward, half of it, a single balance microbatch.
        units = (whole, -(-whole // 2), 1)[len(found) % 3]
        microbatch = fixed or units * config.train.balance_sequences
        found.append(Case(world=world, parallel=parallel, engine=engine, microbatch_sequences=microbatch))
    if not found:
        raise MoeTrainError(f"no layout of {world} ranks is legal for this model")
    return found


def _ways(config: TrainConfig, layout: ParallelLayout) -> Iterator[tuple[Engine, ParallelConfig]]:
    """All that is legal beside the degrees."""
    shared = layout.cp if config.parallel.dynamic_cp_tokens is None else layout.cp * layout.dp
    kinds: tuple[CpKind, ...] = get_args(CpKind) if shared > 1 else ("ring",)
    splits = (True, False) if layout.tp > 1 else (True,)
    orders = ORDERS if layout.pp > 1 else ORDERS[:1]
    for engine, split, kind, (schedule, vpp) in product(ENGINES, splits, kinds, orders):
        parallel = replace(
            config.parallel,
            tp=layout.tp,
            cp=layout.cp,
            pp=layout.pp,
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=split,
            cp_kind=kind,
            cp_inner=2 if kind == "hierarchical" else 1,
            schedule=schedule,
            vpp=vpp,
        )
        changed = replace(config, parallel=parallel, memory=config.memory.with_engine(engine))
        if not parallel.problems() and not layout_problems(changed, layout):
            yield engine, parallel


def sample(found: Sequence[Case], limit: int) -> list[Case]:
    """At most `limit` cases in which as many values and pairs of values of all choices occur as can."""
    chosen: list[Case] = []
    rest = list(found)
    seen: set[object] = set()
    while rest and len(chosen) < limit:
        best = max(rest, key=lambda case: len(_pairs(case) - seen))
        rest.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[object]:
    return set(combinations_with_replacement(case.choices.items(), 2))


def verify(
    config: TrainConfig, chosen: Sequence[Case], *, steps: int, timeout_s: float = 120.0, data: Data | None = None
) -> Iterator[Deviation]:
    """Run one process and then each case in forked processes over gloo, and yield how far they are apart.

    Raises:
        MoeTrainError: a run did not train, so that nothing can be said; or the configuration makes the loss depend on
            the layout.
    """
    _check_layouts_can_agree(config)
    config = _in_float64(config)
    data = load_data(config) if data is None else data
    fixed = _competing_sequences(config)
    for case in chosen:
        _check_same_microbatches(config, case, fixed)
    whole = config.train.global_batch_sequences
    alone = Case(world=1, parallel=ParallelConfig(), engine="zero1", microbatch_sequences=fixed or whole)
    reference = _run(config, alone, data, steps, timeout_s)
    for case in chosen:
        found = _run(config, case, data, steps, timeout_s)
        yield Deviation(
            case=case,
            first_loss=_relative(found.losses[:1], reference.losses[:1]),
            gradient=_worst(found.gradients, reference.gradients),
            loss=_relative(found.losses, reference.losses),
            state=_worst(found.state, reference.state),
        )


@dataclass(frozen=True)
class _Run:
    """What a run ends with: the loss of each step, whole gradients of the first step, whole state tensors."""

    losses: list[float]
    gradients: dict[str, npt.NDArray[np.float64]]
    state: dict[str, npt.NDArray[np.float64]]


def _check_layouts_can_agree(config: TrainConfig) -> None:
    capacity = config.model.capacity
    if capacity.factor is not None and capacity.scope == "rank":
        raise MoeTrainError(
            f"model.capacity.factor = {capacity.factor} limits the choices of each rank's tokens (scope = 'rank'), so "
            "that what is dropped, and with it the loss, depends on the layout; set model.capacity.scope = "
            "'microbatch', or leave the factor out"
        )
    if capacity.factor is not None and config.parallel.dynamic_cp_tokens is not None:
        raise MoeTrainError(
            "parallel.dynamic_cp_tokens makes other microbatches in every world, and with model.capacity.factor = "
            f"{capacity.factor} the sequences of a microbatch compete for the places of experts; leave one of them out"
        )


def _competing_sequences(config: TrainConfig) -> int | None:
    """Sequences of a microbatch where all cases must have the same, because these compete; None where none do."""
    return None if config.model.capacity.factor is None else config.train.microbatch_sequences


def _check_same_microbatches(config: TrainConfig, case: Case, fixed: int | None) -> None:
    whole, here = config.train.global_batch_sequences, case.microbatch_sequences
    if fixed is not None and (here != fixed or whole % (fixed * case.layout.dp)):
        raise MoeTrainError(
            f"{case}: with model.capacity.factor the sequences of a microbatch compete, so that every case must have "
            f"whole ones of train.microbatch_sequences = {fixed}; {case.layout.dp} ranks of dp share {whole} sequences "
            f"in microbatches of {here}"
        )


def _in_float64(config: TrainConfig) -> TrainConfig:
    return replace(
        config,
        memory=replace(config.memory, compute_dtype="float64"),
        kernels=replace(config.kernels, grouped_gemm="loop", implementation="plain"),
        optim=replace(
            config.optim,
            lr=min(config.optim.lr, _LARGEST_LR),
            eps=1e-8,
            # Float64 here: fewer bits would turn rounding into differences.
            master_dtype="float32",
            gradient_dtype="float32",
            exp_avg_dtype="float32",
            exp_avg_sq_dtype="float32",
            muon=replace(config.optim.muon, dtype="float32"),
        ),
        train=replace(config.train, threads=1, device="cpu"),
    )


def _run(config: TrainConfig, case: Case, data: Data, steps: int, timeout_s: float) -> _Run:
    config = replace(
        config,
        parallel=case.parallel,
        memory=replace(config.memory.with_engine(case.engine), shard_replicas=_run_of_replicas(config, case)),
        train=replace(config.train, microbatch_sequences=case.microbatch_sequences),
    )

    def on_rank(mesh: FoldedMesh) -> tuple[list[float], list[_Part], list[_Part]]:
        return _train(config, mesh, data, steps)

    ranks = run_distributed(case.layout, on_rank, timeout_s=timeout_s, limit_s=_LIMIT_S, **mesh_of(config, case.layout))
    losses = ranks[0][0]
    if any(other[0] != losses for other in ranks):
        raise MoeTrainError(f"{case}: ranks disagree on the loss: {[other[0] for other in ranks]}")
    gradients = _joined(part for _, parts, _ in ranks for part in parts)
    state = _joined(part for _, _, parts in ranks for part in parts)
    return _Run(losses, gradients, state)


def _run_of_replicas(config: TrainConfig, case: Case) -> int | None:
    """As long as the configuration says where that divides the replicas."""
    size = config.memory.shard_replicas
    return None if size is None else gcd(size, case.layout.cp * case.layout.dp)


@dataclass(frozen=True)
class _Part:
    """A box of a tensor, in a form that travels between processes."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: npt.NDArray[np.float64]

    @classmethod
    def of(cls, part: StateTensor) -> "_Part":
        values = part.tensor.detach().to("cpu", torch.float64, copy=True).numpy()
        return cls(part.name, part.global_shape, part.box.offset, values)


def _train(
    config: TrainConfig, mesh: FoldedMesh, data: Data, steps: int
) -> tuple[list[float], list[_Part], list[_Part]]:
    training = assemble(config, mesh, data)
    losses: list[float] = []
    gradients: list[_Part] = []

    def keep_gradients() -> None:
        if not losses:
            gradients.extend(_owned(training.engine.gradient_tensors()))

    window: LoadWindow | None = None
    for number in range(steps):
        change = partial(ragged, step=number) if number % 2 else None
        tokens = next_step(training.data.train, training.cut, change)
        result = run_step(training, tokens.microbatches, updates=number, window=window, inspect=keep_gradients)
        if result.skipped:
            raise MoeTrainError(f"step {number + 1} had a loss of {result.loss}, norm {result.gradient_norm}")
        losses.append(result.loss)
        if config.model.balance.glob > 0:
            window = LoadWindow(counts_LE=result.statistics.counts, num_tokens=result.scale.num_tokens)
    state = [*training.engine.state_tensors(), *bias_tensors(training.model, training.groups)]
    return losses, gradients, list(_owned(state))


def _owned(tensors: Iterable[StateTensor]) -> Iterator[_Part]:
    return (_Part.of(tensor) for tensor in tensors if tensor.owned)


def ragged(batch: Batch, step: int) -> Batch:
    """The batch with every third sequence cut short and every fourth without some targets, by their global number."""
    slots = batch.token_BS.shape[1]
    number_B = batch.token_index_BS[:, 0] // slots + step
    length_B = torch.where(number_B % 3 == 0, number_B * 5 % slots, slots)
    valid_BS = batch.valid_BS & (torch.arange(slots) < length_B[:, None])
    masked_BS = (number_B % 4 == 1)[:, None] & (torch.arange(slots) % 5 < 3)
    return replace(batch, valid_BS=valid_BS, target_mask_BS=batch.target_mask_BS & valid_BS & ~masked_BS)


def _joined(parts: Iterator[_Part]) -> dict[str, npt.NDArray[np.float64]]:
    """Whole tensors from the boxes of all ranks, which must cover every element once."""
    whole: dict[str, npt.NDArray[np.float64]] = {}
    times: dict[str, npt.NDArray[np.int8]] = {}
    for part in parts:
        tensor = whole.setdefault(part.name, np.zeros(part.shape))
        box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
        tensor[box] = part.values
        times.setdefault(part.name, np.zeros(part.shape, np.int8))[box] += 1
    for name, count in times.items():
        if (count != 1).any():
            raise MoeTrainError(f"the ranks hold {int((count != 1).sum())} elements of {name} not exactly once")
    return whole


def _worst(
    found: Mapping[str, npt.NDArray[np.float64]], expected: Mapping[str, npt.NDArray[np.float64]]
) -> tuple[float, str]:
    """The largest relative difference by norm and whose it is."""
    if found.keys() != expected.keys():
        raise MoeTrainError(f"a layout has other tensors: {', '.join(sorted(found.keys() ^ expected.keys()))}")
    return max((_relative(found[name], expected[name]), name) for name in expected)


def _relative(found: Any, expected: Any) -> float:
    difference, size = np.linalg.norm(np.subtract(found, expected)), np.linalg.norm(expected)
    ratio = float(difference if size == 0 else difference / size)
    return ratio if np.isfinite(ratio) else float("inf")
