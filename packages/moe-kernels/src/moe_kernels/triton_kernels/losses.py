"""Scores and balance losses. Floats are added in a fixed order, without atomics; only integers are counted with them.

A balance loss is a weighted sum of scores: of one number per segment and expert, its slope, times the score of every
token of the segment. Value and gradient read that slope, which is made of counts alone.

Shape legend: T tokens, K choices per token, E experts, G segments.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows
from moe_kernels.triton_kernels.operator import operator
from moe_kernels.triton_kernels.routing import NUM_WARPS, exponentials, log_sigmoid, tile_rows

# Choices of one program, and tokens that a program adds up at a time.
_CHOICES = 1024
_TOKENS = 2048


@triton.jit
def scores_forward_kernel(
    logits_ptr,
    scores_ptr,
    logits_stride,
    T,
    E: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    known = expert < E
    mask = (row < T)[:, None] & known[None, :]
    logit = tl.load(logits_ptr + row[:, None] * logits_stride + expert[None, :], mask, other=0.0).to(tl.float32)
    if SIGMOID:
        logit = log_sigmoid(logit)
    power, total = exponentials(logit, known)
    tl.store(scores_ptr + row[:, None] * E + expert[None, :], power / total[:, None], mask)


@triton.jit
def scores_backward_kernel(
    grad_ptr,
    logits_ptr,
    scores_ptr,
    dlogits_ptr,
    logits_stride,
    T,
    E: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    mask = (row < T)[:, None] & (expert < E)
    place = row[:, None] * E + expert
    score = tl.load(scores_ptr + place, mask, other=0.0)
    grad = tl.load(grad_ptr + place, mask, other=0.0)
    dlogit = score * (grad - tl.sum(score * grad, 1)[:, None])
    if SIGMOID:
        logit = tl.load(logits_ptr + row[:, None] * logits_stride + expert, mask, other=0.0).to(tl.float32)
        dlogit = dlogit * tl.sigmoid(-logit)
    tl.store(dlogits_ptr + place, dlogit.to(dlogits_ptr.dtype.element_ty), mask)


@triton.jit
def z_forward_kernel(
    logits_ptr,
    loss_ptr,
    lse_ptr,
    logits_stride,
    T,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    known = expert < E
    mask = (row < T)[:, None] & known[None, :]
    logit = tl.load(logits_ptr + row[:, None] * logits_stride + expert[None, :], mask, other=0.0).to(tl.float32)
    _, total = exponentials(logit, known)
    lse = tl.max(tl.where(known[None, :], logit, float("-inf")), 1) + tl.log(total)
    tl.store(loss_ptr + row, lse * lse, row < T)
    tl.store(lse_ptr + row, lse, row < T)


@triton.jit
def z_backward_kernel(
    grad_ptr,
    logits_ptr,
    lse_ptr,
    dlogits_ptr,
    logits_stride,
    T,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    mask = (row < T)[:, None] & (expert < E)
    logit = tl.load(logits_ptr + row[:, None] * logits_stride + expert, mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, row < T, other=0.0)
    slope = tl.load(grad_ptr + row, row < T, other=0.0) * 2.0 * lse
    dlogit = tl.exp(logit - lse[:, None]) * slope[:, None]
    tl.store(dlogits_ptr + row[:, None] * E + expert, dlogit.to(dlogits_ptr.dtype.element_ty), mask)


@triton.jit
def count_kernel(ids_ptr, segment_ptr, valid_ptr, counts_ptr, T, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Choices of each expert in each segment, and in the last column the valid tokens of the segment."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = place // K
    used = token < T
    if valid_ptr is not None:
        used = used & (tl.load(valid_ptr + token, used, other=0) != 0)
    id = tl.load(ids_ptr + place, used, other=-1)  # noqa: A001
    counts_ptr += tl.load(segment_ptr + token, used, other=0) * (E + 1)
    one = tl.full([BLOCK], 1, tl.int64)
    tl.atomic_add(counts_ptr + id, one, used & (id >= 0) & (id < E), sem="relaxed")
    tl.atomic_add(counts_ptr + E, one, used & (place % K == 0), sem="relaxed")


@triton.jit
def slope_kernel(counts_ptr, slope_ptr, factor, E: tl.constexpr, BLOCK_E: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    counts_ptr += segment * (E + 1)
    tokens = tl.maximum(tl.load(counts_ptr + E), 1).to(tl.float32)
    count = tl.load(counts_ptr + expert, expert < E, other=0).to(tl.float32)
    tl.store(slope_ptr + segment * E + expert, count * factor / (tokens * tokens), expert < E)


@triton.jit
def weigh_kernel(
    scores_ptr,
    slope_ptr,
    segment_ptr,
    valid_ptr,
    weighed_ptr,
    scores_stride,
    T,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each token's part of the loss of its segment; zero for tokens that belong to none, whatever their scores."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < T
    if valid_ptr is not None:
        used = used & (tl.load(valid_ptr + row, used, other=0) != 0)
    expert = tl.arange(0, BLOCK_E)[None, :]
    mask = used[:, None] & (expert < E)
    slope_ptr += expert
    if segment_ptr is not None:
        slope_ptr += tl.load(segment_ptr + row, used, other=0)[:, None] * E
    score = tl.load(scores_ptr + row[:, None] * scores_stride + expert, mask, other=0.0)
    tl.store(weighed_ptr + row, tl.sum(score * tl.load(slope_ptr, mask, other=0.0), 1), row < T)


@triton.jit
def segment_sum_kernel(weighed_ptr, segment_ptr, sums_ptr, T, BLOCK_T: tl.constexpr):
    segment = tl.program_id(0)
    sums = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, T, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        mine = token < T
        if segment_ptr is not None:
            mine = mine & (tl.load(segment_ptr + token, mine, other=-1) == segment)
        sums += tl.load(weighed_ptr + token, mine, other=0.0)
    tl.store(sums_ptr + segment, tl.sum(sums, 0))


@triton.jit
def weigh_backward_kernel(
    grad_ptr,
    slope_ptr,
    segment_ptr,
    valid_ptr,
    dscores_ptr,
    T,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < T
    if valid_ptr is not None:
        used = used & (tl.load(valid_ptr + row, used, other=0) != 0)
    expert = tl.arange(0, BLOCK_E)[None, :]
    segment = tl.zeros([ROWS], tl.int64)
    if segment_ptr is not None:
        segment = tl.load(segment_ptr + row, used, other=0)
    grad = tl.load(grad_ptr + segment, used, other=0.0)
    slope = tl.load(slope_ptr + segment[:, None] * E + expert, used[:, None] & (expert < E), other=0.0)
    dscore = tl.where(used[:, None], slope * grad[:, None], 0.0)
    tl.store(dscores_ptr + row[:, None] * E + expert, dscore, (row < T)[:, None] & (expert < E))


def _rows(x: Tensor) -> tuple[Tensor, dict[str, Any], tuple[int]]:
    """Rows with neighbouring features, sizes of a program that takes a few of them, and the grid."""
    x_TE = feature_rows(x)
    width = next_power_of_2(x_TE.shape[1])
    rows = tile_rows(width)
    sizes = {"E": x_TE.shape[1], "BLOCK_E": width, "ROWS": rows, "num_warps": NUM_WARPS}
    return x_TE, sizes, (cdiv(x_TE.shape[0], rows),)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@operator(
    "scores(Tensor logits, bool sigmoid) -> Tensor",
    fake=lambda logits, sigmoid: logits.new_empty(logits.shape, dtype=torch.float32),
)
def scores(logits_TE: Tensor, sigmoid: bool) -> Tensor:
    """Softmax of the logits or of the logarithms of their sigmoids."""
    scores_TE = logits_TE.new_empty(logits_TE.shape, dtype=torch.float32)
    logits_TE, sizes, grid = _rows(logits_TE)
    scores_forward_kernel[grid](logits_TE, scores_TE, logits_TE.stride(0), logits_TE.shape[0], SIGMOID=sigmoid, **sizes)
    return scores_TE


@operator(
    "scores_backward(Tensor grad, Tensor logits, Tensor scores, bool sigmoid) -> Tensor",
    fake=lambda grad, logits, scores, sigmoid: logits.new_empty(logits.shape),
)
def scores_backward(grad_TE: Tensor, logits_TE: Tensor, scores_TE: Tensor, sigmoid: bool) -> Tensor:
    """Gradient of the logits, in their dtype."""
    dlogits_TE = logits_TE.new_empty(logits_TE.shape)
    logits_TE, sizes, grid = _rows(logits_TE)
    scores_backward_kernel[grid](
        grad_TE.contiguous(),
        logits_TE,
        scores_TE,
        dlogits_TE,
        logits_TE.stride(0),
        logits_TE.shape[0],
        SIGMOID=sigmoid,
        **sizes,
    )
    return dlogits_TE


def _fake_z(logits: Tensor) -> tuple[Tensor, Tensor]:
    loss, lse = (logits.new_empty(logits.shape[:-1], dtype=torch.float32) for _ in range(2))
    return loss, lse


@operator("z_loss(Tensor logits) -> (Tensor, Tensor)", fake=_fake_z)
def z_loss(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The square of the logarithm of each token's partition function, and the logarithm."""
    loss_T, lse_T = _fake_z(logits_TE)
    logits_TE, sizes, grid = _rows(logits_TE)
    z_forward_kernel[grid](logits_TE, loss_T, lse_T, logits_TE.stride(0), logits_TE.shape[0], **sizes)
    return loss_T, lse_T


