"""run_actions: executes a schedule and says when gradients are complete."""

from collections import Counter

import pytest
import torch

from moe_parallel import MoeParallelError
from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.runtime import run_actions
from moe_parallel.pipeline.schedule import Action, Pass, one_by_one

F, B = Pass.FORWARD, Pass.BACKWARD


class RecordingChunk:
    """Two layers, of which the second is reported first."""

    def __init__(self, number, log):
        self.number, self.log = number, log

    def blank(self, microbatch, gradient):
        raise AssertionError("nothing comes from another rank")

    def forward(self, microbatch, x):
        assert (x is None) == (self.number == 0)
        self.log.append(f"F{microbatch}.{self.number}")
        return torch.tensor(float(self.number))

    def backward(self, microbatch, gradient, report):
        self.log.append(f"B{microbatch}.{self.number}")
        for layer in (1, 0):
            report((f"chunk {self.number} layer {layer}",))
        return torch.tensor(-float(self.number))


SCHEDULES = {
    "one by one": (one_by_one(4), 1),
    "all forwards first": ([*(Action(F, n) for n in range(3)), *(Action(B, n) for n in (2, 0, 1))], 1),
    "two chunks": (
        [Action(F, n, c) for c in (0, 1) for n in (0, 1)] + [Action(B, n, c) for c in (1, 0) for n in (1, 0)],
        2,
    ),
    "nothing": ((), 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_actions_run_in_order_and_each_parameter_is_complete_once(name):
    actions, chunks = SCHEDULES[name]
    log, complete = [], []

    def grads_ready(names, *, last):
        log.append((*names, last))
        complete.extend(name for name in names if last)

    run_actions(actions, [RecordingChunk(number, log) for number in range(chunks)], grads_ready)
    passes = [entry for entry in log if isinstance(entry, str)]
    assert passes == [f"{action.what.value}{action.microbatch}.{action.chunk}" for action in actions]
    layers = {f"chunk {c} layer {n}" for c in range(chunks) for n in (0, 1)} if actions else set()
    assert Counter(complete) == Counter(layers)
    for place, entry in enumerate(log):
        if isinstance(entry, tuple):
            chunk = entry[0].split()[1]
            later = [other for other in log[place:] if isinstance(other, str) and other[0] == "B"]
            assert entry[1] is not any(other.endswith(f".{chunk}") for other in later), "last, if no backward follows"
    for chunk in range(chunks if actions else 0):
        mine = [name for name in complete if name.startswith(f"chunk {chunk}")]
        assert mine == [f"chunk {chunk} layer 1", f"chunk {chunk} layer 0"], "layer by layer from the back"


def test_a_list_that_is_no_schedule_runs_nothing():
    log = []
    with pytest.raises(MoeParallelError, match="lacks B1"):
        run_actions([*one_by_one(1), Action(F, 1)], [RecordingChunk(0, log)], lambda names, *, last: None)
    assert log == []


def test_gradients_of_a_real_chunk_are_complete_when_they_are_said_to_be():
    """Weights w_n of a product; the gradient of the sum over microbatches is known in closed form."""
    weights = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, 3.0, 5.0)]
    inputs = torch.randn(4, dtype=torch.float64).tolist()

    def times(number):
        return Segment(f"times {number}", (f"w{number}",), lambda x, context: x * weights[number])

    chunk = SegmentedChunk([times(n) for n in range(3)], lambda n: (torch.tensor(inputs[n], dtype=torch.float64), None))
    complete = {}

    def grads_ready(names, *, last):
        for name in names:
            if last:
                assert name not in complete
                complete[name] = weights[int(name[1])].grad.item()

    run_actions(one_by_one(4), [chunk], grads_ready)
    assert list(complete) == ["w2", "w1", "w0"]
    for name, factor in (("w0", 15.0), ("w1", 10.0), ("w2", 6.0)):
        assert complete[name] == pytest.approx(factor * sum(inputs), rel=1e-14)
