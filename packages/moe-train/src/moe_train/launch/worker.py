"""One rank of a run: joins the others, and tells the launcher what went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from moe_parallel import AxisGroups, FoldedMesh, Groups, Place, joined
from moe_train.assemble import choose_device
from moe_train.config.checks import layout_of, mesh_of
from moe_train.config.tree import TrainConfig


@contextmanager
def rank_groups(config: TrainConfig) -> Iterator[Groups]:
    """The groups of this rank, as the launcher and `parallel` say; a world of one without a launcher.

    What ends the body is recorded for the launcher, and an error names the rank and its coordinates.
    """
    place = Place.from_environment()
    if place.world == 1:
        yield AxisGroups()
        return
    layout, timeout_s = layout_of(config, place.world), config.parallel.timeout_s
    try:
        with joined(place, device=choose_device(config.train.device), timeout_s=timeout_s):
            yield FoldedMesh(layout, timeout_s=timeout_s, **mesh_of(config, layout))
    except Exception as error:
        error.add_note(f"on {layout.words_for(place.rank)}")
        _record(error)
        raise


def _record(error: Exception) -> None:
    """Leave the error where torch's launcher looks for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # Notes are not recorded, so that a stand-in of the same name says them.
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    get_error_handler().record_exception(type(type(error).__name__, (Exception,), {})(text))
