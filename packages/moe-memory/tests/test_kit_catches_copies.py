"""R128: the kit fails engines that are wrong where ranks of `tp` or `etp` hold copies or parts of a parameter."""

from dataclasses import replace

import pytest
import torch

from moe_memory import Zero1
from moe_memory.data_parallel.partial import sum_partial
from moe_memory.testing import RanksConformance
from moe_parallel import Box, ParallelLayout

pytestmark = pytest.mark.dist


class OtherSums(Zero1):
    """Sums gradients over other axes than the specs say."""

    def wrap(self, model, specs):
        return super().wrap(
            model, {name: replace(spec, grad_sum_axes=self.sum_axes(spec)) for name, spec in specs.items()}
        )


class ForgetsTheSumOverTp(OtherSums):
    """R034: what has seen a part of the tokens is taken for the whole."""

    def sum_axes(self, spec):
        return () if spec.kind.value == "dense" else spec.grad_sum_axes


class ForgetsTheSumOverEtp(OtherSums):
    def sum_axes(self, spec):
        return () if spec.kind.value == "expert" else spec.grad_sum_axes


class SumsEveryCopy(OtherSums):
    def sum_axes(self, spec):
        return ("tp",) if spec.name.startswith("gate") else spec.grad_sum_axes


class AveragesCopies(Zero1):
    def finish(self):
        super().finish()
        for bucket in self._buckets:
            if bucket.key.sum_axes:
                bucket.reduced.div_(self._groups.size(*bucket.key.sum_axes))


class SumsInTheComputeDtype(Zero1):
    """R069: the sum over `tp` is of what the model computes with."""

    def finish(self):
        self._order.finish()
        for bucket in self._buckets:
            bucket.finish_reduction()
        low = [bucket.reduced.to(bucket.key.compute_dtype) for bucket in self._buckets]
        axes = [bucket.key.sum_axes for bucket in self._buckets]
        sum_partial(zip(low, axes, strict=True), self._groups, limit_bytes=500)
        for bucket, total, summed in zip(self._buckets, low, axes, strict=True):
            if summed:
                bucket.reduced.copy_(total)


class CountsEveryCopyInTheNorm(Zero1):
    def norm_parts(self, order):
        for bucket in self._buckets:
            bucket.key = replace(bucket.key, counted=True)
        return super().norm_parts(order)


class CountsNoCopyInTheNorm(Zero1):
    def norm_parts(self, order):
        for bucket in self._buckets:
            bucket.key = replace(bucket.key, counted=not bucket.key.copy_axes)
        return super().norm_parts(order)


class OwnsEveryCopy(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            yield replace(part, owned=True)


class OwnsEveryCopyOfGradients(Zero1):
    def gradient_tensors(self):
        for part in super().gradient_tensors():
            yield replace(part, owned=True)


class OwnsNoCopy(Zero1):
    def state_tensors(self):
        for part in super().state_tensors():
            yield replace(part, owned=not self._keys[part.name.partition("/")[2]].copy_axes)


class HidesCopies(Zero1):
    """What this rank does not own cannot be loaded."""

    def state_tensors(self):
        return (part for part in super().state_tensors() if part.owned)


class Drifts(Zero1):
    """R034: by a unit in the last place."""

    def step(self, learning_rate, gradient_factor):
        super().step(learning_rate, gradient_factor)
        for bucket in self._buckets:
            if not bucket.key.counted:
                bucket.master.copy_(torch.nextafter(bucket.master, torch.zeros_like(bucket.master)))


class DriftsInWeightsOnly(Zero1):
    """R034: a router that differs by one bit sends a token elsewhere."""

    def synchronize(self):
        super().synchronize()
        for bucket in self._buckets:
            if not bucket.key.counted:
                bucket.compute.copy_(torch.nextafter(bucket.compute, torch.zeros_like(bucket.compute)))


class NumbersFeaturesFromZero(Zero1):
    """R095: every rank saves its part as the first."""

    def state_tensors(self):
        for part in super().state_tensors():
            offset = (part.box.offset[0], 0) if part.name.endswith("up_DF") else part.box.offset
            yield replace(part, box=Box(offset, part.box.shape))


def kit(engine):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return engine(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, bucket_bytes=500)

    layout = (ParallelLayout(world=2, tp=2, etp=2), 4)
    return type("Kit", (RanksConformance,), {"build": build, "layouts": (layout,), "small": (layout,)})()


STEPS = "test_ranks_agree_with_a_plain_loop"
LOW = "test_low_precision_differs_by_the_order_of_sums_only"
MOVES = "test_state_moves_between_layouts_and_engines"

CAUGHT = [
    (ForgetsTheSumOverTp, STEPS, "step 1, gradients: .*: the copy on rank 1 differs"),
    (ForgetsTheSumOverEtp, STEPS, "step 1, gradients: .*experts.*: the copy on rank 1 differs"),
    (SumsEveryCopy, STEPS, "step 1, gradients: gate.* is off by"),
    (AveragesCopies, STEPS, "step 1, gradients: .* is off by"),
    (SumsInTheComputeDtype, LOW, "beyond its limit"),
    (CountsEveryCopyInTheNorm, STEPS, "the norm on rank 0"),
    (CountsNoCopyInTheNorm, STEPS, "the norm on rank 0"),
    (OwnsEveryCopy, STEPS, "step 1, state: .*: elements are owned by 2 ranks"),
    (OwnsEveryCopyOfGradients, STEPS, "step 1, gradients: .*: elements are owned by 2 ranks"),
    (OwnsNoCopy, STEPS, "step 1, state: .*: elements are owned by 0 ranks"),
    (HidesCopies, MOVES, "stay 2"),
    (Drifts, STEPS, "step 1, state: .*: the copy on rank 1 differs"),
    (DriftsInWeightsOnly, STEPS, "weights: .* differs between the ranks 0 and 1"),
    (NumbersFeaturesFromZero, STEPS, "columns.up_DF: elements are owned by 0 and 2 ranks"),
]


@pytest.mark.parametrize(("engine", "rule", "message"), CAUGHT, ids=[f"{e.__name__}-{r}" for e, r, _ in CAUGHT])
def test_r128_a_fault_is_caught(engine, rule, message):
    with pytest.raises(AssertionError, match=message):
        getattr(kit(engine), rule)()
