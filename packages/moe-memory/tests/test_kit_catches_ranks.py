"""R128: the kit for several ranks fails engines that are wrong in one place each."""

from dataclasses import replace

import pytest
import torch

from moe_memory import Zero1
from moe_memory.testing import RanksConformance
from moe_parallel import Box, ParallelLayout, all_reduce

pytestmark = pytest.mark.dist


class Regrouped:
    """The groups of another engine's imagination; a fault of one axis at a time."""

    def __init__(self, groups, **replaced):
        self._groups, self._replaced = groups, replaced

    def size(self, *axes):
        return self._groups.size(*axes)

    def rank(self, *axes):
        return self._groups.rank(*axes)

    def coordinates(self):
        return self._groups.coordinates()

    def group(self, *axes):
        return self._replaced.get("_".join(axes), lambda groups: groups.group(*axes))(self._groups)


class AveragesOverRanks(Zero1):
    def finish(self):
        super().finish()
        for bucket in self._buckets:
            bucket.reduced.div_(bucket.ranks)


class AveragesExperts(Zero1):
    """The expert-parallel mistake: experts divided by the number of all ranks, which their tokens come from."""

    def finish(self):
        super().finish()
        for bucket in self._buckets:
            if bucket.key.kind.value == "expert":
                bucket.reduced.div_(self._groups.size("world"))


class ForgetsTheReplicasOfExperts(Zero1):
    def __init__(self, config, groups, **options):
        super().__init__(config, Regrouped(groups, edp=lambda groups: None), **options)


class ForgetsTheReplicasOfDense(Zero1):
    def __init__(self, config, groups, **options):
        super().__init__(config, Regrouped(groups, cp_dp=lambda groups: None), **options)


class SumsExpertsLikeDense(Zero1):
    def __init__(self, config, groups, **options):
        super().__init__(config, Regrouped(groups, edp=lambda groups: groups.group("cp", "dp")), **options)


class KeepsItsOwnGradients(Zero1):
    """Takes its section of the gradients before they are summed."""

    def finish(self):
        super().finish()
        for bucket in self._buckets:
            for name in bucket.names if bucket.ranks > 1 else ():
                box = bucket.box(name)
                if box is not None:
                    index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                    bucket.part([bucket.reduced], name).copy_(bucket._grad_views[name][index])


class ReducesInLowPrecision(Zero1):
    def finish(self):
        super().finish()
        for bucket in self._buckets:
            bucket.reduced.copy_(bucket.reduced.bfloat16())


class ReducesBeforeTheLastMicrobatch(Zero1):
    """The reduction starts with the first report, and what comes later is lost."""

    def grads_ready(self, names, *, last):
        super().grads_ready(names, last=last)
        for bucket in {id(b): b for b in map(self._store_of.__getitem__, names)}.values():
            if bucket._reduction is None:
                bucket.start_reduction()
                bucket.start_reduction = lambda: None

    def finish(self):
        super().finish()
        for bucket in self._buckets:
            del bucket.start_reduction


class NeverGathers(Zero1):
    def step(self, learning_rate, gradient_factor):
        super().step(learning_rate, gradient_factor)
        self._drop_gathers()

    def _drop_gathers(self):
        for bucket in self._buckets:
            if bucket._gather is not None:
                bucket._gather.wait()
                bucket._gather = None


class NeverGathersAtTheStart(NeverGathers):
    def wrap(self, model, specs):
        model = super().wrap(model, specs)
        self._drop_gathers()
        return model

    step = Zero1.step


class NeverGathersAfterLoading(NeverGathers):
    def load_finished(self, values):
        super().load_finished(values)
        self._drop_gathers()

    step = Zero1.step


class NeverWaitsForWeights(Zero1):
    """Modules compute with what is there: one step late."""

    def step(self, learning_rate, gradient_factor):
        self.synchronize()
        super().step(learning_rate, gradient_factor)

    def wrap(self, model, specs):
        model = super().wrap(model, specs)
        for module in model.modules():
            module._forward_pre_hooks.clear()
        return model


class CountsReplicasInTheNorm(Zero1):
    def norm_parts(self, order):
        return {kind: part * self._groups.size("world") for kind, part in super().norm_parts(order).items()}


class CountsExpertReplicasInTheNorm(Zero1):
    def norm_parts(self, order):
        parts = super().norm_parts(order)
        return parts | {"expert": parts["expert"] * self._groups.size("edp")}


class NormOfTheFirstRank(Zero1):
    def norm_parts(self, order):
        return {k: part * (self._groups.rank("world") == 0) for k, part in super().norm_parts(order).items()}


