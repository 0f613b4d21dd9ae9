"""`DataParallelConformance`: the rules of the data-parallel seam as tests that any engine can be put through.

    class TestAcme(DataParallelConformance):
        def build(self, config, groups, *, compute_dtype, keep_internal):
            return AcmeEngine(config, groups, compute_dtype, keep_internal)

One rank, on the CPU, in poisoned memory; `RanksConformance` has the rules for several ranks. The judge shares nothing
with an engine: a master weight per parameter, `torch.optim.AdamW(fused=True)`, gradients added up in Python.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod

import torch

from moe_kernels.testing import poisoned_memory
from moe_memory.config import OptimConfig
from moe_memory.data_parallel.engine import DataParallelEngine
from moe_memory.data_parallel.norm import clip_factor
from moe_memory.testing.model import SmallMoE, is_expert
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, PlainLoop, step_tokens
from moe_memory.testing.session import Session
from moe_memory.testing.verdict import (
    absolute_values,
    masters_of,
    near,
    refused,
    require,
    same_tables,
    state_of,
    weights_of,
)
from moe_parallel import AxisGroups, Groups, ShardSpec, reduce_norm_parts

NORM = "layers.0.norm_D"


class DataParallelConformance(ABC):
    """Subclass it, build the engine, and let pytest collect the subclass.

    Attributes:
        config: of the optimizer.
        exact: steps are bit-equal to a plain loop over whole vectors of 64 bytes. An engine that adds in another order,
            or updates parameters that do not fill their last vector, sets it to False and is judged in float64, within
            1e-12.
    """

    exact: bool = True
    config: OptimConfig = CONFIG

    @abstractmethod
    def build(
        self, config: OptimConfig, groups: Groups, *, compute_dtype: torch.dtype, keep_internal: Sequence[str]
    ) -> DataParallelEngine:
        """A new engine for this rank, with the default rule of weight decay."""

    def test_wrap_keeps_values_in_the_dtypes_asked_for(self) -> None:
        """A router that stays in the internal dtype among low-precision weights, too."""
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                session = self._start(dtype, seed=1)
                same_tables(session.weights(), weights_of(SmallMoE(dtype, seed=1)), f"after wrap, {dtype}", exact=True)

    def test_steps_equal_a_plain_loop(self) -> None:
        """Three microbatches, a new rate and a new clip factor in each step; weights, masters and moments."""
        dtypes = (torch.float32, torch.bfloat16, torch.float64) if self.exact else (torch.float64,)
        with poisoned_memory():
            for dtype in dtypes:
                session = self._start(dtype, seed=2)
                plain = PlainLoop(SmallMoE(dtype, seed=2), self.config)
                for number in range(4):
                    rate, factor = 0.02 / (number + 1), torch.tensor(1.0)
                    session.accumulate(step_tokens(number))
                    if number > 0:
                        factor = clip_factor(reduce_norm_parts(session.engine.norm_parts(2.0), 2.0, AxisGroups()), 0.7)
                        require(0 < float(factor) < 1, f"the gradient of step {number} is not clipped: {factor}")
                    session.engine.step(rate, factor if number % 2 else float(factor))
                    plain.step(step_tokens(number), rate, factor if number % 2 else float(factor))
                    self._same_state(session, plain, f"step {number + 1}, {dtype}")

    def test_an_expert_without_tokens_decays_and_nothing_else(self) -> None:
        with poisoned_memory():
            session = self._start(torch.float64, seed=3)
            before = masters_of(session.engine)
            for number in range(2):
                session.accumulate(step_tokens(number))
                session.engine.step(0.02, 1.0)
            after = masters_of(session.engine)
            factor = (1 - 0.02 * self.config.weight_decay) ** 2
            w1, b1 = "layers.1.experts.w1_EDF", "layers.1.experts.b1_EF"
            for name, expected in ((w1, before[w1][-1] * factor), (b1, before[b1][-1])):
                difference = (after[name][-1] - expected).abs().max()
                require(float(difference) < 1e-14, f"{name} of the expert without tokens: off by {difference}")
                require(not torch.equal(after[name][0], before[name][0]), f"{name} of expert 0 did not move")

    def test_norm_parts_add_up_to_the_norm(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.float64):
                session = self._start(dtype, seed=4)
                session.accumulate(step_tokens(7))
                gradients = PlainLoop(SmallMoE(dtype, seed=4), self.config).gradients(step_tokens(7))
                tolerance = 1e-5 if dtype == torch.float32 else 1e-12
                for order in (1.0, 2.0, inf):
                    parts = session.engine.norm_parts(order)
                    require(sorted(parts) == ["dense", "expert"], f"norm_parts has {sorted(parts)}")
                    for kind, part in parts.items():
                        flat = absolute_values(
                            g for name, g in gradients.items() if is_expert(name) == (kind == "expert")
                        )
                        expected = flat.max() if order == inf else (flat**order).sum()
                        near(part, expected, tolerance, f"the part {kind} of order {order}")
                    whole = torch.linalg.vector_norm(absolute_values(gradients.values()), order)
                    near(reduce_norm_parts(parts, order, AxisGroups()), whole, tolerance, f"the norm of order {order}")

    def test_gradient_tensors_are_the_summed_gradients(self) -> None:
        """In the boxes of the state."""
        dtypes = (torch.float32, torch.bfloat16, torch.float64) if self.exact else (torch.float64,)
        with poisoned_memory():
            for dtype in dtypes:
                session = self._start(dtype, seed=12)
                session.accumulate(step_tokens(8))
                found = {part.name: part for part in session.engine.gradient_tensors()}
                masters = [part for part in session.engine.state_tensors() if part.name.startswith("master/")]
                require([f"master/{name}" for name in found] == [part.name for part in masters], f"names {list(found)}")
                for gradient, master in zip(found.values(), masters, strict=True):
                    require(gradient.box == master.box, f"{gradient.name}: box {gradient.box}, state {master.box}")
                plain = PlainLoop(SmallMoE(dtype, seed=12), self.config).gradients(step_tokens(8))
                gradients = {name: part.tensor for name, part in found.items()}
                same_tables(gradients, plain, f"gradients, {dtype}", exact=self.exact)

    def test_skip_leaves_everything_bit_for_bit(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                session = self._start(dtype, seed=5)
                session.train(range(2))
                before, weights, values = (
                    state_of(session.engine),
                    session.weights(),
                    dict(session.engine.state_values()),
                )
                session.model(step_tokens(2)[0]).mul(torch.nan).backward()
                session.report(last=True)
                session.engine.finish()
                norm = reduce_norm_parts(session.engine.norm_parts(2.0), 2.0, AxisGroups())
                require(not bool(norm.isfinite()), "the norm of gradients that hold a NaN is finite")
                session.engine.skip()
                same_tables(state_of(session.engine), before, "after skip", exact=True)
                same_tables(session.weights(), weights, "after skip", exact=True)
                require(dict(session.engine.state_values()) == values, "skip changed the state values")
                # And the step after it is the one that would have come instead.
                other = self._start(dtype, seed=5)
                other.train(range(2))
                for each in (session, other):
                    each.train([3])
                same_tables(state_of(session.engine), state_of(other.engine), "the step after a skip", exact=True)

    def test_state_survives_a_round_trip_bit_for_bit(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                session = self._start(dtype, seed=6)
                session.train(range(3))
                saved, values = state_of(session.engine), json.loads(json.dumps(session.engine.state_values()))
                other = self._start(dtype, seed=66)
                for part in other.engine.state_tensors():
                    part.tensor.copy_(saved[part.name])
                other.engine.load_finished(values)
                same_tables(other.weights(), session.weights(), f"weights after loading, {dtype}", exact=True)
                for each in (session, other):
                    each.train((3, 4))
                same_tables(
                    state_of(other.engine), state_of(session.engine), f"two steps after loading, {dtype}", exact=True
                )
                require(dict(other.engine.state_values()) == dict(session.engine.state_values()), "state values differ")

    def test_state_tensors_cover_every_element_once(self) -> None:
        with poisoned_memory():
            session = self._start(torch.bfloat16, seed=7)
            parts = list(session.engine.state_tensors())
            names = [part.name for part in parts]
            require(
                [part.name for part in session.engine.state_tensors()] == names, "the order of the state is not fixed"
            )
            plain = PlainLoop(SmallMoE(torch.bfloat16, seed=7), self.config)
            shapes = {name: tuple(tensor.shape) for name, tensor in plain.state().items()}
            require(set(names) == set(shapes), f"the state has {sorted(names)}, expected {sorted(shapes)}")
            held: Counter[str] = Counter()
            for part in parts:
                require(part.global_shape == shapes[part.name], f"{part.name}: global shape {part.global_shape}")
                require(part.owned, f"{part.name} is not owned by the only rank")
                require(tuple(part.tensor.shape) == part.box.shape, f"{part.name}: box {part.box}")
                require(part.tensor.dtype == torch.float32, f"{part.name}: {part.tensor.dtype}")
                held[part.name] += prod(part.box.shape)
            for name, shape in shapes.items():
                require(held[name] == prod(shape), f"{name}: {held[name]} of {prod(shape)} elements at one rank")
            # Storage of its own: a number in each tensor must still be there when all have been written.
            for number, part in enumerate(parts):
                part.tensor.fill_(number)
            for number, part in enumerate(session.engine.state_tensors()):
                require(bool((part.tensor == number).all()), f"{part.name} shares storage, or is not live")

    def test_an_absent_gradient_is_an_error(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                session = self._start(dtype, seed=8)
                session.accumulate(step_tokens(0, 1), last=False)
                session.model(step_tokens(1, 1)[0]).backward(
                    inputs=[parameter for name, parameter in session.model.named_parameters() if name != NORM]
                )
                refused(NORM, session.report, last=True)

    def test_calls_out_of_order_are_errors(self) -> None:
        with poisoned_memory():
            engine = self.build(self.config, AxisGroups(), compute_dtype=torch.float32, keep_internal=KEEP_INTERNAL)
            for call in (engine.finish, engine.synchronize, lambda: list(engine.state_tensors())):
                refused("wrap", call)
            session = Session(engine, AxisGroups(), torch.float32, seed=9)
            refused("already", engine.wrap, session.model, session.specs)
            refused("nowhere", engine.grads_ready, ["nowhere"], last=False)
            self._require_nothing_to_step(engine)
            refused(NORM, engine.finish)
            session.accumulate(step_tokens(0), last=False)
            self._require_nothing_to_step(engine)
            refused(NORM, engine.finish)
            session.accumulate(step_tokens(0))
            session.model(step_tokens(1)[0]).backward()
            refused(NORM, engine.grads_ready, [NORM], last=True)
            engine.step(0.1, 1.0)
            self._require_nothing_to_step(engine)

    def test_a_model_that_does_not_fit_its_specs_is_refused(self) -> None:
        def attempt(mentions: str, specs: Mapping[str, ShardSpec], keep_internal: Sequence[str] = ()) -> None:
            engine = self.build(self.config, AxisGroups(), compute_dtype=torch.float32, keep_internal=keep_internal)
            refused(mentions, engine.wrap, SmallMoE(torch.float32, seed=10), specs)

        specs = SmallMoE(torch.float32, seed=10).specs
        attempt(NORM, {name: spec for name, spec in specs.items() if name != NORM})
        attempt("stranger", specs | {"stranger": ShardSpec(name="stranger", shape=(2,))})
        attempt("no_such_*", specs, keep_internal=[*KEEP_INTERNAL, "no_such_*"])
        attempt(NORM, specs | {NORM: replace(specs[NORM], name="another")})

    def test_a_model_without_memory_is_refused(self) -> None:
        engine = self.build(self.config, AxisGroups(), compute_dtype=torch.float32, keep_internal=KEEP_INTERNAL)
        model = SmallMoE(torch.float32, seed=10)
        refused("meta", engine.wrap, model.to("meta"), model.specs)

    def test_weights_that_left_the_engine_are_refused(self) -> None:
        """A model that is cast after `wrap` computes with weights that no update reaches."""
        session = self._start(torch.float32, seed=12)
        session.train(range(1))
        session.model.double()
        refused("wrap", session.accumulate, step_tokens(1))

    def test_loading_drops_the_gradients_of_a_step_in_progress(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                session = self._start(dtype, seed=11)
                session.train(range(2))
                saved, values = state_of(session.engine), dict(session.engine.state_values())
                session.train(range(2))
                expected = state_of(session.engine)
                session.accumulate(step_tokens(5, 1), last=False)
                session.model(step_tokens(6)[0]).backward()
                for part in session.engine.state_tensors():
                    part.tensor.copy_(saved[part.name])
                session.engine.load_finished(values)
                session.train(range(2))
                same_tables(state_of(session.engine), expected, f"two steps again after loading, {dtype}", exact=True)
            refused("updates", session.engine.load_finished, {})

    def _require_nothing_to_step(self, engine: DataParallelEngine) -> None:
        for call in (
            lambda: engine.step(0.1, 1.0),
            engine.skip,
            lambda: engine.norm_parts(2.0),
            lambda: list(engine.gradient_tensors()),
        ):
            refused("finish", call)

    def _start(self, dtype: torch.dtype, *, seed: int) -> Session:
        engine = self.build(self.config, AxisGroups(), compute_dtype=dtype, keep_internal=KEEP_INTERNAL)
        return Session(engine, AxisGroups(), dtype, seed=seed)

    def _same_state(self, session: Session, plain: PlainLoop, when: str) -> None:
        same_tables(state_of(session.engine), plain.state(), when, exact=self.exact)
        same_tables(session.weights(), weights_of(plain.model), when, exact=self.exact)
