"""R128: the kit fails engines that are wrong in one place each. A kit that passes everything proves nothing."""

from dataclasses import replace

import pytest
import torch

from moe_memory import Zero1
from moe_memory.data_parallel.engine import StateTensor
from moe_memory.testing import DataParallelConformance
from moe_parallel import Box


class DropsTheLastMicrobatch(Zero1):
    def grads_ready(self, names, *, last):
        super().grads_ready(names, last=last)
        if not last:
            self.kept = [bucket.grad.clone() for bucket in self._buckets]

    def finish(self):
        super().finish()
        for bucket, grad in zip(self._buckets, self.kept, strict=True):
            bucket.grad.copy_(grad)


class Averages(Zero1):
    def grads_ready(self, names, *, last):
        super().grads_ready(names, last=last)
        self.calls = getattr(self, "calls", 0) + 1

    def finish(self):
        super().finish()
        for bucket in self._buckets:
            bucket.grad.div_(self.calls / 2)
        self.calls = 0


class AveragesExperts(Zero1):
    """The expert-parallel mistake: experts divided once more than the rest."""

    def finish(self):
        super().finish()
        for bucket in self._buckets:
            if bucket.key.kind.value == "expert":
                bucket.grad.div_(2)


class AccumulatesInTheComputeDtype(Zero1):
    def grads_ready(self, names, *, last):
        super().grads_ready(names, last=last)
        for bucket in self._buckets:
            bucket.grad.copy_(bucket.grad.to(bucket.key.compute_dtype))


class KeepsGradients(Zero1):
    def _begin_step(self):
        kept = [bucket.grad.clone() for bucket in self._buckets]
        super()._begin_step()
        for bucket, grad in zip(self._buckets, kept, strict=True):
            bucket.grad.copy_(grad)


class DecaysEverything(Zero1):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, decayed=lambda spec: True)


class DecaysNothing(Zero1):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, decayed=lambda spec: False)


