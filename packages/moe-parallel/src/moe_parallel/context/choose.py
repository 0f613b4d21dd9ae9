"""`context_attention`: the attention core of a kind, by its name in the configuration."""

from torch.distributed import ProcessGroup

from moe_parallel.context.core import ContextAttention
from moe_parallel.context.gather import GatherAttention
from moe_parallel.context.hierarchical import HierarchicalAttention
from moe_parallel.context.ring import RingAttention
from moe_parallel.context.rules import KINDS
from moe_parallel.context.ulysses import AllToAllAttention
from moe_parallel.errors import MoeParallelError


def context_attention(
    kind: str, *, inner: ProcessGroup | None = None, outer: ProcessGroup | None = None
) -> ContextAttention:
    """The core for `ring`, `all_to_all`, `gather` or `hierarchical`; all take their group from the split of the rows.

    Args:
        inner: of `hierarchical` alone, and so is outer: the groups of the axes `cp_inner` and `cp_outer` of a mesh.

    Raises:
        MoeParallelError: there is no such kind, or groups are missing or not wanted.
    """
    if kind not in KINDS:
        raise MoeParallelError(f"no kind of context parallelism is called {kind!r}; legal here: {', '.join(KINDS)}")
    if kind == "hierarchical":
        if inner is None or outer is None:
            raise MoeParallelError(
                "hierarchical context parallelism needs an inner and an outer group (cp_inner, cp_outer)"
            )
        return HierarchicalAttention(inner, outer)
    if inner is not None or outer is not None:
        raise MoeParallelError(f"{kind} context parallelism has no inner and outer group; only hierarchical has")
    cores: dict[str, type[ContextAttention]] = {
        "ring": RingAttention,
        "all_to_all": AllToAllAttention,
        "gather": GatherAttention,
    }
    return cores[kind]()
