"""The expert bias of all layers as state: in checkpoints, and in what `moe-train verify` compares."""

from collections.abc import Iterator

from moe_memory.data_parallel import StateTensor
from moe_parallel import Box, Groups
from moe_train.models.spec import CausalModel


def bias_tensors(model: CausalModel, groups: Groups) -> Iterator[StateTensor]:
    """`bias/<layer>` of every layer that has an expert bias, as live storage.

    Every rank of a stage of the pipeline holds the same bias, and the first of them owns it.
    """
    owned = groups.rank("tp", "cp", "dp") == 0
    for router in model.routers():
        if router.bias_E is not None:
            shape = tuple(router.bias_E.shape)
            yield StateTensor(
                name=f"bias/{router.name}", global_shape=shape, box=Box.whole(shape), tensor=router.bias_E, owned=owned
            )