@operator(
    "z_loss_backward(Tensor grad, Tensor logits, Tensor lse) -> Tensor",
    fake=lambda grad, logits, lse: logits.new_empty(logits.shape),
)
def z_loss_backward(grad_T: Tensor, logits_TE: Tensor, lse_T: Tensor) -> Tensor:
    """Gradient of the logits, in their dtype."""
    dlogits_TE = logits_TE.new_empty(logits_TE.shape)
    logits_TE, sizes, grid = _rows(logits_TE)
    z_backward_kernel[grid](
        grad_T.contiguous(), logits_TE, lse_T, dlogits_TE, logits_TE.stride(0), logits_TE.shape[0], **sizes
    )
    return dlogits_TE


@operator(
    "segment_counts(Tensor ids, Tensor segment, Tensor? valid, int segments, int experts) -> Tensor",
    fake=lambda ids, segment, valid, segments, experts: ids.new_empty((segments, experts + 1)),
)
def segment_counts(ids_TK: Tensor, segment_T: Tensor, valid_T: Tensor | None, segments: int, experts: int) -> Tensor:
    """Choices of each expert in each segment, and behind them its valid tokens: int64 [G, E + 1]."""
    counts = ids_TK.new_zeros((segments, experts + 1))
    count_kernel[(cdiv(ids_TK.numel(), _CHOICES),)](
        ids_TK.contiguous(),
        segment_T.contiguous(),
        _dense(valid_T),
        counts,
        ids_TK.shape[0],
        E=experts,
        K=ids_TK.shape[1],
        BLOCK=_CHOICES,
    )
    return counts


