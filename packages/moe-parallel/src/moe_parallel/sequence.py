"""`SequenceInfo`: what a layer may know of the batch. Layers learn nothing about the batch from anywhere else.

Shape legend: B sequences (rows) here, S token slots per row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class SequenceInfo:
    """Positions, documents and validity of the tokens of one execution microbatch.

    Attributes:
        position_BS: int64, position of the token inside its document, from 0; rotary embeddings read it.
        token_index_BS: int64, index of the token in the global order of the step, independent of the layout; random
            decisions are keyed by it.
        valid_BS: bool, False for padding slots. Padding never enters a statistic or a loss.
        document_BS: int64 document number inside the row where several documents share it; None means that a row is
            one document.
        context: process group over which the sequence is split; None where each rank holds whole sequences.
    """

    position_BS: "Tensor"
    token_index_BS: "Tensor"
    valid_BS: "Tensor"
    document_BS: "Tensor | None" = None
    context: "ProcessGroup | None" = None
