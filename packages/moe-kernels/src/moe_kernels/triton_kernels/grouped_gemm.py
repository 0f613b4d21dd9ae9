"""Grouped GEMM kernels: `y[r] = x[r] @ w[e(r)]` for rows that are sorted by expert, and the gradient of the weights.

Offsets are read on the device; grids depend on shapes only. Sums are of fp32, in a fixed order, and rounded once.
Shape legend: R rows, E experts, K inner features, N output features, G groups; of tiles M rows, N columns, S summed.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.grouped_gemm_configs import Operation, TileConfig, tile_config


@triton.jit
def last_tiles(offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr):
    """[GROUPS] number of tiles up to and including each group; group NUM_EXPERTS has the rows after the last offset."""
    group_G = tl.arange(0, GROUPS)
    end_G = tl.load(offsets_ptr + group_G, mask=group_G < NUM_EXPERTS, other=num_rows)
    start_G = tl.load(offsets_ptr + group_G - 1, mask=(group_G > 0) & (group_G <= NUM_EXPERTS), other=0)
    # A device cannot refuse offsets beyond the rows; what is not there is not touched.
    size_G = tl.maximum(tl.minimum(end_G, num_rows) - start_G, 0)
    size_G = tl.where(group_G <= NUM_EXPERTS, size_G, 0)
    return tl.cumsum(tl.cdiv(size_G, M), 0) * num_col_tiles


@triton.jit
def locate(
    tile, last_G, offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS: tl.constexpr, M: tl.constexpr, BAND: tl.constexpr
):
    """Group, first row, end of the group's rows, and column tile of a tile."""
    before_G = last_G <= tile
    group = tl.sum(before_G.to(tl.int32), 0)
    tile -= tl.max(tl.where(before_G, last_G, 0), 0)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(offsets_ptr + group, mask=group < NUM_EXPERTS, other=num_rows), num_rows)
    row_tile, col_tile = in_bands(tile, tl.cdiv(end - start, M), num_col_tiles, BAND)
    return group, start + row_tile * M, end, col_tile


@triton.jit
def in_bands(tile, num_row_tiles, num_col_tiles, BAND: tl.constexpr):
    """Row and column of a tile, where BAND rows are walked together, column by column."""
    band = tile // (BAND * num_col_tiles)
    rows_here = tl.minimum(num_row_tiles - band * BAND, BAND)
    tile -= band * BAND * num_col_tiles
    return band * BAND + tile % rows_here, tile // rows_here


