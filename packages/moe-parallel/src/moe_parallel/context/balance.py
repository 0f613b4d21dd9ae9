"""Which rank holds which slot of a row, so that causal attention is the same work on every rank; no communication.

A late token sees more than an early one. Cut into 2*C equal pieces, of which rank r takes piece r and piece 2*C-1-r
(head and tail), a row is exactly the same work for every rank. Where several documents share a row, each is cut so.

Shape legend: B rows, R slots of a whole row, C ranks, S = R / C slots of a row on one rank.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import ContextSplit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def padded_slots(num_slots: int, ranks: int, also_multiple_of: int = 1) -> int:
    """Slots of a row after padding at its end: the next multiple of `2 * ranks * also_multiple_of`.

    Args:
        also_multiple_of: into how many equal parts every piece must divide, such as the ranks of sequence parallelism.
    """
    step = 2 * ranks * also_multiple_of
    return -(-num_slots // step) * step


def head_tail(num_slots: int, ranks: int) -> Tensor:
    """slot_CS: the slots of piece r and of piece 2*C-1-r for each rank r, ascending.

    Raises:
        MoeParallelError: the row cannot be cut into 2*C equal pieces.
    """
    _check_pieces(num_slots, ranks)
    pieces = torch.arange(num_slots).view(2 * ranks, -1)
    return torch.cat([pieces[:ranks], pieces[ranks:].flip(0)], dim=1)


def per_document(document_BR: Tensor, ranks: int) -> Tensor:
    """slot_CBS: every document cut into head and tail pieces of its own; each rank holds R / C slots of every row.

    Pieces of a document differ by at most one slot, and which are longer changes from document to document. Documents
    need no padding of their own, and may be shorter than the ranks are many.

    Args:
        document_BR: document number of every slot; the slots of a document are consecutive.

    Raises:
        MoeParallelError: R is not a multiple of 2*C.
    """
    batch, num_slots = document_BR.shape
    _check_pieces(num_slots, ranks)
    length_N = _run_lengths(document_BR)
    piece_N, rest_N = length_N // (2 * ranks), length_N % (2 * ranks)
    # Slots left over go to the pieces in turn, on and on through the documents. Those of a row are a multiple of 2*C.
    first_N = rest_N.cumsum(0) - rest_N
    turn_N2C = (torch.arange(2 * ranks, device=rest_N.device) - first_N.unsqueeze(1)) % (2 * ranks)
    lengths_N2C = piece_N.unsqueeze(1) + (turn_N2C < rest_N.unsqueeze(1))
    holder_2C = torch.cat([torch.arange(ranks), torch.arange(ranks).flip(0)]).to(rest_N.device)
    holder_BR = holder_2C.repeat(len(length_N)).repeat_interleave(lengths_N2C.flatten()).view(batch, num_slots)
    return holder_BR.argsort(dim=1, stable=True).view(batch, ranks, -1).transpose(0, 1).contiguous()


def split_context(
    group: "ProcessGroup",
    batch: int,
    num_slots: int,
    document_BR: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> ContextSplit:
    """A balanced split of rows over a group: `per_document` where documents share rows, else `head_tail`.

    Raises:
        MoeParallelError: the row cannot be cut into 2*C equal pieces, or the documents are those of other rows.
    """
    if document_BR is None:
        slot_CBS = head_tail(num_slots, group.size()).unsqueeze(1).expand(-1, batch, -1).contiguous()
        return ContextSplit(group=group, slot_CBS=slot_CBS.to(device))
    if document_BR.shape != (batch, num_slots):
        raise MoeParallelError(
            f"{batch} rows of {num_slots} slots have as many document numbers, but they are {list(document_BR.shape)}"
        )
    return ContextSplit(
        group=group,
        slot_CBS=per_document(document_BR, group.size()).to(device),
        document_BR=document_BR.to(device),
    )


def document_numbers(boundary_N: Tensor, num_slots: int) -> Tensor:
    """document_R: the number of the document that holds each slot of a row.

    Args:
        boundary_N: where documents begin and end, ascending from 0. Repeated boundaries are documents without a token;
            any beyond the row, as fill up an array of fixed length, are ignored.
    """
    return torch.searchsorted(boundary_N, torch.arange(num_slots, device=boundary_N.device), right=True) - 1


def select_slots(x_BR: Tensor, split: ContextSplit, rank: int) -> Tensor:
    """x_BS: the slots of whole rows that a rank holds; further dims stay. No communication."""
    slot_BS = split.slot_CBS[rank].to(x_BR.device)
    return x_BR[torch.arange(len(slot_BS), device=x_BR.device).unsqueeze(1), slot_BS]


def join_slots(parts_BS: Sequence[Tensor], split: ContextSplit) -> Tensor:
    """x_BR: whole rows from the parts of all ranks, in their order; undoes `select_slots`. No communication."""
    slot_BR = split.slot_CBS.transpose(0, 1).flatten(1).to(parts_BS[0].device)
    x_BR = torch.cat(list(parts_BS), dim=1)
    return x_BR[torch.arange(len(slot_BR), device=x_BR.device).unsqueeze(1), slot_BR.argsort(dim=1)]


def _check_pieces(num_slots: int, ranks: int) -> None:
    if ranks < 1 or num_slots < 1 or num_slots % (2 * ranks):
        raise MoeParallelError(
            f"a row of {num_slots} slots cannot be cut into {2 * ranks} equal pieces, two for each of {ranks} ranks; "
            f"pad it to a multiple of {2 * ranks} (padded_slots says {padded_slots(max(num_slots, 1), max(ranks, 1))})"
        )


def _run_lengths(document_BR: Tensor) -> Tensor:
    """Lengths of the documents of all rows, one row after the other."""
    new_BR = torch.ones_like(document_BR, dtype=torch.bool)
    new_BR[:, 1:] = document_BR[:, 1:] != document_BR[:, :-1]
    start_N = new_BR.flatten().nonzero().squeeze(1)
    end = start_N.new_tensor([document_BR.numel()])
    return torch.cat([start_N, end]).diff()
