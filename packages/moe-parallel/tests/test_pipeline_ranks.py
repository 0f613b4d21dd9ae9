"""Pipelines over ranks: loss and gradients are those of one process, whatever the schedule and the layout."""

import os
import re
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_parallel import CollectiveError, MoeParallelError, ParallelLayout, all_reduce, run_distributed
from moe_parallel.pipeline import messages as messages_module
from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.layout import PipelineLayout
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.runtime import run_actions, run_forward
from moe_parallel.pipeline.schedule import Action, Pass
from moe_parallel.pipeline.schedules.table import SCHEDULES
from moe_parallel.pipeline.weight_work import WeightWork

pytestmark = pytest.mark.dist

# Shape suffixes: B rows, S tokens of a row, D features, V vocabulary.
VOCABULARY, FEATURES = 11, 6
EXACT = {"rtol": 1e-12, "atol": 1e-12}

CASES = [
    (name, pp, vpp) for name, schedule in SCHEDULES.items() for pp in (2, 4) for vpp in (1, 2, 3) if schedule.takes(vpp)
]


class Model(nn.Module):
    """Embedding, residual layers, and a head, which may be the embedding again."""

    def __init__(self, num_layers, tied=False):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, FEATURES, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(num_layers))
        self.head = self.embedding if tied else nn.Parameter(torch.randn_like(self.embedding))

    def segments(self, stage, losses):
        def embed(token_BS, target_BS):
            return F.embedding(token_BS, self.embedding)

        def layer(module):
            return lambda x_BSD, target_BS: x_BSD + torch.tanh(module(x_BSD))

        def loss(x_BSD, target_BS):
            logits_BSV = F.linear(x_BSD, self.head)
            value = F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten(), reduction="sum")
            losses.append(value.item())
            return value

        names = {id(parameter): name for name, parameter in self.named_parameters()}
        parts = [Segment("embedding", ("embedding",), embed)] if stage.has_embedding else []
        for number in stage.layers:
            module = self.layers[number]
            owned = (f"layers.{number}.weight", f"layers.{number}.bias")
            parts.append(Segment(f"layer {number}", owned, layer(module)))
        if stage.has_loss:
            # Tied, and both here: complete with the embedding, whose backward comes last.
            owned = () if stage.has_embedding and self.head is self.embedding else (names[id(self.head)],)
            parts.append(Segment("loss", owned, loss))
        return parts


def batch(lengths):
    """Token and target of each microbatch, of lengths that differ."""
    return [(torch.randint(VOCABULARY, (2, n)), torch.randint(VOCABULARY, (2, n))) for n in lengths]


def one_process(model, microbatches):
    """Losses of the microbatches and gradients of the sum of them, by name."""
    (stage,) = PipelineLayout.parse("E" + "t" * len(model.layers) + "L", pp=1).stages
    losses = []
    total = torch.zeros((), dtype=torch.float64)
    for token_BS, target_BS in microbatches:
        x = token_BS
        for segment in model.segments(stage, losses):
            x = segment.run(x, target_BS)
        total = total + x
    names, parameters = zip(*model.named_parameters(), strict=True)
    return losses, dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


class Logged:
    """A chunk whose passes are written down."""

    def __init__(self, chunk, number, log):
        self.chunk, self.number, self.log = chunk, number, log
        self.blank = chunk.blank

    def forward(self, microbatch, x):
        self.log.append(Action(Pass.FORWARD, microbatch, self.number))
        return self.chunk.forward(microbatch, x)

    def backward(self, microbatch, gradient, report):
        self.log.append(Action(Pass.BACKWARD, microbatch, self.number))
        return self.chunk.backward(microbatch, gradient, report)

    def backward_input(self, microbatch, gradient, report):
        self.log.append(Action(Pass.INPUT, microbatch, self.number))
        return self.chunk.backward_input(microbatch, gradient, report)

    def backward_weight(self, microbatch, report):
        self.log.append(Action(Pass.WEIGHT, microbatch, self.number))
        return self.chunk.backward_weight(microbatch, report)