class NumbersExpertsFromZero(Zero1):
    """R095: every rank of `ep` saves its experts as the first ones."""

    def state_tensors(self):
        for part in super().state_tensors():
            if ".experts." in part.name:
                first = part.box.offset[0] % (part.global_shape[0] // self._groups.size("ep"))
                yield replace(part, box=Box((first, *part.box.offset[1:]), part.box.shape))
            else:
                yield part


class SavesScalarsOnEveryRank(Zero1):
    def state_tensors(self):
        yield from super().state_tensors()
        if self._groups.rank("world"):
            for slot in ("master", "exp_avg", "exp_avg_sq"):
                name, shape = f"{slot}/head.scale", ()
                part = next(super().state_tensors())
                yield replace(part, name=name, global_shape=shape, box=Box.whole(shape), tensor=torch.zeros(shape))


class LosesTheExpertsMoments(Zero1):
    """R097: two optimizers, one of which is not restored."""

    def load_finished(self, values):
        super().load_finished(values)
        for part in self.state_tensors():
            if part.name.startswith("exp_avg/") and ".experts." in part.name:
                part.tensor.zero_()


class CountsUpdatesPerRank(Zero1):
    """R098: what differs between ranks is no common state."""

    def state_values(self):
        return {"updates": super().state_values()["updates"] + self._groups.rank("world")}


class SkipsOnOneRankOnly(Zero1):
    def skip(self):
        if self._groups.rank("world"):
            super().step(0.0, 0.0)
        else:
            super().skip()


class TalksEverySecondStep(Zero1):
    def step(self, learning_rate, gradient_factor):
        super().step(learning_rate, gradient_factor)
        if self.state_values()["updates"] % 2:
            all_reduce(torch.ones(1), self._groups.group("world")).wait()


class AcceptsAbsentGradients(Zero1):
    def grads_ready(self, names, *, last):
        for bucket in self._buckets:
            bucket.has_gradient = lambda name: True
        super().grads_ready(names, last=last)


def kit(engine):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return engine(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal, bucket_bytes=500)

    layout = (ParallelLayout(world=4, ep=2), 4)
    return type("Kit", (RanksConformance,), {"build": build, "layouts": (layout,), "small": (layout,)})()


STEPS = "test_ranks_agree_with_a_plain_loop"
LOW = "test_low_precision_differs_by_the_order_of_sums_only"
SKIP = "test_skip_on_all_ranks_leaves_everything_bit_for_bit"
MOVES = "test_state_moves_between_layouts_and_engines"
COLLECTIVES = "test_collectives_are_the_same_with_and_without_tokens"
START = "test_replicas_that_differ_start_as_one"
ABSENT = "test_an_absent_gradient_is_an_error_on_every_rank"

CAUGHT = [
    (AveragesOverRanks, STEPS, "step 1, gradients"),
    (AveragesOverRanks, LOW, "beyond its limit"),
    (AveragesExperts, STEPS, "experts.* is off by"),
    (ForgetsTheReplicasOfExperts, STEPS, "owned by 2 ranks"),
    (ForgetsTheReplicasOfDense, STEPS, "owned by 4 ranks"),
    (SumsExpertsLikeDense, STEPS, "owned by 0"),
    (KeepsItsOwnGradients, STEPS, "step 1, gradients"),
    (ReducesInLowPrecision, LOW, "beyond its limit"),
    (ReducesBeforeTheLastMicrobatch, STEPS, "step 1, gradients"),
    (NeverGathers, STEPS, "step 2, gradients"),
    (NeverGathersAtTheStart, START, "at the start"),
    (NeverGathersAfterLoading, MOVES, "stay 2"),
    (NeverWaitsForWeights, STEPS, "step 2, gradients"),
    (CountsReplicasInTheNorm, STEPS, "the norm on rank 0"),
    (CountsExpertReplicasInTheNorm, STEPS, "the norm on rank 0"),
    (NormOfTheFirstRank, STEPS, "the norm on rank 0"),
    (NumbersExpertsFromZero, STEPS, "owned by 0 and 2 ranks"),
    (SavesScalarsOnEveryRank, STEPS, "head.scale: elements are owned by 4 ranks"),
    (LosesTheExpertsMoments, MOVES, "stay 2.*experts"),
    (CountsUpdatesPerRank, MOVES, "state values differ"),
    (SkipsOnOneRankOnly, SKIP, "skip changed"),
    (TalksEverySecondStep, COLLECTIVES, "issued"),
    (AcceptsAbsentGradients, ABSENT, "accepted"),
]


@pytest.mark.parametrize(("engine", "rule", "message"), CAUGHT, ids=[f"{e.__name__}-{r}" for e, r, _ in CAUGHT])
def test_r128_a_fault_is_caught(engine, rule, message):
    with pytest.raises(AssertionError, match=message):
        getattr(kit(engine), rule)()


def test_every_rule_catches_something():
    rules = {name for name in dir(RanksConformance) if name.startswith("test_")}
    assert rules == {rule for _, rule, _ in CAUGHT}