@triton.jit(do_not_specialize=["num_rows"])
def grouped_mm_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    offsets_ptr,
    num_rows,
    K,
    N,
    x_stride_r,
    w_stride_e,
    w_stride_k,
    w_stride_n,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
    BAND: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """y_RN; every program walks tiles, and rows after the last offset become zero."""
    num_col_tiles = tl.cdiv(N, N_BLOCK)
    last_G = last_tiles(offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS, GROUPS, M_BLOCK)
    s_S = tl.arange(0, S_BLOCK)
    for tile in range(tl.program_id(0), tl.max(last_G, 0), tl.num_programs(0)):
        group, row, end, col_tile = locate(
            tile, last_G, offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS, M_BLOCK, BAND
        )
        row_M = row + tl.arange(0, M_BLOCK)
        col_N = col_tile * N_BLOCK + tl.arange(0, N_BLOCK)
        # Rows beyond the group repeat its last one, which costs less than masked loads, and are not stored.
        x_ptr_MS = x_ptr + tl.minimum(row_M, end - 1).to(tl.int64)[:, None] * x_stride_r + s_S[None, :]
        w_ptr_SN = w_ptr + group.to(tl.int64) * w_stride_e + s_S[:, None] * w_stride_k + col_N[None, :] * w_stride_n
        acc_MN = tl.zeros((M_BLOCK, N_BLOCK), dtype=tl.float32)
        # Rows of no expert have no weight to multiply with.
        for s in range(0, tl.where(group < NUM_EXPERTS, K, 0), S_BLOCK):
            x_MS = tl.load(x_ptr_MS) if EVEN_K else tl.load(x_ptr_MS, mask=s_S[None, :] < K - s, other=0.0)
            if EVEN_K and EVEN_N:
                w_SN = tl.load(w_ptr_SN)
            else:
                w_SN = tl.load(w_ptr_SN, mask=(s_S[:, None] < K - s) & (col_N[None, :] < N), other=0.0)
            acc_MN = tl.dot(x_MS, w_SN, acc_MN, input_precision="ieee")
            x_ptr_MS += S_BLOCK
            w_ptr_SN += S_BLOCK * w_stride_k
        y_ptr_MN = y_ptr + row_M.to(tl.int64)[:, None] * N + col_N[None, :]
        store(y_ptr_MN, acc_MN, (row_M[:, None] < end) & (col_N[None, :] < N), False)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_mm_descriptor_kernel(
    x_desc,
    w_desc,
    y_ptr,
    offsets_ptr,
    num_rows,
    K,
    N,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
    BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """As `grouped_mm_kernel`, of tensor descriptors: x [R, K]; w [E, K, N], or [E, N, K] if TRANSPOSED."""
    num_col_tiles = tl.cdiv(N, N_BLOCK)
    last_G = last_tiles(offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS, GROUPS, M_BLOCK)
    for tile in range(tl.program_id(0), tl.max(last_G, 0), tl.num_programs(0)):
        group, row, end, col_tile = locate(
            tile, last_G, offsets_ptr, num_rows, num_col_tiles, NUM_EXPERTS, M_BLOCK, BAND
        )
        acc_MN = tl.zeros((M_BLOCK, N_BLOCK), dtype=tl.float32)
        for s in range(0, tl.where(group < NUM_EXPERTS, K, 0), S_BLOCK):
            # Beyond K a descriptor gives zeros. Rows of the next group come along and are not stored.
            x_MS = x_desc.load([row, s])
            if TRANSPOSED:
                w_SN = w_desc.load([group, col_tile * N_BLOCK, s]).reshape(N_BLOCK, S_BLOCK).T
            else:
                w_SN = w_desc.load([group, s, col_tile * N_BLOCK]).reshape(S_BLOCK, N_BLOCK)
            acc_MN = tl.dot(x_MS, w_SN, acc_MN, input_precision="ieee")
        row_M = row + tl.arange(0, M_BLOCK)
        col_N = col_tile * N_BLOCK + tl.arange(0, N_BLOCK)
        y_ptr_MN = y_ptr + row_M.to(tl.int64)[:, None] * N + col_N[None, :]
        store(y_ptr_MN, acc_MN, (row_M[:, None] < end) & (col_N[None, :] < N), False)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_wgrad_kernel(
    x_ptr,
    grad_ptr,
    out_ptr,
    offsets_ptr,
    accumulate_ptr,
    num_rows,
    K,
    N,
    x_stride_r,
    grad_stride_r,
    out_stride_e,
    out_stride_k,
    out_stride_n,
    ADD: tl.constexpr,
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
    BAND: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """out_EKN; one program sums all rows of a tile of an expert, and with ADD adds them to what is there.

    Without rows a tile is zero, or with ADD left alone, as are experts that accumulate_ptr leaves out.
    """
    num_row_tiles, num_col_tiles = tl.cdiv(K, M_BLOCK), tl.cdiv(N, N_BLOCK)
    expert = tl.program_id(0) // (num_row_tiles * num_col_tiles)
    row_tile, col_tile = in_bands(
        tl.program_id(0) % (num_row_tiles * num_col_tiles), num_row_tiles, num_col_tiles, BAND
    )
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.minimum(tl.load(offsets_ptr + expert), num_rows)
    wanted = True
    if ADD:
        wanted = start < end
        if accumulate_ptr is not None:
            wanted = wanted & tl.load(accumulate_ptr + expert)
    if wanted:
        k_M = row_tile * M_BLOCK + tl.arange(0, M_BLOCK)
        n_N = col_tile * N_BLOCK + tl.arange(0, N_BLOCK)
        r_S = tl.arange(0, S_BLOCK)
        first = start.to(tl.int64)
        x_ptr_SM = x_ptr + first * x_stride_r + r_S[:, None] * x_stride_r + k_M[None, :]
        grad_ptr_SN = grad_ptr + first * grad_stride_r + r_S[:, None] * grad_stride_r + n_N[None, :]
        acc_MN = tl.zeros((M_BLOCK, N_BLOCK), dtype=tl.float32)
        for r in range(start, end, S_BLOCK):
            here_S1 = r_S[:, None] < end - r
            if EVEN_K:
                x_SM = tl.load(x_ptr_SM, mask=here_S1, other=0.0)
            else:
                x_SM = tl.load(x_ptr_SM, mask=here_S1 & (k_M[None, :] < K), other=0.0)
            if EVEN_N:
                grad_SN = tl.load(grad_ptr_SN, mask=here_S1, other=0.0)
            else:
                grad_SN = tl.load(grad_ptr_SN, mask=here_S1 & (n_N[None, :] < N), other=0.0)
            acc_MN = tl.dot(x_SM.T, grad_SN, acc_MN, input_precision="ieee")
            x_ptr_SM += S_BLOCK * x_stride_r
            grad_ptr_SN += S_BLOCK * grad_stride_r
        # In halves: a main gradient of a whole tile beside the sums does not fit in the registers.
        half: tl.constexpr = N_BLOCK // 2
        left_MH, right_MH = tl.split(acc_MN.reshape(M_BLOCK, 2, half).permute(0, 2, 1))
        out_ptr_M = out_ptr + expert.to(tl.int64) * out_stride_e + k_M[:, None] * out_stride_k
        n_H = col_tile * N_BLOCK + tl.arange(0, half)
        store(out_ptr_M + n_H[None, :] * out_stride_n, left_MH, (k_M[:, None] < K) & (n_H[None, :] < N), ADD)
        n_H += half
        store(out_ptr_M + n_H[None, :] * out_stride_n, right_MH, (k_M[:, None] < K) & (n_H[None, :] < N), ADD)


@triton.jit
def store(out_ptr, value, mask, ADD: tl.constexpr):
    """Round once and store; with ADD the sum with what is there."""
    if ADD:
        value += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, value.to(out_ptr.dtype.element_ty), mask=mask)


def _mm_case(name: str, operation: Operation, dtype: str, k: int, n: int, rows: int, **changes: Any) -> CompileCase:
    """A product as it is launched for weights [128, K, N] and that many rows per expert; K and N are arguments."""
    tiles = replace(tile_config(operation, 32 if dtype == "fp32" else 16, k, n, rows), **changes)
    transposed = operation == "dgrad"
    inner, outer = (n, k) if transposed else (k, n)
    signature = {"y_ptr": f"*{dtype}", "offsets_ptr": "*i32", "num_rows": "i32", "K": "i32", "N": "i32"}
    constants = {"NUM_EXPERTS": _EXPERTS, "GROUPS": 2 * _EXPERTS, **_blocks(tiles)}
    aligned = ["y_ptr", "offsets_ptr"]
    if tiles.loads == "descriptors":
        w_block = [tiles.block_n, tiles.block_sum] if transposed else [tiles.block_sum, tiles.block_n]
        signature["x_desc"] = f"tensordesc<{dtype}[{tiles.block_m}, {tiles.block_sum}]>"
        signature["w_desc"] = f"tensordesc<{dtype}[1, {w_block[0]}, {w_block[1]}]>"
        constants["TRANSPOSED"] = transposed
        lengths = ["K", "N"]
    else:
        unit, stride = ("w_stride_k", "w_stride_n") if transposed else ("w_stride_n", "w_stride_k")
        lengths = ["K", "N", "x_stride_r", "w_stride_e", stride]
        signature |= {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", **dict.fromkeys(lengths, "i32")}
        constants |= {unit: 1, "EVEN_K": inner % tiles.block_sum == 0, "EVEN_N": outer % tiles.block_n == 0}
        aligned += ["x_ptr", "w_ptr"]
    return CompileCase(
        name=f"grouped_gemm {operation} {name}",
        kernel=grouped_mm_descriptor_kernel if tiles.loads == "descriptors" else grouped_mm_kernel,
        signature=signature,
        constants=constants,
        multiples_of_16=(*aligned, *(lengths if k % 16 == n % 16 == 0 else ())),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _wgrad_case(name: str, dtype: str, k: int, n: int, main: str | None = None) -> CompileCase:
    """Main is the dtype of the main gradient that it adds to."""
    tiles = tile_config("wgrad", 32 if dtype == "fp32" else 16, k, n, _ROWS)
    pointers = {"x_ptr": f"*{dtype}", "grad_ptr": f"*{dtype}", "out_ptr": f"*{main or dtype}", "offsets_ptr": "*i32"}
    lengths = ("K", "N", "x_stride_r", "grad_stride_r", "out_stride_e", "out_stride_k")
    return CompileCase(
        name=f"grouped_gemm wgrad {name}",
        kernel=grouped_wgrad_kernel,
        signature={**pointers, **dict.fromkeys(("num_rows", *lengths), "i32"), "accumulate_ptr": "*i1"},
        constants={
            "out_stride_n": 1,
            **({} if main else {"accumulate_ptr": None}),
            "ADD": main is not None,
            **_blocks(tiles),
            "EVEN_K": k % tiles.block_m == 0,
            "EVEN_N": n % tiles.block_n == 0,
        },
        multiples_of_16=(*pointers, *(lengths if k % 16 == n % 16 == 0 else ())),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _blocks(tiles: TileConfig) -> dict[str, int]:
    return {"M_BLOCK": tiles.block_m, "N_BLOCK": tiles.block_n, "S_BLOCK": tiles.block_sum, "BAND": tiles.band}


_EXPERTS, _ROWS = 128, 512
# As in DeepSeek-V3; with a remainder in every tile; with few columns; aligned to nothing.
_LARGE, _REMAINDER, _NARROW, _UNALIGNED = (7168, 4096), (2880, 2880), (64, 64), (999, 333)
_DTYPES_AND_SHAPES = (
    *(("bf16", shape) for shape in (_LARGE, _REMAINDER, _NARROW, _UNALIGNED)),
    ("fp16", _LARGE),
    *(("fp32", shape) for shape in (_LARGE, _UNALIGNED)),
)

COMPILE_CASES = (
    *(
        _mm_case(f"{dtype} K{k} N{n}", operation, dtype, k, n, _ROWS)
        for operation in ("forward", "dgrad")
        for dtype, (k, n) in _DTYPES_AND_SHAPES
    ),
    _mm_case("bf16 K7168 N4096 few rows", "forward", "bf16", *_LARGE, 32),
    _mm_case("bf16 K7168 N4096 few rows", "dgrad", "bf16", *_LARGE, 32),
    _mm_case("bf16 K7168 N4096 descriptors", "forward", "bf16", *_LARGE, _ROWS, loads="descriptors"),
    _mm_case("bf16 K7168 N4096 descriptors", "dgrad", "bf16", *_LARGE, _ROWS, loads="descriptors"),
    *(_wgrad_case(f"{dtype} to fp32 K{k} N{n}", dtype, k, n, "fp32") for dtype, (k, n) in _DTYPES_AND_SHAPES),
    _wgrad_case("bf16 to bf16 K7168 N4096", "bf16", *_LARGE, "bf16"),
    _wgrad_case("bf16 K7168 N4096", "bf16", *_LARGE),
)