def chunks_of(model, layout, rank, microbatches, losses, splits_backward):
    """The chunks of a rank; a parameter of several of them is reported by the first, whose backward comes last."""
    chunks, seen = [], set()
    for stage in layout.on_rank(rank):

        def begin(number, stage=stage):
            token_BS, target_BS = microbatches[number]
            like = torch.empty(*token_BS.shape, FEATURES, dtype=torch.float64)
            return token_BS if stage.has_embedding else like, target_BS

        parts = []
        for segment in model.segments(stage, losses):
            names = tuple(name for name in segment.parameters if name not in seen)
            parts.append(Segment(segment.name, names, segment.run))
            seen.update(names)
        work = WeightWork(dict(model.named_parameters())) if splits_backward else None
        chunks.append(SegmentedChunk(parts, begin, ends=stage.has_loss, weight_work=work))
    return chunks, seen


def count_bytes():
    """A list that gets the bytes of every message that this process sends from now on."""
    sizes, send = [], messages_module.send

    def counted(x, group, to):
        sizes.append(x.numel() * x.element_size())
        return send(x, group, to)

    messages_module.send = counted  # in a forked rank, which ends with the test
    return sizes


def check_steps(name, layout, model, steps, shared=()):
    """Run a step for each list of lengths over forked ranks, and compare everything that can be."""
    schedule, places = SCHEDULES[name], layout.places
    wanted = [(microbatches := batch(lengths), *one_process(model, microbatches)) for lengths in steps]
    crossing = sum(places.rank_of(n) != places.rank_of(n + 1) for n in range(places.num_stages - 1))

    def on_rank(mesh):
        rank, sent = mesh.rank("pp"), count_bytes()
        sums = []
        for microbatches, _, want in wanted:
            losses, log, complete = [], [], []
            chunks, names = chunks_of(model, layout, rank, microbatches, losses, schedule.splits_backward)
            model.zero_grad()

            def grads_ready(reported, *, last, complete=complete, want=want):
                parameters = dict(model.named_parameters())
                for parameter in reported if last else ():
                    complete.append(parameter)
                    if parameter not in shared:
                        torch.testing.assert_close(parameters[parameter].grad, want[parameter], **EXACT)

            actions = schedule.order(layout.pp, rank, len(microbatches), layout.vpp)
            messages = Messages(places, rank, there=mesh.group("pp"), back=mesh.group("pp_back"))
            logged = [Logged(chunk, number, log) for number, chunk in enumerate(chunks)]
            run_actions(actions, logged, grads_ready, messages)
            assert tuple(log) == actions
            assert Counter(complete) == Counter(names), "complete once, and all of this rank"
            for parameter, tensor in model.named_parameters():
                if parameter in shared and mesh.group("pp_embedding") is not None:
                    tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                    all_reduce(tensor.grad, mesh.group("pp_embedding")).wait()
                if parameter in names:
                    torch.testing.assert_close(tensor.grad, want[parameter], **EXACT)
                else:
                    assert tensor.grad is None, f"{parameter} is on another rank"
            sums.append((losses, sum(sent)))
            sent.clear()
        return sums

    holders = sorted({places.rank_of(0), places.rank_of(places.num_stages - 1)})
    world = ParallelLayout(world=layout.pp, pp=layout.pp)
    found = run_distributed(world, on_rank, timeout_s=20, shared={"pp_embedding": holders})
    for number, (microbatches, want, _) in enumerate(wanted):
        for rank, sums in enumerate(found):
            here = sums[number][0]
            if rank == places.rank_of(places.num_stages - 1):
                torch.testing.assert_close(torch.tensor(sorted(here)), torch.tensor(sorted(want)), **EXACT)
            else:
                assert here == []
        tokens = sum(token_BS.numel() for token_BS, _ in microbatches)
        expected = 2 * crossing * tokens * FEATURES * 8
        assert sum(sums[number][1] for sums in found) == expected > 0


@pytest.mark.parametrize(("name", "pp", "vpp"), CASES)
def test_loss_and_gradients_are_those_of_one_process(name, pp, vpp):
    """Three steps of 3, 1 and 8 microbatches, whose lengths change within a step and from one to the next."""
    stages = ["Et", *["t"] * (pp * vpp - 2), "tL"]
    layout = PipelineLayout.parse("|".join(stages), pp=pp, placement=SCHEDULES[name].placement)
    steps = [[5, 1, 7], [4], [3, 2, 6, 1, 4, 2, 2, 5]]
    check_steps(name, layout, Model(pp * vpp), steps)


