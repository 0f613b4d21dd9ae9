"""`DataParallelConformance`: the rules of the data-parallel seam as tests that any engine can be put through.

    class TestAcme(DataParallelConformance):
        def build(self, config, *, compute_dtype, keep_internal):
            return AcmeEngine(config, compute_dtype, keep_internal)

One rank, on the CPU, in poisoned memory. The judge shares nothing with an engine: a master weight per parameter,
`torch.optim.AdamW(fused=True)`, gradients added up in Python.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod

import torch
from torch import Tensor, nn

from moe_kernels.testing import poisoned_memory
from moe_memory.config import OptimConfig
from moe_memory.data_parallel.engine import DataParallelEngine
from moe_memory.data_parallel.norm import clip_factor, global_norm
from moe_memory.testing.reference import (
    CONFIG,
    EXPERTS,
    KEEP_INTERNAL,
    SLOTS,
    PlainLoop,
    SmallMoE,
    specs_of,
    step_tokens,
)
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
from moe_parallel import ShardSpec


class DataParallelConformance(ABC):
    """Subclass it, build the engine, and let pytest collect the subclass.

    Attributes:
        exact: steps are bit-equal to a plain loop over whole vectors of 64 bytes. An engine that adds in another order,
            or updates parameters that do not fill their last vector, sets it to False and is judged in float64, within
            1e-12.
    """

    exact: bool = True

    @abstractmethod
    def build(
        self, config: OptimConfig, *, compute_dtype: torch.dtype, keep_internal: Sequence[str]
    ) -> DataParallelEngine:
        """A new engine at one rank, with the default rule of weight decay."""

    def test_wrap_keeps_values_in_the_dtypes_asked_for(self) -> None:
        """A router that stays in the internal dtype among low-precision weights, too."""
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                _, model = self._start(dtype, seed=1)
                same_tables(weights_of(model), weights_of(SmallMoE(dtype, seed=1)), f"after wrap, {dtype}", exact=True)

    def test_steps_equal_a_plain_loop(self) -> None:
        """Three microbatches, a new rate and a new clip factor in each step; weights, masters and moments."""
        dtypes = (torch.float32, torch.bfloat16, torch.float64) if self.exact else (torch.float64,)
        with poisoned_memory():
            for dtype in dtypes:
                engine, model = self._start(dtype, seed=2)
                plain = PlainLoop(SmallMoE(dtype, seed=2), CONFIG)
                for number in range(4):
                    rate, factor = 0.02 / (number + 1), torch.tensor(1.0)
                    self._accumulate(engine, model, step_tokens(number))
                    if number > 0:
                        factor = clip_factor(global_norm(engine.norm_parts(2.0), 2.0), 0.7)
                        require(0 < float(factor) < 1, f"the gradient of step {number} is not clipped: {factor}")
                    engine.step(rate, factor if number % 2 else float(factor))
                    plain.step(step_tokens(number), rate, factor if number % 2 else float(factor))
                    self._same_state(engine, model, plain, f"step {number + 1}, {dtype}")

    def test_an_expert_without_tokens_decays_and_nothing_else(self) -> None:
        with poisoned_memory():
            engine, model = self._start(torch.float64, seed=3)
            before = masters_of(engine)
            for number in range(2):
                self._accumulate(engine, model, step_tokens(number))
                engine.step(0.02, 1.0)
            after = masters_of(engine)
            factor = (1 - 0.02 * CONFIG.weight_decay) ** 2
            for name, expected in (("w1_EDF", before["w1_EDF"][2] * factor), ("b1_EF", before["b1_EF"][2])):
                difference = (after[name][2] - expected).abs().max()
                require(float(difference) < 1e-14, f"{name} of the expert without tokens: off by {difference}")
                require(not torch.equal(after[name][0], before[name][0]), f"{name} of expert 0 did not move")

    def test_norm_parts_add_up_to_the_norm(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.float64):
                engine, model = self._start(dtype, seed=4)
                self._accumulate(engine, model, step_tokens(7))
                gradients = PlainLoop(SmallMoE(dtype, seed=4), CONFIG).gradients(step_tokens(7))
                tolerance = 1e-5 if dtype == torch.float32 else 1e-12
                for order in (1.0, 2.0, inf):
                    parts = engine.norm_parts(order)
                    require(sorted(parts) == ["dense", "expert"], f"norm_parts has {sorted(parts)}")
                    for kind, part in parts.items():
                        flat = absolute_values(
                            g for name, g in gradients.items() if (name in EXPERTS) == (kind == "expert")
                        )
                        expected = flat.max() if order == inf else (flat**order).sum()
                        near(part, expected, tolerance, f"the part {kind} of order {order}")
                    whole = torch.linalg.vector_norm(absolute_values(gradients.values()), order)
                    near(global_norm(parts, order), whole, tolerance, f"the norm of order {order}")

    def test_skip_leaves_everything_bit_for_bit(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                engine, model = self._start(dtype, seed=5)
                self._train(engine, model, range(2))
                before, weights, values = state_of(engine), weights_of(model), dict(engine.state_values())
                model(step_tokens(2)[0]).mul(torch.nan).backward()
                self._report(engine, model, last=True)
                engine.finish()
                norm = global_norm(engine.norm_parts(2.0), 2.0)
                require(not bool(norm.isfinite()), "the norm of gradients that hold a NaN is finite")
                engine.skip()
                same_tables(state_of(engine), before, "after skip", exact=True)
                same_tables(weights_of(model), weights, "after skip", exact=True)
                require(dict(engine.state_values()) == values, "skip changed the state values")
                # And the step after it is the one that would have come instead.
                other, twin = self._start(dtype, seed=5)
                self._train(other, twin, range(2))
                for pair in ((engine, model), (other, twin)):
                    self._train(*pair, [3])
                same_tables(state_of(engine), state_of(other), "the step after a skip", exact=True)

    def test_state_survives_a_round_trip_bit_for_bit(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                engine, model = self._start(dtype, seed=6)
                self._train(engine, model, range(3))
                saved, values = state_of(engine), json.loads(json.dumps(engine.state_values()))
                other, twin = self._start(dtype, seed=66)
                for part in other.state_tensors():
                    part.tensor.copy_(saved[part.name])
                other.load_finished(values)
                same_tables(weights_of(twin), weights_of(model), f"weights after loading, {dtype}", exact=True)
                for pair in ((engine, model), (other, twin)):
                    self._train(*pair, (3, 4))
                same_tables(state_of(other), state_of(engine), f"two steps after loading, {dtype}", exact=True)
                require(dict(other.state_values()) == dict(engine.state_values()), "state values differ")

    def test_state_tensors_cover_every_element_once(self) -> None:
        with poisoned_memory():
            engine, model = self._start(torch.bfloat16, seed=7)
            parts = list(engine.state_tensors())
            names = [part.name for part in parts]
            require([part.name for part in engine.state_tensors()] == names, "the order of the state is not fixed")
            shapes = {f"{slot}/{name}": tuple(p.shape) for slot in SLOTS for name, p in model.named_parameters()}
            require(set(names) == set(shapes), f"the state has {sorted(names)}, expected {sorted(shapes)}")
            held: Counter[str] = Counter()
            for part in parts:
                require(part.global_shape == shapes[part.name], f"{part.name}: global shape {part.global_shape}")
                require(tuple(part.tensor.shape) == part.box.shape, f"{part.name}: box {part.box}")
                require(part.tensor.dtype == torch.float32, f"{part.name}: {part.tensor.dtype}")
                held[part.name] += prod(part.box.shape)
            for name, shape in shapes.items():
                require(held[name] == prod(shape), f"{name}: {held[name]} of {prod(shape)} elements at one rank")
            # Storage of its own: a number in each tensor must still be there when all have been written.
            for number, part in enumerate(parts):
                part.tensor.fill_(number)
            for number, part in enumerate(engine.state_tensors()):
                require(bool((part.tensor == number).all()), f"{part.name} shares storage, or is not live")

    def test_an_absent_gradient_is_an_error(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                engine, model = self._start(dtype, seed=8)
                self._accumulate(engine, model, step_tokens(0, 1), last=False)
                model(step_tokens(1, 1)[0]).backward(inputs=[p for n, p in model.named_parameters() if n != "norm_D"])
                refused("norm_D", engine.grads_ready, [name for name, _ in model.named_parameters()], last=True)

    def test_calls_out_of_order_are_errors(self) -> None:
        with poisoned_memory():
            engine = self.build(CONFIG, compute_dtype=torch.float32, keep_internal=KEEP_INTERNAL)
            plain = SmallMoE(torch.float32, seed=9)
            refused("wrap", engine.finish)
            refused("wrap", lambda: list(engine.state_tensors()))
            model = engine.wrap(plain, specs_of(plain))
            refused("already", engine.wrap, plain, specs_of(plain))
            refused("nowhere", engine.grads_ready, ["nowhere"], last=False)
            self._require_nothing_to_step(engine)
            refused("norm_D", engine.finish)
            self._accumulate(engine, model, step_tokens(0), last=False)
            self._require_nothing_to_step(engine)
            refused("norm_D", engine.finish)
            self._accumulate(engine, model, step_tokens(0))
            model(step_tokens(1)[0]).backward()
            refused("norm_D", engine.grads_ready, ["norm_D"], last=True)
            engine.step(0.1, 1.0)
            self._require_nothing_to_step(engine)

    def test_a_model_that_does_not_fit_its_specs_is_refused(self) -> None:
        def attempt(mentions: str, specs: Mapping[str, ShardSpec], keep_internal: Sequence[str] = ()) -> None:
            engine = self.build(CONFIG, compute_dtype=torch.float32, keep_internal=keep_internal)
            refused(mentions, engine.wrap, SmallMoE(torch.float32, seed=10), specs)

        specs = specs_of(SmallMoE(torch.float32, seed=10))
        attempt("norm_D", {name: spec for name, spec in specs.items() if name != "norm_D"})
        attempt("stranger", specs | {"stranger": ShardSpec(name="stranger", shape=(2,))})
        attempt("no_such_*", specs, keep_internal=["router*", "no_such_*"])

    def test_loading_drops_the_gradients_of_a_step_in_progress(self) -> None:
        with poisoned_memory():
            for dtype in (torch.float32, torch.bfloat16):
                engine, model = self._start(dtype, seed=11)
                self._train(engine, model, range(2))
                saved, values = state_of(engine), dict(engine.state_values())
                self._train(engine, model, range(2))
                expected = state_of(engine)
                self._accumulate(engine, model, step_tokens(5, 1), last=False)
                model(step_tokens(6)[0]).backward()
                for part in engine.state_tensors():
                    part.tensor.copy_(saved[part.name])
                engine.load_finished(values)
                self._train(engine, model, range(2))
                same_tables(state_of(engine), expected, f"two steps again after loading, {dtype}", exact=True)
            refused("updates", engine.load_finished, {})

    def _require_nothing_to_step(self, engine: DataParallelEngine) -> None:
        for call in (lambda: engine.step(0.1, 1.0), engine.skip, lambda: engine.norm_parts(2.0)):
            refused("finish", call)

    def _start(self, dtype: torch.dtype, *, seed: int) -> tuple[DataParallelEngine, nn.Module]:
        engine = self.build(CONFIG, compute_dtype=dtype, keep_internal=KEEP_INTERNAL)
        model = SmallMoE(dtype, seed)
        return engine, engine.wrap(model, specs_of(model))

    def _train(self, engine: DataParallelEngine, model: nn.Module, steps: Iterable[int]) -> None:
        for number in steps:
            self._accumulate(engine, model, step_tokens(number))
            engine.step(0.02, 0.5)

    def _accumulate(
        self, engine: DataParallelEngine, model: nn.Module, microbatches: Sequence[Tensor], *, last: bool = True
    ) -> None:
        for number, token_N in enumerate(microbatches):
            model(token_N).backward()
            self._report(engine, model, last=last and number == len(microbatches) - 1)
        if last:
            engine.finish()

    def _report(self, engine: DataParallelEngine, model: nn.Module, *, last: bool) -> None:
        """In two parts and from the back, as a backward that reports layer by layer."""
        names = [name for name, _ in model.named_parameters()]
        for part in (names[4:], names[:4]):
            engine.grads_ready(part, last=last)

    def _same_state(self, engine: DataParallelEngine, model: nn.Module, plain: PlainLoop, when: str) -> None:
        same_tables(state_of(engine), plain.state(), when, exact=self.exact)
        same_tables(weights_of(model), weights_of(plain.model), when, exact=self.exact)
