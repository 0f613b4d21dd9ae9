"""`RanksConformance`: the rules of the data-parallel seam over several ranks, as tests for any engine.

    class TestAcmeOverRanks(RanksConformance):
        def build(self, config, groups, *, compute_dtype, keep_internal):
            return AcmeEngine(config, groups, compute_dtype, keep_internal)

Ranks are forked processes over gloo. The judge is the plain loop of the kit for one rank, in one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels.testing import poisoned_memory
from moe_memory.config import OptimConfig
from moe_memory.data_parallel.engine import DataParallelEngine
from moe_memory.data_parallel.norm import clip_factor
from moe_memory.testing.model import NUM_EXPERTS, SmallMoE, index_of
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, PlainLoop, step_tokens
from moe_memory.testing.session import Part, Session, assembled, copied, overwrite
from moe_memory.testing.verdict import absolute_values, near, refused, require, same_tables
from moe_parallel import AxisGroups, Box, Groups, ParallelLayout, local_box, reduce_norm_parts, run_distributed
from moe_parallel.testing import count_collectives

_Weights = dict[str, npt.NDArray[Any]]


class RanksConformance(ABC):
    """Subclass it, build the engine, and let pytest collect the subclass.

    Attributes:
        config: of the optimizer.
        low_precision_tolerance: of its state where weights are bfloat16 and masters float32, with the same gradient.
        layouts: that the rules are tried in, with the number of experts. Rows that do not divide, parts without
            elements, fewer experts than replicas and degrees that differ pairwise are among them.
        small: two layouts for rules that need no more.
    """

    config: OptimConfig = CONFIG
    low_precision_tolerance: float = 1e-6
    layouts: Sequence[tuple[ParallelLayout, int]] = (
        (ParallelLayout(world=2, tp=2, ep=2), 4),
        (ParallelLayout(world=4), 2),
        (ParallelLayout(world=4, tp=2, etp=2), 4),
        (ParallelLayout(world=4, tp=2, cp=2, ep=2, etp=2), 4),
        (ParallelLayout(world=8, tp=4, ep=2, etp=2), 4),
    )
    small: Sequence[tuple[ParallelLayout, int]] = (
        (ParallelLayout(world=2, ep=2), 4),
        (ParallelLayout(world=4, tp=2, etp=2), 4),
    )

    @abstractmethod
    def build(
        self, config: OptimConfig, groups: Groups, *, compute_dtype: torch.dtype, keep_internal: Sequence[str]
    ) -> DataParallelEngine:
        """A new engine for this rank, with the default rule of weight decay."""

    def build_other(
        self, config: OptimConfig, groups: Groups, *, compute_dtype: torch.dtype, keep_internal: Sequence[str]
    ) -> DataParallelEngine:
        """The engine with which state is exchanged; by default another of the same."""
        return self.build(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)

    def test_ranks_agree_with_a_plain_loop(self) -> None:
        """Gradients, norms, state and weights of two steps of three microbatches, in float64; case R051 too."""
        for layout, experts in self.layouts:

            def work(groups: Groups, experts: int = experts) -> tuple[list[tuple[Any, ...]], _Weights]:
                session = self._session(groups, torch.float64, seed=1, num_experts=experts)
                records = []
                for number in range(2):
                    session.accumulate(step_tokens(number))
                    gradients = copied(session.engine.gradient_tensors())
                    norms = [_norm(session.engine, order, groups) for order in (1.0, 2.0, inf)]
                    session.engine.step(0.02 / (number + 1), clip_factor(norms[1], 0.7))
                    records.append((gradients, [float(n) for n in norms], copied(session.engine.state_tensors())))
                # Only now: the second forward must have waited for its weights by itself.
                return records, {name: weight.numpy() for name, weight in session.weights().items()}

            results = _run(layout, work)
            plain = PlainLoop(SmallMoE(torch.float64, 1, num_experts=experts), self.config)
            for number in range(2):
                when = f"{_words(layout, experts)}, step {number + 1}"
                gradients = plain.gradients(step_tokens(number))
                found = assembled([records[number][0] for records, _ in results], f"{when}, gradients")
                same_tables(found, gradients, f"{when}, gradients", exact=False)
                flat = absolute_values(gradients.values())
                expected = [torch.linalg.vector_norm(flat, order) for order in (1.0, 2.0, inf)]
                for rank, (records, _) in enumerate(results):
                    for norm, want in zip(records[number][1], expected, strict=True):
                        near(torch.tensor(norm, dtype=torch.float64), want, 1e-12, f"{when}, the norm on rank {rank}")
                plain.update(gradients, 0.02 / (number + 1), clip_factor(expected[1], 0.7))
                state = assembled([records[number][2] for records, _ in results], f"{when}, state")
                same_tables(state, plain.state(), f"{when}, state", exact=False)
            self._same_weights([weights for _, weights in results], plain.model, layout, f"{when}, weights")

    def test_low_precision_differs_by_the_order_of_sums_only(self) -> None:
        """bfloat16 weights and float32 masters.

        The gradient is the sum over ranks and microbatches of what a plain backward of that part gives. Sums of n terms
        in float32, in any order, differ by at most (n - 1) eps times the sum of absolute values. Masters and moments
        are those of AdamW with the engine's own gradient, weights are rounded masters.
        """
        for layout, experts in self.small:

            def work(groups: Groups, experts: int = experts) -> tuple[list[Part], list[Part], _Weights]:
                session = self._session(groups, torch.bfloat16, seed=2, num_experts=experts)
                session.accumulate(step_tokens(0))
                gradients = copied(session.engine.gradient_tensors())
                session.engine.step(0.02, 0.5)
                weights = {name: weight.double().numpy() for name, weight in session.weights().items()}
                return gradients, copied(session.engine.state_tensors()), weights

            when, results = _words(layout, experts), _run(layout, work)
            plain = PlainLoop(SmallMoE(torch.bfloat16, 2, num_experts=experts), self.config)
            gradients = assembled([result[0] for result in results], f"{when}, gradients")
            terms = _gradient_terms(layout, experts, step_tokens(0))
            for name, found in gradients.items():
                require(found.dtype == torch.float32, f"{when}: the gradient of {name} is {found.dtype}")
                expected = terms[name].double().sum(0)
                limit = (len(terms[name]) + 1) * torch.finfo(torch.float32).eps * terms[name].double().abs().sum(0)
                worst = ((found.double() - expected).abs() - limit).amax() if found.numel() else torch.tensor(0.0)
                require(
                    float(worst) <= 0, f"{when}: the gradient of {name} is off by {float(worst):.3g} beyond its limit"
                )
            plain.update(gradients, 0.02, 0.5)
            state = assembled([result[1] for result in results], f"{when}, state")
            same_tables(state, plain.state(), f"{when}, state", exact=False, tolerance=self.low_precision_tolerance)
            rounded = {name: state[f"master/{name}"].to(p.dtype) for name, p in plain.parameters.items()}
            for name, parameter in plain.parameters.items():
                parameter.data.copy_(rounded[name])
            self._same_weights([result[2] for result in results], plain.model, layout, f"{when}, weights", exact=True)

    def test_skip_on_all_ranks_leaves_everything_bit_for_bit(self) -> None:
        """A NaN in the tokens of one rank alone makes the norm of every rank not finite."""

        def work(groups: Groups) -> None:
            session = self._session(groups, torch.float32, seed=3)
            session.train(range(2))
            before, weights = copied(session.engine.state_tensors()), session.weights()
            values = dict(session.engine.state_values())
            loss = session.model(step_tokens(2)[0])
            here = groups.rank("ep") == 0 and groups.rank("edp") == groups.size("edp") - 1
            (loss * torch.nan if here else loss).backward()
            session.report(last=True)
            session.engine.finish()
            require(not bool(_norm(session.engine, 2.0, groups).isfinite()), "the norm hides a NaN of another rank")
            session.engine.skip()
            after = copied(session.engine.state_tensors())
            for old, new in zip(before, after, strict=True):
                require(old.values.tobytes() == new.values.tobytes(), f"skip changed {old.name}")
            same_tables(session.weights(), weights, "after skip", exact=True)
            require(dict(session.engine.state_values()) == values, "skip changed the state values")
            session.train([3])

        for layout, _ in self.small:
            _run(layout, work)

    def test_state_moves_between_layouts_and_engines(self) -> None:
        """Four times two steps, each on other ranks, equal eight steps of a plain loop (R095, R097, R098)."""
        places = (
            (ParallelLayout(world=2, tp=2, ep=2), self.build),
            (ParallelLayout(world=4, tp=2, etp=2), self.build_other),
            (ParallelLayout(world=4, tp=4, ep=2), self.build),
            (ParallelLayout(world=1), self.build_other),
        )
        plain = PlainLoop(SmallMoE(torch.float64, 40), self.config)
        whole: _Weights = {}
        values: dict[str, int | float] = {}
        for number, (layout, build) in enumerate(places):

            def work(
                groups: Groups, number: int = number, build: Any = build, whole: _Weights = whole, values: Any = values
            ) -> tuple[list[Part], dict[str, int | float], _Weights]:
                engine = build(self.config, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL)
                session = Session(engine, groups, torch.float64, seed=40 + number)
                if number > 0:
                    # What was begun before is dropped.
                    session.model(step_tokens(9)[0]).backward()
                    overwrite(engine, whole)
                    engine.load_finished(values)
                session.train(range(2 * number, 2 * number + 2))
                weights = {name: weight.numpy() for name, weight in session.weights().items()}
                return copied(engine.state_tensors()), dict(engine.state_values()), weights

            when = f"stay {number + 1}, {_words(layout, NUM_EXPERTS)}"
            results = _run(layout, work) if layout.world > 1 else [work(AxisGroups())]
            require(all(result[1] == results[0][1] for result in results), f"{when}: state values differ between ranks")
            for step in range(2 * number, 2 * number + 2):
                plain.step(step_tokens(step), 0.02, 0.5)
            state = assembled([result[0] for result in results], when)
            same_tables(state, plain.state(), when, exact=False)
            self._same_weights([result[2] for result in results], plain.model, layout, when)
            whole, values = {name: tensor.numpy() for name, tensor in state.items()}, results[0][1]

    def test_collectives_are_the_same_with_and_without_tokens(self) -> None:
        """Two tokens for up to four ranks: those without must come to every collective all the same."""

        def work(groups: Groups) -> list[list[str]]:
            session = self._session(groups, torch.float64, seed=5)
            session.train([0])
            counted = []
            for tokens in (12, 2, 12):
                with count_collectives() as names:
                    session.accumulate([token_N[:tokens] for token_N in step_tokens(6)])
                    session.engine.step(0.02, 0.5)
                counted.append(list(names))
            return counted

        for layout, experts in self.small:
            results = _run(layout, work)
            first = results[0][0]
            require(bool(first), "no collectives at all were counted")
            for rank, counted in enumerate(results):
                for names in counted:
                    when = f"{_words(layout, experts)}, rank {rank}"
                    require(names == first, f"{when} issued {names}, rank 0 in its first step {first}")

    def test_replicas_that_differ_start_as_one(self) -> None:
        """Each element has the value of the rank that owns it, on every rank."""

        def work(groups: Groups) -> tuple[list[Part], _Weights]:
            engine = self.build(self.config, groups, compute_dtype=torch.float64, keep_internal=KEEP_INTERNAL)
            # Ranks that hold copies besides the replicas must bring the same.
            seed = 60 + groups.rank("world") // max(groups.size("tp"), groups.size("etp"))
            session = Session(engine, groups, torch.float64, seed=seed)
            return copied(engine.state_tensors()), {n: weight.numpy() for n, weight in session.weights().items()}

        for layout, experts in self.small:
            when, results = f"{_words(layout, experts)}, at the start", _run(layout, work)
            state = assembled([parts for parts, _ in results], when)
            model = SmallMoE(torch.float64, 0, num_experts=experts)
            for name, parameter in model.named_parameters():
                parameter.data = state[f"master/{name}"]
            self._same_weights([weights for _, weights in results], model, layout, when, exact=True)

    def test_an_absent_gradient_is_an_error_on_every_rank(self) -> None:
        def work(groups: Groups) -> None:
            for dtype in (torch.float32, torch.bfloat16):
                session = self._session(groups, dtype, seed=7)
                session.accumulate(step_tokens(0, 1), last=False)
                session.model(step_tokens(1, 1)[0], 1).backward()
                refused("layers.1.norm_D", session.report, last=True)

        for layout, _ in self.small:
            _run(layout, work)

    def _session(self, groups: Groups, dtype: torch.dtype, *, seed: int, num_experts: int = NUM_EXPERTS) -> Session:
        engine = self.build(self.config, groups, compute_dtype=dtype, keep_internal=KEEP_INTERNAL)
        return Session(engine, groups, dtype, seed=seed, num_experts=num_experts)

    def _same_weights(
        self,
        weights_of_ranks: Sequence[_Weights],
        whole: SmallMoE,
        layout: ParallelLayout,
        when: str,
        *,
        exact: bool = False,
    ) -> None:
        """Each rank has its part of the whole, and ranks with the same part have the same bits (case R034)."""
        holders: dict[tuple[str, Box], tuple[int, bytes]] = {}
        for rank, weights in enumerate(weights_of_ranks):
            boxes = {name: local_box(spec, _Place(layout, rank)) for name, spec in whole.specs.items()}
            expected = {name: whole.get_parameter(name).detach()[index_of(box)].double() for name, box in boxes.items()}
            found = {name: torch.from_numpy(weight) for name, weight in weights.items()}
            same_tables(found, expected, f"{when} of rank {rank}", exact=exact)
            for name, weight in weights.items():
                first, bits = holders.setdefault((name, boxes[name]), (rank, weight.tobytes()))
                require(weight.tobytes() == bits, f"{when}: {name} differs between the ranks {first} and {rank}")


class _Place(AxisGroups):
    """The coordinates of a rank, without a process group: what it would compute can be computed anywhere."""

    def __init__(self, layout: ParallelLayout, rank: int) -> None:
        super().__init__()
        self._layout, self._rank = layout, rank

    def size(self, *axes: str) -> int:
        return len(self._layout.group_of(self._rank, *axes))

    def rank(self, *axes: str) -> int:
        return self._layout.group_of(self._rank, *axes).index(self._rank)


def _run(layout: ParallelLayout, work: Any) -> list[Any]:
    def poisoned(groups: Groups) -> Any:
        with poisoned_memory():
            return work(groups)

    return run_distributed(layout, poisoned, timeout_s=30)


def _norm(engine: DataParallelEngine, order: float, groups: Groups) -> Tensor:
    return reduce_norm_parts(engine.norm_parts(order), order, groups)


def _gradient_terms(layout: ParallelLayout, num_experts: int, microbatches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Terms of the gradient [rank and microbatch, *shape], by a plain bfloat16 backward each."""
    terms: dict[str, list[Tensor]] = {}
    for rank in range(layout.world):
        place = _Place(layout, rank)
        model = SmallMoE(torch.bfloat16, 2, place, num_experts)
        for token_N in microbatches:
            for name, gradient in PlainLoop(model, CONFIG).gradients([token_N]).items():
                spec = model.specs[name]
                if any(place.rank(axis) for axis in spec.copy_axes if axis not in spec.grad_sum_axes):
                    continue  # the same as on another rank
                term = torch.zeros(spec.shape, dtype=gradient.dtype)
                term[index_of(local_box(spec, place))] = gradient
                terms.setdefault(name, []).append(term)
    return {name: torch.stack(found) for name, found in terms.items()}


def _words(layout: ParallelLayout, experts: int) -> str:
    degrees = " ".join(f"{axis}={size}" for axis in ("tp", "cp", "ep", "etp") if (size := layout.size(axis)) > 1)
    return f"{layout.world} ranks, {degrees or 'dp only'}, {experts} experts"
