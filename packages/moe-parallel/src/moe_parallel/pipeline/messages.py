"""`Messages`: outputs and gradients between stages of a pipeline, to other ranks or to another chunk of this one."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel.pending import Pending
from moe_parallel.pipeline.order import Output, receiver
from moe_parallel.pipeline.placement import Placement
from moe_parallel.point_to_point import receive, send


class Messages:
    """Ordered messages without labels: between two ranks outputs are needed in the order in which they are sent, and so
    are gradients (`moe_parallel.pipeline.order.check_ranks`), each in a group of their own.

    On NCCL a group is one queue for every two ranks, in which each would wait for the other if both sent to each other.
    So what goes the other way, from rank to rank, has a group of its own as well. That occurs on two ranks with several
    stages each, and in a V. It also connects two ranks in their first message, in which each waits for the other, so
    that all connections are to be made before the first step (`connect`).

    Args:
        places: where the stages are.
        rank: of this rank in the pipeline.
        there: the ranks of the pipeline in order, for outputs; None where there is one.
        back: the same ranks, for gradients.
        there_down: the same, for outputs that go to an earlier rank; `there` unless given, which suffices for gloo.
        back_up: the same, for gradients that go to a later rank; `back` unless given.
    """

    def __init__(
        self,
        places: Placement,
        rank: int = 0,
        *,
        there: ProcessGroup | None = None,
        back: ProcessGroup | None = None,
        there_down: ProcessGroup | None = None,
        back_up: ProcessGroup | None = None,
    ) -> None:
        self.places = places
        self.rank = rank
        # Whether it is for gradients, and whether these go to a later rank.
        self._groups = {
            (False, True): there,
            (False, False): there_down or there,
            (True, False): back,
            (True, True): back_up or back,
        }
        self._here: dict[Output, Tensor] = {}
        self._coming: dict[Output, Pending[Tensor]] = {}
        self._leaving: list[Pending[Tensor]] = []

    def connect(self, device: torch.device) -> None:
        """Send a message along every way, before anything else is sent. Collective over the ranks of the pipeline.

        Args:
            device: of what will be sent.
        """
        for stage in range(self.places.num_stages - 1):
            # In one order on all ranks, so that of all ways that are not made yet both ends of the first come to it.
            for output in (Output(False, 0, stage), Output(True, 0, stage + 1)):
                source, to = self.places.rank_of(output.stage), receiver(output, self.places)
                if source == to:
                    continue
                if self.rank == source:
                    self.give(output, torch.zeros(1, device=device))
                elif self.rank == to:
                    self.expect(output, torch.zeros(1, device=device))
                    self.take(output)
        self.close()

    def comes_from_afar(self, need: Output) -> bool:
        """Whether another rank makes it."""
        return self.places.rank_of(need.stage) != self.rank

    def expect(self, need: Output, into: Tensor) -> None:
        """Begin to receive what another rank makes; in the order in which it is needed."""
        if need not in self._coming:
            self._coming[need] = receive(into, self._group(need), self.places.rank_of(need.stage))

    def take(self, need: Output) -> Tensor:
        """What was expected, or what another chunk of this rank has made."""
        return self._coming.pop(need).wait() if need in self._coming else self._here.pop(need)

    def give(self, output: Output, value: Tensor) -> None:
        """Send it to who needs it; it must not be changed from now on."""
        to = receiver(output, self.places)
        if to == self.rank:
            self._here[output] = value
            return
        self._leaving = [pending for pending in self._leaving if not pending.done()]
        self._leaving.append(send(value, self._group(output), to))

    def close(self) -> None:
        """Wait until everything has left."""
        for pending in self._leaving:
            pending.wait()
        self._leaving.clear()

    def _group(self, output: Output) -> ProcessGroup:
        goes_up = receiver(output, self.places) > self.places.rank_of(output.stage)
        group = self._groups[output.gradient, goes_up]
        assert group is not None, "another rank has a stage, so there is a group"
        return group
