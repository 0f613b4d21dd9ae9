"""Copies of tokens to their rows and sums of rows per token, with the probabilities, each in one launch.

Both directions go by token: a token's features are read once for all its rows, and its sum runs over the choices in
their order. Shape legend: T tokens, K choices, D features, R rows, P rows that one program pads.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows, in_all_dtypes, tile
from moe_kernels.triton_kernels.operator import operator

# Features of a token that a program takes, and elements of its tile: eight a thread, 16 bytes of bf16. More programs
# instead of more features, for the sake of the K stores or loads that each of them has under way.
_WIDEST, _TILE = 1024, 1024
_NUM_WARPS = 4
# Rows that a program looks at for padding.
_BLOCK_P = 32


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "token_programs"])
def permute_kernel(
    x_ptr,
    probs_ptr,
    row_ptr,
    choice_ptr,
    rows_ptr,
    row_probs_ptr,
    num_tokens,
    num_rows,
    token_programs,
    x_stride,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The first programs copy tokens, the others write zeros to the rows without a choice."""
    pid = tl.program_id(0)
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    if pid < token_programs:
        token_T = (pid // parts).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        here_T = token_T < num_tokens
        cols = pid % parts * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(x_ptr + token_T[:, None] * x_stride + cols, here_T[:, None] & (cols < D), other=0.0)
        for k in tl.static_range(K):
            row_T = tl.load(row_ptr + token_T * K + k, here_T, other=-1)
            tl.store(rows_ptr + row_T[:, None] * D + cols, x, (row_T >= 0)[:, None] & (cols < D))
            if probs_ptr is not None:
                once_T = (row_T >= 0) & (pid % parts == 0)
                tl.store(row_probs_ptr + row_T, tl.load(probs_ptr + token_T * K + k, once_T, other=0.0), once_T)
    else:
        row_P = (pid - token_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        empty_P = (row_P < num_rows) & (tl.load(choice_ptr + row_P, row_P < num_rows, other=0) < 0)
        if tl.max(empty_P.to(tl.int32), 0) > 0:
            for start in range(0, D, BLOCK_D):
                cols = start + tl.arange(0, BLOCK_D)[None, :]
                zeros = tl.zeros([BLOCK_P, BLOCK_D], rows_ptr.dtype.element_ty)
                tl.store(rows_ptr + row_P[:, None] * D + cols, zeros, empty_P[:, None] & (cols < D))
            if probs_ptr is not None:
                tl.store(row_probs_ptr + row_P, tl.zeros([BLOCK_P], row_probs_ptr.dtype.element_ty), empty_P)


@triton.jit(do_not_specialize=["num_tokens"])
def unpermute_kernel(
    rows_ptr,
    row_probs_ptr,
    row_ptr,
    y_ptr,
    probs_ptr,
    num_tokens,
    rows_stride,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sum of a token's rows over k = 0, 1, .. in fp32; and each choice the number of its row."""
    part = tl.program_id(1)
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here_T = token_T < num_tokens
    cols = part * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    y = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        row_T = tl.load(row_ptr + token_T * K + k, here_T, other=-1)
        rows = tl.load(rows_ptr + row_T[:, None] * rows_stride + cols, (row_T >= 0)[:, None] & (cols < D), other=0.0)
        y += rows.to(tl.float32)
        if row_probs_ptr is not None:
            prob_T = tl.load(row_probs_ptr + row_T, (row_T >= 0) & (part == 0), other=0.0)
            tl.store(probs_ptr + token_T * K + k, prob_T, here_T & (part == 0))
    tl.store(y_ptr + token_T[:, None] * D + cols, y.to(y_ptr.dtype.element_ty), here_T[:, None] & (cols < D))


def _fake_permute(x: Tensor, probs: Tensor | None, row: Tensor, choice: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
    rows = choice.shape[0]
    return x.new_empty(rows, x.shape[1]), x.new_empty(0) if probs is None else probs.new_empty(rows)


@operator(
    "permute(Tensor x, Tensor? probs, Tensor row, Tensor choice, bool padded) -> (Tensor, Tensor)", fake=_fake_permute
)
def permute(
    x_TD: Tensor, probs_TK: Tensor | None, row_TK: Tensor, choice_R: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    """rows_RD and probs_R (empty without probabilities).

    Args:
        padded: whether there may be rows without a choice.
    """
    x_TD = feature_rows(x_TD)
    (num_tokens, features), num_choices, num_rows = x_TD.shape, row_TK.shape[1], choice_R.shape[0]
    rows_RD, probs_R = _fake_permute(x_TD, probs_TK, row_TK, choice_R, padded)
    if num_rows == 0 or features == 0:
        return rows_RD, probs_R
    block_tokens, block_features = tile(features, _WIDEST, _TILE)
    token_programs = cdiv(num_tokens, block_tokens) * cdiv(features, block_features)
    padding_programs = cdiv(num_rows, _BLOCK_P) if padded else 0
    permute_kernel[(token_programs + padding_programs,)](
        x_TD,
        None if probs_TK is None else probs_TK.contiguous(),
        row_TK,
        choice_R,
        rows_RD,
        probs_R,
        num_tokens,
        num_rows,
        token_programs,
        x_TD.stride(0),
        D=features,
        K=num_choices,
        BLOCK_T=block_tokens,
        BLOCK_D=block_features,
        BLOCK_P=_BLOCK_P,
        num_warps=_NUM_WARPS,
    )
    return rows_RD, probs_R


def _fake_unpermute(rows: Tensor, probs: Tensor | None, row: Tensor) -> tuple[Tensor, Tensor]:
    return (
        rows.new_empty(row.shape[0], rows.shape[1]),
        rows.new_empty(0) if probs is None else probs.new_empty(row.shape),
    )


@operator("unpermute(Tensor rows, Tensor? probs, Tensor row) -> (Tensor, Tensor)", fake=_fake_unpermute)
def unpermute(rows_RD: Tensor, probs_R: Tensor | None, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """y_TD, and the entry of `probs_R` of each choice, zero for one without a row (empty without them)."""
    rows_RD = feature_rows(rows_RD)
    (num_tokens, num_choices), features = row_TK.shape, rows_RD.shape[1]
    y_TD, probs_TK = _fake_unpermute(rows_RD, probs_R, row_TK)
    if num_tokens == 0 or features == 0:
        return y_TD, probs_TK
    block_tokens, block_features = tile(features, _WIDEST, _TILE)
    unpermute_kernel[(cdiv(num_tokens, block_tokens), cdiv(features, block_features))](
        rows_RD,
        None if probs_R is None else probs_R.contiguous(),
        row_TK,
        y_TD,
        probs_TK,
        num_tokens,
        rows_RD.stride(0),
        D=features,
        K=num_choices,
        BLOCK_T=block_tokens,
        BLOCK_D=block_features,
        num_warps=_NUM_WARPS,
    )
    return y_TD, probs_TK


def _compile_cases() -> tuple[CompileCase, ...]:
    types = dict.fromkeys(("row_ptr", "choice_ptr"), "*i64") | dict.fromkeys(("probs_ptr", "row_probs_ptr"), "*fp32")
    cases = []
    # Qwen3-30B-A3B and DeepSeek-V3.
    for features in (2048, 7168):
        block_tokens, block_features = tile(features, _WIDEST, _TILE)
        sizes: dict[str, Any] = {"D": features, "K": 8, "BLOCK_T": block_tokens, "BLOCK_D": block_features}
        for weighted in (True, False):
            absent: dict[str, Any] = {} if weighted else {"probs_ptr": None, "row_probs_ptr": None}
            suffix = f"bf16 D{features} K8{' probabilities' * weighted}"
            for name, kernel, constants in (
                ("permute", permute_kernel, {**sizes, "BLOCK_P": _BLOCK_P, **absent}),
                ("unpermute", unpermute_kernel, {**sizes, **absent}),
            ):
                cases.append(compile_case(f"{name} {suffix}", kernel, constants, types=types, num_warps=_NUM_WARPS))
    return tuple(cases)


COMPILE_CASES = in_all_dtypes(_compile_cases())
