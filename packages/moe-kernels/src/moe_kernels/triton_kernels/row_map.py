"""The map between choices and rows by prefix sums, in three launches: equal ids give an equal map, without atomics.

Choices are cut into blocks. The first kernel counts each block's choices of every expert, the second turns the counts
into the row at which a block's choices of an expert begin, the third adds the choice's place inside its block.

Shape legend: C choices (flat, t * K + k) of a block, J those a choice is compared with, E experts, B blocks, R rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case
from moe_kernels.triton_kernels.operator import operator

# Choices of a program. 4096 tokens with 8 choices make 128 blocks, one for every multiprocessor of an H100; a block
# compares its choices with each other and with every expert, so that larger ones would compute longer than they read.
_BLOCK_C = 256
# Experts, or choices, that all choices of a block are compared with at a time; rows that a program fills at a time.
_BLOCK_E, _BLOCK_J, _BLOCK_R = 32, 32, 256
# Elements of a tile of counts [B, E], in the one program that adds them up.
_COUNTS = 8192
_NUM_WARPS, _PREFIX_WARPS = 8, 8


@triton.jit
def _choices(ids_ptr, at, num_choices, E: tl.constexpr):
    """Expert of each choice, -1 without one; whether there is an id that names none."""
    ids = tl.load(ids_ptr + at, at < num_choices, other=-1)
    outside = (ids < -1) | (ids >= E)
    return tl.where(outside, -1, ids).to(tl.int32), outside


@triton.jit(do_not_specialize=["num_choices", "num_rows"])
def count_choices_kernel(
    ids_ptr,
    counts_ptr,
    outside_ptr,
    choice_ptr,
    num_choices,
    num_rows,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Counts [B, E] of a block, and -1 for every row: those of choices are written over by the third kernel."""
    block = tl.program_id(0)
    id_C, outside_C = _choices(ids_ptr, block * BLOCK_C + tl.arange(0, BLOCK_C), num_choices, E)
    tl.store(outside_ptr + block, tl.sum(outside_C.to(tl.int32), 0))
    for first in range(0, E, BLOCK_E):
        expert_E = first + tl.arange(0, BLOCK_E)
        count_E = tl.sum((expert_E[:, None] == id_C[None, :]).to(tl.int32), 1)
        tl.store(counts_ptr + block * E + expert_E, count_E, expert_E < E)
    for first in range(block * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R)
        tl.store(choice_ptr + row_R, tl.full([BLOCK_R], -1, tl.int64), row_R < num_rows)


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "row_multiple", "rows_per_expert"])
def place_blocks_kernel(
    counts_ptr,
    outside_ptr,
    begin_ptr,
    counts_E_ptr,
    offsets_E_ptr,
    overflow_ptr,
    num_blocks,
    num_rows,
    row_multiple,
    rows_per_expert,
    E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: where the rows of each expert end, and where in them the choices of each block begin."""
    expert_E = tl.arange(0, BLOCK_E)
    here_E = expert_E < E
    total_E = tl.zeros([BLOCK_E], tl.int32)
    outside_B = tl.zeros([BLOCK_B], tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block_B = first + tl.arange(0, BLOCK_B)
        mask = (block_B < num_blocks)[:, None] & here_E[None, :]
        total_E += tl.sum(tl.load(counts_ptr + block_B[:, None] * E + expert_E[None, :], mask, other=0), 0)
        outside_B += tl.load(outside_ptr + block_B, block_B < num_blocks, other=0)
    padded_E = (total_E + row_multiple - 1) // row_multiple * row_multiple
    if rows_per_expert >= 0:
        padded_E = tl.where(here_E, rows_per_expert, 0)
    end_E = tl.cumsum(padded_E, 0)
    begin_E = end_E - padded_E
    end_E = tl.minimum(end_E, num_rows)
    placed_E = tl.minimum(total_E, tl.maximum(end_E - begin_E, 0))
    tl.store(offsets_E_ptr + expert_E, end_E, here_E)
    tl.store(counts_E_ptr + expert_E, placed_E.to(tl.int64), here_E)
    tl.store(overflow_ptr, (tl.sum(total_E - placed_E, 0) + tl.sum(outside_B, 0)).to(tl.int64))
    for first in range(0, num_blocks, BLOCK_B):
        block_B = first + tl.arange(0, BLOCK_B)
        mask = (block_B < num_blocks)[:, None] & here_E[None, :]
        count = tl.load(counts_ptr + block_B[:, None] * E + expert_E[None, :], mask, other=0)
        before = begin_E[None, :] + tl.cumsum(count, 0) - count
        tl.store(begin_ptr + block_B[:, None] * E + expert_E[None, :], before, mask)
        begin_E += tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_choices"])
def place_choices_kernel(
    ids_ptr,
    begin_ptr,
    offsets_E_ptr,
    row_ptr,
    choice_ptr,
    num_choices,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """The row of each choice of a block, and the choice of each of these rows."""
    block = tl.program_id(0)
    at_C = block * BLOCK_C + tl.arange(0, BLOCK_C)
    id_C = _choices(ids_ptr, at_C, num_choices, E)[0]
    before_C = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, BLOCK_C, BLOCK_J):
        at_J = block * BLOCK_C + first + tl.arange(0, BLOCK_J)
        id_J = _choices(ids_ptr, at_J, num_choices, E)[0]
        before = (id_J[None, :] == id_C[:, None]) & (at_J[None, :] < at_C[:, None])
        before_C += tl.sum(before.to(tl.int32), 1)
    has_expert_C = id_C >= 0
    row_C = tl.load(begin_ptr + block * E + id_C, has_expert_C, other=0) + before_C
    placed_C = has_expert_C & (row_C < tl.load(offsets_E_ptr + id_C, has_expert_C, other=0))
    tl.store(row_ptr + at_C, tl.where(placed_C, row_C, -1).to(tl.int64), at_C < num_choices)
    tl.store(choice_ptr + row_C, at_C.to(tl.int64), placed_C)


def _fake(
    ids: Tensor, num_experts: int, num_rows: int, row_multiple: int, rows_per_expert: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = (ids.shape, (num_rows,), (num_experts,))
    row_TK, choice_R, counts_E = (ids.new_empty(shape, dtype=torch.int64) for shape in shapes)
    offsets_E, overflow = ids.new_empty(num_experts, dtype=torch.int32), ids.new_empty((), dtype=torch.int64)
    return row_TK, choice_R, counts_E, offsets_E, overflow


@operator(
    "row_map(Tensor ids, int num_experts, SymInt num_rows, int row_multiple, int? rows_per_expert) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
def row_map(
    ids_TK: Tensor, num_experts: int, num_rows: int, row_multiple: int, rows_per_expert: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """row_TK, choice_R, counts_E, offsets_E and the overflow of a `RowMap` with `num_rows` rows."""
    ids_TK = ids_TK.contiguous()
    num_choices = ids_TK.numel()
    blocks = max(cdiv(num_choices, _BLOCK_C), 1)
    row_TK, choice_R, counts_E, offsets_E, overflow = results = _fake(
        ids_TK, num_experts, num_rows, row_multiple, rows_per_expert
    )
    counts_BE, outside_B = (ids_TK.new_empty(shape, dtype=torch.int32) for shape in ((blocks, num_experts), (blocks,)))
    begin_BE = torch.empty_like(counts_BE)
    shared = {"E": num_experts, "BLOCK_C": _BLOCK_C}
    count_choices_kernel[(blocks,)](
        ids_TK,
        counts_BE,
        outside_B,
        choice_R,
        num_choices,
        num_rows,
        BLOCK_E=_BLOCK_E,
        BLOCK_R=_BLOCK_R,
        num_warps=_NUM_WARPS,
        **shared,
    )
    block_experts = next_power_of_2(num_experts)
    place_blocks_kernel[(1,)](
        counts_BE,
        outside_B,
        begin_BE,
        counts_E,
        offsets_E,
        overflow,
        blocks,
        num_rows,
        row_multiple,
        -1 if rows_per_expert is None else rows_per_expert,
        E=num_experts,
        BLOCK_B=max(_COUNTS // block_experts, 1),
        BLOCK_E=block_experts,
        num_warps=_PREFIX_WARPS,
    )
    place_choices_kernel[(blocks,)](
        ids_TK, begin_BE, offsets_E, row_TK, choice_R, num_choices, BLOCK_J=_BLOCK_J, num_warps=_NUM_WARPS, **shared
    )
    return results


def _compile_cases() -> tuple[CompileCase, ...]:
    cases = []
    types = dict.fromkeys(("ids_ptr", "choice_ptr", "row_ptr", "counts_E_ptr", "overflow_ptr"), "*i64")
    types |= dict.fromkeys(("counts_ptr", "outside_ptr", "begin_ptr", "offsets_E_ptr"), "*i32")
    for experts in (128, 256):
        shared = {"E": experts, "BLOCK_C": _BLOCK_C}
        tile = {"E": experts, "BLOCK_B": _COUNTS // experts, "BLOCK_E": experts}
        for name, kernel, constants, num_warps in (
            ("count", count_choices_kernel, {**shared, "BLOCK_E": _BLOCK_E, "BLOCK_R": _BLOCK_R}, _NUM_WARPS),
            ("place blocks", place_blocks_kernel, tile, _PREFIX_WARPS),
            ("place choices", place_choices_kernel, {**shared, "BLOCK_J": _BLOCK_J}, _NUM_WARPS),
        ):
            cases.append(
                compile_case(f"row_map {name} E{experts}", kernel, constants, types=types, num_warps=num_warps)
            )
    return tuple(cases)


COMPILE_CASES = _compile_cases()