@operator(
    "balance_slope(Tensor counts, float factor) -> Tensor",
    fake=lambda counts, factor: counts.new_empty((counts.shape[0], counts.shape[1] - 1), dtype=torch.float32),
)
def balance_slope(counts: Tensor, factor: float) -> Tensor:
    """factor * n_ge / T_g² from the counts of `segment_counts`: [G, E]."""
    segments, experts = counts.shape[0], counts.shape[1] - 1
    slope_GE = counts.new_empty((segments, experts), dtype=torch.float32)
    slope_kernel[(segments,)](
        counts.contiguous(), slope_GE, factor, E=experts, BLOCK_E=next_power_of_2(experts), num_warps=NUM_WARPS
    )
    return slope_GE


@operator(
    "weighted_scores(Tensor scores, Tensor slope, Tensor? segment, Tensor? valid) -> Tensor",
    fake=lambda scores, slope, segment, valid: scores.new_empty(slope.shape[0], dtype=torch.float32),
)
def weighted_scores(scores_TE: Tensor, slope_GE: Tensor, segment_T: Tensor | None, valid_T: Tensor | None) -> Tensor:
    """sum over the valid t of segment g and over e of slope_ge * scores_te: [G]; None is one segment of all tokens."""
    scores_TE, sizes, grid = _rows(scores_TE)
    tokens, segments = scores_TE.shape[0], slope_GE.shape[0]
    weighed_T, sums_G = (scores_TE.new_empty(size, dtype=torch.float32) for size in (tokens, segments))
    segment_T = _dense(segment_T)
    weigh_kernel[grid](scores_TE, slope_GE, segment_T, _dense(valid_T), weighed_T, scores_TE.stride(0), tokens, **sizes)
    segment_sum_kernel[(segments,)](weighed_T, segment_T, sums_G, tokens, BLOCK_T=_TOKENS)
    return sums_G


