"""`SequenceInfo`: what a layer may know of the batch. Layers learn nothing about the batch from anywhere else.

What is derived from it once for all layers is kept beside it as long as it lives, by `once_per_microbatch`.

Shape legend: B sequences (rows) here, S token slots per row on this rank, C ranks that share a row, R = C*S slots of
the whole row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextSplit:
    """How the rows of a microbatch are spread over the ranks of a context-parallel group; the same on all of them.

    Attributes:
        group: the ranks that share every row.
        slot_CBS: int64, for each rank in the order of the group the slots of the whole row that it holds, ascending.
            Every slot of a row is held by one rank, and every rank holds equally many.
        document_BR: int64 document number of every slot of the whole rows; None where a row is one document.
    """

    group: "ProcessGroup"
    slot_CBS: "Tensor"
    document_BR: "Tensor | None" = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceInfo:
    """Positions, documents and validity of the tokens of one execution microbatch.

    Attributes:
        position_BS: int64, position of the token inside its document, from 0; rotary embeddings read it.
        token_index_BS: int64, index of the token in the global order of the step, independent of the layout; random
            decisions are keyed by it.
        valid_BS: bool, False for padding slots. Padding never enters a statistic or a loss.
        document_BS: int64 document number inside the row where several documents share it, the slots of each
            consecutive; None means that a row is one document.
        context: how rows are spread over ranks; None where each rank holds whole rows. The other attributes are those
            of the slots that this rank holds.
    """

    position_BS: "Tensor"
    token_index_BS: "Tensor"
    valid_BS: "Tensor"
    document_BS: "Tensor | None" = None
    context: "ContextSplit | None" = None


_made: "WeakKeyDictionary[SequenceInfo | ContextSplit, dict[Any, Any]]" = WeakKeyDictionary()


def once_per_microbatch(owner: SequenceInfo | ContextSplit, key: object, make: Callable[[], T]) -> T:
    """What depends on `owner` and `key` alone: made at the first call, and dropped with the owner.

    Args:
        make: what it makes must not refer to the owner, which would then live for ever.
    """
    made = _made.setdefault(owner, {})
    if key not in made:
        made[key] = make()
    value: T = made[key]
    return value
