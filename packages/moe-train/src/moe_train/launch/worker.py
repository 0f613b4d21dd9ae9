"""One rank of a run: joins the others, and tells the launcher what went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from moe_parallel import (
    AxisGroups,
    CollectiveError,
    FoldedMesh,
    Groups,
    ParallelLayout,
    Place,
    Topology,
    joined,
    machines,
)
from moe_parallel.errors import described
from moe_train.assemble import choose_device
from moe_train.config.checks import layout_of, mesh_of, topology_of
from moe_train.config.tree import TrainConfig


@contextmanager
def rank_groups(config: TrainConfig) -> Iterator[tuple[Groups, Topology]]:
    """The groups of this rank and the machines of all, as launcher and `parallel` say; one rank without a launcher.

    What ends the body is recorded for the launcher, and an error names the rank and its coordinates.
    """
    place = Place.from_environment()
    if place.world == 1:
        yield AxisGroups(), topology_of(config, 1)
        return
    layout, timeout_s = layout_of(config, place.world), config.parallel.timeout_s
    try:
        device = choose_device(config.train.device)
        with joined(place, device=device, timeout_s=timeout_s):
            known = config.parallel.ranks_per_node is not None
            topology = topology_of(config, place.world) if known else machines(nvlink=device.type == "cuda")
            yield FoldedMesh(layout, timeout_s=timeout_s, **mesh_of(config, layout, topology)), topology
    except Exception as error:
        error.add_note(f"on {layout.words_for(place.rank)}")
        _record(error, layout)
        raise


def _record(error: Exception, layout: ParallelLayout) -> None:
    """Leave what failed first, as far as this rank knows, where torch's launcher looks for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, CollectiveError) and error.cause is not None:
        # This rank may have ended before the one that is the cause, of which the launcher then learns nothing.
        rank, said = error.cause
        name, _, text = said.partition(": ")
        error = _stand_in(name, text)
        error.add_note(f"on {layout.words_for(rank)}")
    # Notes are not recorded.
    get_error_handler().record_exception(_stand_in(type(error).__name__, described(error)))


def _stand_in(name: str, text: str) -> Exception:
    """An error that is told as one of this name would be."""
    found: Exception = type(name, (Exception,), {})(text)
    return found
