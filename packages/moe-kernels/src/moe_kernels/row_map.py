"""`RowMap`: which row each choice of an expert has, and which choice each row serves.

Shape legend: T tokens, K choices per token, E experts, R rows (padding included), C choices that have a row, N all
choices (T K).
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Where each choice's row is and which choice each row serves; made by `row_map`, one object for both directions.

    Attributes:
        num_tokens: T.
        num_choices: K.
        num_rows: R, padding rows included. Where the host did not read how many there are, rows after the last offset
            are padding too.
        counts_E: int64, rows of each expert without padding.
        offsets_E: int32, inclusive end of each expert's rows, padding included; the rows of expert e begin where those
            of e-1 end, real rows first.
        row_TK: int64, row of each choice; -1 for a choice without expert.
        choice_R: int64, flat choice t * K + k of each row; -1 for a padding row.
        overflow: int64 scalar on the device, choices that have an id and found no row: the id is no expert, or the rows
            ended. None where the host made sure that there are none.
    """

    num_tokens: int
    num_choices: int
    num_rows: int
    counts_E: Tensor
    offsets_E: Tensor
    row_TK: Tensor
    choice_R: Tensor
    overflow: Tensor | None = None
    # C, where the host knows it.
    _num_placed: int | None = field(repr=False)

    @property
    def is_padded(self) -> bool:
        """Whether there may be padding rows."""
        return self.num_rows != self._num_placed

    @property
    def token_R(self) -> Tensor:
        """int64, the token of each row; 0 for a padding row."""
        # A trace cannot keep it, and takes no lock, which Python 3.11 has in a cached property.
        return self._token_of_rows() if torch.compiler.is_compiling() else self._token_R

    @cached_property
    def _token_R(self) -> Tensor:
        return self._token_of_rows()

    def _token_of_rows(self) -> Tensor:
        choice_R = self.choice_R.clamp(min=0) if self.is_padded else self.choice_R
        return choice_R // max(self.num_choices, 1)

    @property
    def bags(self) -> tuple[Tensor, Tensor] | None:
        """The rows of each token one after another [C], and where each token's begin [T], both int64.

        None where the host does not know C.
        """
        return self._rows_of_tokens() if torch.compiler.is_compiling() else self._bags

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor] | None:
        return self._rows_of_tokens()

    def _rows_of_tokens(self) -> tuple[Tensor, Tensor] | None:
        if self._num_placed is None:
            return None
        if self._num_placed == self.row_TK.numel():
            return self.row_TK.view(-1), torch.arange(self.num_tokens, device=self.row_TK.device) * self.num_choices
        placed_TK = self.row_TK >= 0
        placed_T = placed_TK.sum(-1)
        # Of a known size, which neither the host nor a fake tensor has to ask for.
        place_C = torch.nonzero_static(placed_TK.view(-1), size=self._num_placed)[:, 0]
        return self.row_TK.view(-1).index_select(0, place_C), placed_T.cumsum(0) - placed_T


def row_map(
    ids_TK: Tensor,
    num_experts: int,
    *,
    row_multiple: int = 1,
    num_rows: int | None = None,
    capacity_rows: int | None = None,
    rows_per_expert: int | None = None,
) -> RowMap:
    """Sort choices by (expert, token, k); stable, so equal ids give an equal map.

    The host is synchronised once, for the number of rows and the check of the ids; not with `num_rows`,
    `capacity_rows` or `rows_per_expert`, of which one at most is given.

    Args:
        ids_TK: int64 expert ids in [0, E), or -1 for a choice that gets no row. Duplicates are allowed.
        num_experts: E.
        row_multiple: every expert's rows are padded to a multiple of this; an expert without rows stays without.
        num_rows: the number of choices that have an expert, of a caller that knows it and has checked the ids. The map
            is wrong where this is; without padding only.
        capacity_rows: R, whatever the ids are; `most_rows` is enough for any. Choices whose row would lie beyond it,
            and ids that are no expert, get no row and are counted in `overflow`.
        rows_per_expert: every expert gets so many rows, padding included, also one without choices; later choices of an
            expert that has more are an overflow. Without `row_multiple`.

    Raises:
        MoeKernelsError: an id outside [-1, E), where the host is synchronised; `row_multiple` below 1, or arguments
            that exclude each other.
    """
    _check_sizes(row_multiple, num_rows, capacity_rows, rows_per_expert)
    if rows_per_expert is not None:
        capacity_rows = num_experts * rows_per_expert
    if uses_triton(ids_TK):
        return _map_of_kernels(ids_TK, num_experts, row_multiple, num_rows, capacity_rows, rows_per_expert)
    if capacity_rows is not None:
        return _map_of_capacity(ids_TK, num_experts, row_multiple, capacity_rows, rows_per_expert)
    num_tokens, num_choices = ids_TK.shape
    device = ids_TK.device
    sorted_ids, order = ids_TK.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(-1, num_experts + 1, device=device))
    counts_E = ends[1:].diff()
    padded_E = _rounded_up(counts_E, row_multiple)
    offsets_E = padded_E.cumsum(0)
    if num_rows is None:
        read = torch.stack((ends[0] + order.numel() - ends[-1], ends[1], offsets_E[-1:].sum()))
        outside, skipped, num_rows = read.tolist()
    else:
        outside, skipped = 0, order.numel() - num_rows
    if outside:
        raise _no_experts(ids_TK, num_experts)

    choice_C = order[skipped:]
    num_placed = choice_C.numel()
    row_C = torch.arange(num_placed, device=device)
    if num_rows == num_placed:
        choice_R = choice_C
    else:
        shift_E = (offsets_E - padded_E) - (ends[1:-1] - skipped)
        row_C = row_C + shift_E.index_select(0, sorted_ids[skipped:])
        choice_R = torch.full((num_rows,), -1, dtype=order.dtype, device=device).scatter_(0, row_C, choice_C)
    # Every choice occurs once, so this writes each place at most once.
    row_TK = torch.full_like(order, -1).scatter_(0, choice_C, row_C).view(num_tokens, num_choices)
    return RowMap(
        num_tokens=num_tokens,
        num_choices=num_choices,
        num_rows=num_rows,
        counts_E=counts_E,
        offsets_E=offsets_E.to(torch.int32),
        row_TK=row_TK,
        choice_R=choice_R,
        _num_placed=num_placed,
    )


