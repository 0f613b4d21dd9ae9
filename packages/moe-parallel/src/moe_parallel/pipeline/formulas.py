"""Closed formulas for the bubble of schedules, which the simulation is measured against.

p ranks, m microbatches, v chunks of a rank; F, I, W and B are the times of the passes of one chunk, and messages take
none. The bubble is idle / (idle + busy) over the whole span (`Simulation.bubble`).
"""

from collections.abc import Callable

from moe_parallel.pipeline.schedule import Pass
from moe_parallel.pipeline.schedules.table import SCHEDULES
from moe_parallel.pipeline.simulate import Durations

# (p, m, v, durations) to idle time of a rank, or None where the formula does not hold.
_Idle = Callable[[int, int, int, Durations], float | None]


def bubble_formula(
    name: str, *, pp: int, num_microbatches: int, vpp: int = 1, durations: Durations | None = None
) -> float | None:
    """The bubble of a schedule of `SCHEDULES`; None where there is no formula for these numbers.

    gpipe, one_f_one_b, interleaved: (p - 1) / (m v + p - 1) for m >= p, whatever the passes take. With fewer
    microbatches than ranks, (v (p - m) + m - 1) / (v p + m - 1): each waits for the first to come round.

    zero_bubble, interleaved_zero_bubble: idle (p - 1) (F + I - W), for m >= p and W up to the smaller of F and I.

    zero_bubble_v: idle p - 1 passes, for m >= 2 p - 1 and F = I = W; all of it before a rank begins or after it ended.
    """
    durations = durations or Durations()
    if durations.message:
        return None
    idle = _IDLE[name](pp, num_microbatches, vpp, durations)
    if idle is None:
        return None
    passes = (
        (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT) if SCHEDULES[name].splits_backward else (Pass.FORWARD, Pass.BACKWARD)
    )
    busy = num_microbatches * vpp * sum(map(durations.of, passes))
    return idle / (idle + busy)


def _whole(p: int, m: int, v: int, durations: Durations) -> float:
    return (v * max(0, p - m) + min(p, m) - 1) * (durations.forward + durations.of(Pass.BACKWARD))


def _split(p: int, m: int, v: int, durations: Durations) -> float | None:
    del v
    if m < p or durations.weight > min(durations.forward, durations.input):
        return None
    return (p - 1) * (durations.forward + durations.input - durations.weight)


def _v_shaped(p: int, m: int, v: int, durations: Durations) -> float | None:
    del v
    if m < 2 * p - 1 or not durations.forward == durations.input == durations.weight:
        return None
    return (p - 1) * durations.forward


_IDLE: dict[str, _Idle] = {
    "gpipe": _whole,
    "one_f_one_b": _whole,
    "interleaved": _whole,
    "zero_bubble": _split,
    "interleaved_zero_bubble": _split,
    "zero_bubble_v": _v_shaped,
}