@pytest.mark.parametrize(
    ("name", "vpp"), [("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_v", 2)]
)
def test_a_parameter_of_the_first_and_the_last_stage(name, vpp):
    """The embedding is the head: summed over its holders, which of a V are one rank."""
    layout = PipelineLayout.parse(
        "|".join(["Et", *["t"] * (3 * vpp - 2), "L"]), pp=3, placement=SCHEDULES[name].placement
    )
    model = Model(3 * vpp - 1, tied=True)
    check_steps(name, layout, model, [[3, 1, 4, 2], [2]], shared=("embedding",) if name != "zero_bubble_v" else ())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].takes(2)])
def test_stages_that_hold_nothing(name):
    """They pass on what they get, there and back."""
    layout = PipelineLayout.parse("E||t||tt|L", pp=3, placement=SCHEDULES[name].placement)
    check_steps(name, layout, Model(3), [[3, 1, 2], [2]])


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble_v"])
def test_a_forward_alone_goes_through_all_stages(name):
    """Evaluation: the output is on the rank of the last stage, and nothing is kept."""
    layout = PipelineLayout.parse("Et||t|L", pp=2, placement=SCHEDULES[name].placement)
    model = Model(2)
    microbatches = batch([3])
    (want,), _ = one_process(model, microbatches)

    def on_rank(mesh):
        chunks, _ = chunks_of(model, layout, mesh.rank("pp"), microbatches, [], splits_backward=False)
        messages = Messages(layout.places, mesh.rank("pp"), there=mesh.group("pp"), back=mesh.group("pp_back"))
        with torch.no_grad():
            found = run_forward(chunks, messages)
            again = run_forward(chunks, messages)
        for chunk in chunks:
            with pytest.raises(KeyError):
                chunk.backward(0, None, lambda names: None)
        assert (found is None) == (again is None)
        return found if found is None else (found.item(), again.item())

    found = run_distributed(ParallelLayout(world=2, pp=2), on_rank)
    last = layout.places.rank_of(3)
    assert found[1 - last] is None
    assert found[last] == (pytest.approx(want, rel=1e-13),) * 2


def failing(at, name="one_f_one_b", **limits):
    """A pipeline of three ranks, of which the second calls `at` in its second backward."""
    layout = PipelineLayout.parse("Et|t|tL", pp=3)
    model, microbatches = Model(3), batch([3] * 4)
    schedule = SCHEDULES[name]

    class Failing(Logged):
        def backward(self, microbatch, gradient, report):
            if microbatch == 1:
                at()
            return super().backward(microbatch, gradient, report)

    def on_rank(mesh):
        rank = mesh.rank("pp")
        chunks, _ = chunks_of(model, layout, rank, microbatches, [], splits_backward=False)
        kind = Failing if rank == 1 else Logged
        messages = Messages(layout.places, rank, there=mesh.group("pp"), back=mesh.group("pp_back"))
        run_actions(schedule.order(3, rank, 4, 1), [kind(chunks[0], 0, [])], lambda names, *, last: None, messages)

    run_distributed(ParallelLayout(world=3, pp=3), on_rank, **limits)


def test_a_rank_that_dies_ends_the_others_with_the_name_of_the_group():
    with pytest.raises(MoeParallelError, match=r"^rank 1 died with exit code 7; ") as error:
        failing(lambda: os._exit(7), timeout_s=10)
    assert re.search(r"rank 0: (receive|send) in group pp(_back)? of ranks 0, 1, 2 failed after", str(error.value))


def test_an_error_of_a_rank_is_the_one_that_is_raised():
    def fails():
        raise ZeroDivisionError("of this rank")

    with pytest.raises(ZeroDivisionError, match="of this rank") as error:
        failing(fails, timeout_s=10)
    assert "raised on rank 1" in error.value.__notes__[0]


def test_a_rank_that_does_not_come_in_time_is_noticed():
    with pytest.raises(CollectiveError, match=r"rank [02]: (receive|send) in group pp.* of ranks 0, 1, 2 failed"):
        failing(lambda: time.sleep(60), timeout_s=2)