def _fake_weighted_backward(
    grad: Tensor, slope: Tensor, segment: Tensor | None, valid: Tensor | None, tokens: int
) -> Tensor:
    return slope.new_empty((tokens, slope.shape[1]))


@operator(
    "weighted_scores_backward(Tensor grad, Tensor slope, Tensor? segment, Tensor? valid, SymInt tokens) -> Tensor",
    fake=_fake_weighted_backward,
)
def weighted_scores_backward(
    grad_G: Tensor, slope_GE: Tensor, segment_T: Tensor | None, valid_T: Tensor | None, tokens: int
) -> Tensor:
    """Gradient of the scores, [T, E]."""
    dscores_TE = _fake_weighted_backward(grad_G, slope_GE, segment_T, valid_T, tokens)
    _, sizes, grid = _rows(dscores_TE)
    weigh_backward_kernel[grid](
        grad_G.contiguous(), slope_GE, _dense(segment_T), _dense(valid_T), dscores_TE, tokens, **sizes
    )
    return dscores_TE


def _compile_cases() -> tuple[CompileCase, ...]:
    fp32 = ("logits", "scores", "dlogits", "dscores", "loss", "lse", "grad", "slope", "weighed", "sums")
    types = dict.fromkeys([f"{name}_ptr" for name in fp32], "*fp32") | {"valid_ptr": "*i1", "factor": "fp32"}
    types |= dict.fromkeys(("ids_ptr", "segment_ptr", "counts_ptr"), "*i64")
    cases = []
    # DeepSeek-V3, Qwen3-30B-A3B.
    for experts, sigmoid in ((256, True), (128, False)):
        width: dict[str, Any] = {"E": experts, "BLOCK_E": experts}
        tile = width | {"ROWS": tile_rows(experts)}
        rule = tile | {"SIGMOID": sigmoid}
        for name, kernel, constants, num_warps in (
            ("scores forward", scores_forward_kernel, rule, NUM_WARPS),
            ("scores backward", scores_backward_kernel, rule, NUM_WARPS),
            ("z_loss forward", z_forward_kernel, tile, NUM_WARPS),
            ("z_loss backward", z_backward_kernel, tile, NUM_WARPS),
            ("segment_counts", count_kernel, {"E": experts, "K": 8, "BLOCK": _CHOICES}, 4),
            ("balance_slope", slope_kernel, width, NUM_WARPS),
            ("weighted_scores forward", weigh_kernel, tile, NUM_WARPS),
            ("weighted_scores backward", weigh_backward_kernel, tile, NUM_WARPS),
        ):
            label = f"{name} E{experts}{' sigmoid' if sigmoid and 'SIGMOID' in constants else ''}"
            cases.append(compile_case(label, kernel, constants, types=types, num_warps=num_warps))
    sums = compile_case("segment_sum", segment_sum_kernel, {"BLOCK_T": _TOKENS}, types=types, num_warps=4)
    return (*cases, sums)


COMPILE_CASES = _compile_cases()