class DecaysByDims(Zero1):
    """R064: stacked expert biases look like matrices."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, decayed=lambda spec: len(spec.shape) >= 2)


class NeverRefreshes(Zero1):
    def step(self, learning_rate, gradient_factor):
        compute = [bucket.compute.clone() for bucket in self._buckets]
        super().step(learning_rate, gradient_factor)
        for bucket, values in zip(self._buckets, compute, strict=True):
            if bucket.compute is not bucket.master:
                bucket.compute.copy_(values)


class NeverRefreshesAfterLoading(Zero1):
    def load_finished(self, values):
        compute = [bucket.compute.clone() for bucket in self._buckets]
        super().load_finished(values)
        for bucket, kept in zip(self._buckets, compute, strict=True):
            if bucket.compute is not bucket.master:
                bucket.compute.copy_(kept)


class IgnoresTheFactor(Zero1):
    def step(self, learning_rate, gradient_factor):
        super().step(learning_rate, 1.0)


class IgnoresTheRate(Zero1):
    def step(self, learning_rate, gradient_factor):
        super().step(self._config.lr, gradient_factor)


class ForgetsTheBiasCorrection(Zero1):
    def load_finished(self, values):
        super().load_finished(values)
        self._optimizer.updates = 0


class LosesTheFirstMoment(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            if not part.name.startswith("exp_avg/"):
                yield part


class SavesTwice(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            yield part
            if part.name == "master/head.scale":
                yield part


class SavesCopies(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            yield replace(part, tensor=part.tensor.clone())


class SavesInAnyOrder(Zero1):
    calls = 0

    def state_tensors(self):
        self.calls += 1
        parts = list(super().state_tensors())
        yield from parts if self.calls % 2 else reversed(parts)


class SavesFlat(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            shape = (part.tensor.numel(),)
            yield StateTensor(name=part.name, global_shape=shape, box=Box.whole(shape), tensor=part.tensor.view(shape))


class SavesLowPrecision(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            yield replace(part, tensor=part.tensor.bfloat16())


class GradientsWithoutTheLast(Zero1):
    def gradient_tensors(self):
        yield from list(super().gradient_tensors())[:-1]


class GradientsAreHalved(Zero1):
    def gradient_tensors(self):
        for part in super().gradient_tensors():
            yield replace(part, tensor=part.tensor / 2)


class SkipCountsAsAnUpdate(Zero1):
    def skip(self):
        super().skip()
        self._optimizer.updates += 1


class SkipUpdates(Zero1):
    def skip(self):
        for bucket in self._buckets:
            bucket.grad.zero_()
        super().step(1e-3, 1.0)


class SkipKeepsGradients(Zero1):
    def skip(self):
        self._order.begin()


class NormOfDenseOnly(Zero1):
    def norm_parts(self, order):
        parts = super().norm_parts(order)
        return parts | {"expert": torch.zeros_like(parts["expert"])}


class NormLacksAKind(Zero1):
    def norm_parts(self, order):
        parts = super().norm_parts(order)
        return {"dense": parts["dense"] + parts["expert"]}


class NormWithoutPower(Zero1):
    def norm_parts(self, order):
        return {kind: part ** (1 / order) for kind, part in super().norm_parts(order).items()}


class AcceptsAbsentGradients(Zero1):
    def grads_ready(self, names, *, last):
        for bucket in self._buckets:
            bucket.has_gradient = lambda name: True
        super().grads_ready(names, last=last)


class AcceptsAnyOrder(Zero1):
    def _require_finished(self):
        pass


class FinishesEarly(Zero1):
    def finish(self):
        self._require_model()
        self._order._open.clear()
        super().finish()


class AcceptsGradientsAfterTheLast(Zero1):
    def grads_ready(self, names, *, last):
        self._order._open |= set(self._specs) & set(names)
        super().grads_ready(names, last=last)


class LoadingKeepsGradients(Zero1):
    def load_finished(self, values):
        kept = [bucket.grad.clone() for bucket in self._buckets]
        super().load_finished(values)
        for bucket, grad in zip(self._buckets, kept, strict=True):
            bucket.grad.copy_(grad)


class IgnoresKeepInternal(Zero1):
    def __init__(self, config, groups, *, compute_dtype, keep_internal):
        super().__init__(config, groups, compute_dtype=compute_dtype)


class KeepsEverythingInternal(Zero1):
    def __init__(self, config, groups, *, compute_dtype, keep_internal):
        super().__init__(config, groups, compute_dtype=compute_dtype, keep_internal=[*keep_internal, "*"])


class IgnoresStrangers(Zero1):
    def wrap(self, model, specs):
        return super().wrap(model, {name: specs[name] for name, _ in model.named_parameters() if name in specs})


class MakesUpMemory(Zero1):
    def wrap(self, model, specs):
        return super().wrap(model.to_empty(device="cpu"), specs)


class TakesWeightsBack(Zero1):
    def grads_ready(self, names, *, last):
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                parameter.data = bucket._whole(bucket.compute, name)
        super().grads_ready(names, last=last)


class ChangesWeightsOnWrap(Zero1):
    def wrap(self, model, specs):
        model = super().wrap(model, specs)
        for bucket in self._buckets:
            bucket.compute.mul_(1.01)
        return model


def kit(engine, **members):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return engine(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)

    return type("Kit", (DataParallelConformance,), {"build": build, **members})()


WRAP = "test_wrap_keeps_values_in_the_dtypes_asked_for"
STEPS = "test_steps_equal_a_plain_loop"
EMPTY_EXPERT = "test_an_expert_without_tokens_decays_and_nothing_else"
NORM = "test_norm_parts_add_up_to_the_norm"
GRADIENTS = "test_gradient_tensors_are_the_summed_gradients"
SKIP = "test_skip_leaves_everything_bit_for_bit"
ROUND_TRIP = "test_state_survives_a_round_trip_bit_for_bit"
COVER = "test_state_tensors_cover_every_element_once"
ABSENT = "test_an_absent_gradient_is_an_error"
ORDER = "test_calls_out_of_order_are_errors"
MISFIT = "test_a_model_that_does_not_fit_its_specs_is_refused"
WITHOUT_MEMORY = "test_a_model_without_memory_is_refused"
LEFT = "test_weights_that_left_the_engine_are_refused"
LOADING = "test_loading_drops_the_gradients_of_a_step_in_progress"

CAUGHT = [
    (DropsTheLastMicrobatch, STEPS, "step 1"),
    (DropsTheLastMicrobatch, NORM, "expected"),
    (Averages, STEPS, "step 1"),
    (Averages, NORM, "expected"),
    (AveragesExperts, STEPS, "step 1"),
    (AveragesExperts, NORM, "the part expert"),
    (AccumulatesInTheComputeDtype, STEPS, "step 1, torch.bfloat16"),
    (KeepsGradients, STEPS, "step 2"),
    (DecaysEverything, STEPS, "master/layers.0.norm_D"),
    (DecaysEverything, EMPTY_EXPERT, "b1_EF"),
    (DecaysNothing, STEPS, "master/embedding.weight_VD"),
    (DecaysNothing, EMPTY_EXPERT, "w1_EDF"),
    (DecaysByDims, STEPS, "master/layers.0.experts.b1_EF"),
    (DecaysByDims, EMPTY_EXPERT, "b1_EF"),
    (NeverRefreshes, STEPS, "step 1, torch.bfloat16: embedding.weight_VD"),
    (NeverRefreshesAfterLoading, ROUND_TRIP, "weights after loading, torch.bfloat16"),
    (IgnoresTheFactor, STEPS, "step 2"),
    (IgnoresTheRate, STEPS, "step 2"),
    (ForgetsTheBiasCorrection, ROUND_TRIP, "two steps after loading"),
    (LosesTheFirstMoment, COVER, "the state has"),
    (LosesTheFirstMoment, ROUND_TRIP, "two steps after loading"),
    (SavesTwice, COVER, "master/head.scale: 2 of 1 elements"),
    (SavesCopies, COVER, "is not live"),
    (SavesInAnyOrder, COVER, "order of the state is not fixed"),
    (SavesFlat, COVER, "global shape"),
    (SavesLowPrecision, COVER, "bfloat16"),
    (GradientsWithoutTheLast, GRADIENTS, "names"),
    (GradientsAreHalved, GRADIENTS, "differs from the expected bits"),
    (SkipCountsAsAnUpdate, SKIP, "skip changed the state values"),
    (SkipUpdates, SKIP, "after skip"),
    (SkipKeepsGradients, SKIP, "the step after a skip"),
    (NormOfDenseOnly, NORM, "the part expert"),
    (NormLacksAKind, NORM, "norm_parts has"),
    (NormWithoutPower, NORM, "order 2"),
    (AcceptsAbsentGradients, ABSENT, "accepted"),
    (AcceptsAnyOrder, ORDER, "accepted"),
    (FinishesEarly, ORDER, "accepted"),
    (AcceptsGradientsAfterTheLast, ORDER, "accepted"),
    (LoadingKeepsGradients, LOADING, "two steps again after loading"),
    (IgnoresKeepInternal, WRAP, "router.weight_ED is torch.bfloat16"),
    (IgnoresKeepInternal, MISFIT, "accepted"),
    (KeepsEverythingInternal, WRAP, "is torch.float32"),
    (IgnoresStrangers, MISFIT, "accepted"),
    (MakesUpMemory, WITHOUT_MEMORY, "accepted"),
    (TakesWeightsBack, LEFT, "accepted"),
    (ChangesWeightsOnWrap, WRAP, "differs from the expected bits"),
]


@pytest.mark.parametrize(("engine", "rule", "message"), CAUGHT, ids=[f"{e.__name__}-{r}" for e, r, _ in CAUGHT])
def test_r128_a_fault_is_caught(engine, rule, message):
    with pytest.raises(AssertionError, match=message):
        getattr(kit(engine), rule)()


@pytest.mark.parametrize("engine", [DropsTheLastMicrobatch, Averages, DecaysByDims, IgnoresTheFactor])
def test_r128_faults_are_caught_within_a_tolerance_too(engine):
    with pytest.raises(AssertionError, match="off by"):
        kit(engine, exact=False).test_steps_equal_a_plain_loop()


def test_every_rule_catches_something():
    rules = {name for name in dir(DataParallelConformance) if name.startswith("test_")}
    assert rules == {rule for _, rule, _ in CAUGHT}


def test_an_engine_that_is_right_passes_with_a_tolerance():
    kit(Zero1, exact=False).test_steps_equal_a_plain_loop()


def test_the_kit_wants_a_builder():
    with pytest.raises(TypeError, match="build"):
        DataParallelConformance()