def most_rows(num_tokens: int, num_choices: int, num_experts: int, *, row_multiple: int = 1) -> int:
    """The most rows that a map of such ids can have: every choice has an expert, and most experts are padded most."""
    choices = num_tokens * num_choices
    return (choices + min(num_experts, choices) * (row_multiple - 1)) // row_multiple * row_multiple


def _check_sizes(
    row_multiple: int, num_rows: int | None, capacity_rows: int | None, rows_per_expert: int | None
) -> None:
    if row_multiple < 1:
        raise MoeKernelsError(f"rows cannot be padded to a multiple of {row_multiple}; it must be at least 1")
    given = {"num_rows": num_rows, "capacity_rows": capacity_rows, "rows_per_expert": rows_per_expert}
    sizes = {name: size for name, size in given.items() if size is not None}
    if len(sizes) > 1:
        raise MoeKernelsError(f"{' and '.join(sizes)} each say how many rows there are; give one of them")
    for name, size in sizes.items():
        if size < 0:
            raise MoeKernelsError(f"{name} = {size} is no number of rows; it must be at least 0")
        if row_multiple > 1 and name != "capacity_rows":
            raise MoeKernelsError(f"{name} is for rows without padding, not with row_multiple = {row_multiple}")


def _rounded_up(counts_E: Tensor, multiple: int) -> Tensor:
    return (counts_E + multiple - 1) // multiple * multiple


def _no_experts(ids_TK: Tensor, num_experts: int) -> MoeKernelsError:
    return MoeKernelsError(
        f"expert ids must be -1 or lie in [0, {num_experts}), got ids between {int(ids_TK.min())} and "
        f"{int(ids_TK.max())}"
    )


def _map_of_capacity(
    ids_TK: Tensor, num_experts: int, row_multiple: int, num_rows: int, rows_per_expert: int | None
) -> RowMap:
    """The map where shapes alone say how many rows there are; nothing is read on the host."""
    num_tokens, num_choices = ids_TK.shape
    device = ids_TK.device
    ids_N = ids_TK.reshape(-1)
    # Choices without an expert come last.
    sorted_N, order_N = ids_N.where((ids_N >= 0) & (ids_N < num_experts), num_experts).sort(stable=True)
    begin_E = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=device))
    chosen_E = begin_E.diff()
    if rows_per_expert is None:
        padded_E = _rounded_up(chosen_E, row_multiple)
    else:
        padded_E = torch.full_like(chosen_E, rows_per_expert)
    end_E = padded_E.cumsum(0)
    first_E = end_E - padded_E
    end_E = end_E.clamp(max=num_rows)
    counts_E = (end_E - first_E).clamp(min=0).minimum(chosen_E)
    # One more entry for choices without an expert, which has no rows.
    shift = torch.cat((first_E - begin_E[:-1], first_E.new_zeros(1)))
    end = torch.cat((end_E, end_E.new_zeros(1)))
    row_N = torch.arange(ids_N.numel(), device=device) + shift.index_select(0, sorted_N)
    placed_N = row_N < end.index_select(0, sorted_N)
    # The row after the last takes what has none, and is cut off.
    choice_R = torch.full((num_rows + 1,), -1, device=device)
    choice_R = choice_R.scatter_(0, row_N.where(placed_N, num_rows), order_N)[:num_rows]
    row_TK = torch.empty_like(order_N).scatter_(0, order_N, row_N.where(placed_N, -1)).view(num_tokens, num_choices)
    return RowMap(
        num_tokens=num_tokens,
        num_choices=num_choices,
        num_rows=num_rows,
        counts_E=counts_E,
        offsets_E=end_E.to(torch.int32),
        row_TK=row_TK,
        choice_R=choice_R,
        overflow=(ids_N != -1).sum() - counts_E.sum(),
        _num_placed=None,
    )


def _map_of_kernels(
    ids_TK: Tensor,
    num_experts: int,
    row_multiple: int,
    num_rows: int | None,
    capacity_rows: int | None,
    rows_per_expert: int | None,
) -> RowMap:
    from moe_kernels.triton_kernels import row_map as kernels

    num_tokens, num_choices = ids_TK.shape
    size = capacity_rows if num_rows is None else num_rows
    room = most_rows(num_tokens, num_choices, num_experts, row_multiple=row_multiple) if size is None else size
    row_TK, choice_R, counts_E, offsets_E, overflow = kernels.row_map(
        ids_TK, num_experts, room, row_multiple, rows_per_expert
    )
    num_placed = num_rows
    if size is None:
        room, num_placed, outside = torch.stack((offsets_E[-1:].sum(), counts_E.sum(), overflow)).tolist()
        if outside:
            raise _no_experts(ids_TK, num_experts)
    return RowMap(
        num_tokens=num_tokens,
        num_choices=num_choices,
        num_rows=room,
        counts_E=counts_E,
        offsets_E=offsets_E,
        row_TK=row_TK,
        choice_R=choice_R[:room],
        overflow=None if capacity_rows is None else overflow,
        _num_placed=num_placed,
    )
