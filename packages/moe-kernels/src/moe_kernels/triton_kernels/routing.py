"""The router's decision: scores, choice, weights and counts of a few tokens in one program.

A row of logits is read once and stays in registers. Shape legend: T tokens, K choices per token, E experts, G groups,
W experts of a group.
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

# One warp has 16 logits in every thread: whole rows, so that no reduction leaves the warp.
NUM_WARPS = 1
_TILE = 512
# Shorter rows than those of 16 experts would only make the choice of a program longer.
_MOST_ROWS = 32

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_HIGHEST = tl.constexpr(3.4028234663852886e38)


def tile_rows(width: int) -> int:
    """Rows of one program, of padded width."""
    return min(max(_TILE // width, 1), _MOST_ROWS)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def finite(x):
    """Infinities as the largest numbers, NaN as the smallest: what `stable_top_k` compares."""
    x = tl.where(x != x, _LOWEST, x)
    return tl.minimum(tl.maximum(x, _LOWEST), _HIGHEST)


@triton.jit
def exponentials(logit, known):
    """exp(logit - maximum) of each row, and their sum; NaN where a row holds NaN or +inf, or nothing but -inf."""
    logit = tl.where(known[None, :], logit, float("-inf"))
    power = tl.where(known[None, :], tl.exp(logit - tl.max(logit, 1)[:, None]), 0.0)
    return power, tl.sum(power, 1)


@triton.jit
def best_positions(x, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Positions of the K largest of each row of finite numbers, -inf apart; the first wins a tie."""
    position = tl.arange(0, x.shape[1])[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    best = tl.full([x.shape[0], BLOCK_K], 0, tl.int32)
    for k in range(K):
        first = tl.argmax(x, 1)[:, None]
        best = tl.where(choice == k, first, best)
        x = tl.where(position == first, float("-inf"), x)
    return best


@triton.jit
def close_groups(score, G: tl.constexpr, OPEN: tl.constexpr, JUDGES: tl.constexpr, BLOCK_G: tl.constexpr):
    """-inf in every group but the OPEN ones with the largest sums of their JUDGES best scores."""
    rows: tl.constexpr = score.shape[0]
    width: tl.constexpr = score.shape[1] // BLOCK_G
    score = tl.reshape(score, [rows, BLOCK_G, width])
    within = tl.arange(0, width)[None, None, :]
    group = tl.arange(0, BLOCK_G)[None, :]
    # NaN is the best score of its group, and makes it the last of the groups.
    unknown = tl.max((score != score).to(tl.int32), 2) > 0
    rest = tl.where(score != score, _LOWEST, score)
    judged = tl.zeros([rows, BLOCK_G], tl.float32)
    for _ in range(JUDGES):
        value, place = tl.max(rest, 2, return_indices=True)
        judged += value
        rest = tl.where(within == place[:, :, None], float("-inf"), rest)
    judged = tl.where(group < G, finite(tl.where(unknown, _LOWEST, judged)), float("-inf"))
    is_open = tl.full([rows, BLOCK_G], 0, tl.int32)
    for _ in range(OPEN):
        first = tl.argmax(judged, 1)[:, None]
        is_open = tl.where(group == first, 1, is_open)
        judged = tl.where(group == first, float("-inf"), judged)
    score = tl.where(is_open[:, :, None] > 0, score, float("-inf"))
    return tl.reshape(score, [rows, BLOCK_G * width])


@triton.jit
def route_forward_kernel(
    logits_ptr,
    bias_ptr,
    valid_ptr,
    given_ptr,
    ids_ptr,
    probs_ptr,
    counts_ptr,
    logits_stride,
    T,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    OPEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Ids, weights, and the choices of every expert with the number of bad rows behind them.

    Groups are padded one by one, so that a row becomes a table of them without a gather. An id outside the experts,
    which only a CPU can refuse, weighs NaN.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < T
    if valid_ptr is not None:
        used = used & (tl.load(valid_ptr + row, used, other=0) != 0)
    position = tl.arange(0, BLOCK_G * BLOCK_W)
    expert = position // BLOCK_W * (E // G) + position % BLOCK_W
    known = (position // BLOCK_W < G) & (position % BLOCK_W < E // G)
    logits_ptr += row[:, None] * logits_stride
    logit = tl.load(logits_ptr + expert[None, :], used[:, None] & known[None, :], other=0.0).to(tl.float32)

    highest = tl.where(logit != logit, float("inf"), tl.where(known[None, :], logit, float("-inf")))
    bad = tl.abs(tl.max(highest, 1)) == float("inf")
    num_bad = tl.sum(bad.to(tl.int64), 0)
    tl.atomic_add(counts_ptr + E, num_bad, num_bad > 0, sem="relaxed")

    choice = tl.arange(0, BLOCK_K)[None, :]
    there = used[:, None] & (choice < K)
    place = row[:, None] * K + choice
    if given_ptr is not None:
        id = tl.load(given_ptr + place, there, other=-1)  # noqa: A001
    else:
        if bias_ptr is not None or G > 1:
            if SIGMOID:
                score = tl.sigmoid(logit)
            else:
                power, total = exponentials(logit, known)
                score = power / total[:, None]
            if bias_ptr is not None:
                score += tl.load(bias_ptr + expert, known, other=0.0).to(tl.float32)[None, :]
            if G > 1:
                score = tl.where(known[None, :], score, float("-inf"))
                score = close_groups(score, G, OPEN, K // OPEN, BLOCK_G)
        else:
            score = logit
        best = best_positions(tl.where(known[None, :], finite(score), float("-inf")), K, BLOCK_K)
        id = (best // BLOCK_W * (E // G) + best % BLOCK_W).to(tl.int64)  # noqa: A001
    id = tl.where(there, id, -1)  # noqa: A001
    there = id >= 0
    tl.store(ids_ptr + place, id, (row < T)[:, None] & (choice < K))
    tl.atomic_add(counts_ptr + id, tl.full(id.shape, 1, tl.int64), there & (id < E), sem="relaxed")

    chosen = tl.load(logits_ptr + id, there & (id < E), other=float("nan")).to(tl.float32)
    if OVER_CHOSEN:
        # Of logarithms, so that the sum of the chosen may underflow. Lowest and not -inf where there is no choice.
        chosen = tl.where(there, log_sigmoid(chosen) if SIGMOID else chosen, _LOWEST)
        power = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        prob = power / tl.sum(power, 1)[:, None]
    elif SIGMOID:
        prob = tl.sigmoid(chosen)
    else:
        _, total = exponentials(logit, known)
        highest = tl.max(tl.where(known[None, :], logit, float("-inf")), 1)
        prob = tl.exp(chosen - highest[:, None]) / total[:, None]
    tl.store(probs_ptr + place, tl.where(there, prob * scale, 0.0), (row < T)[:, None] & (choice < K))


@triton.jit
def route_backward_kernel(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    probs_ptr,
    dlogits_ptr,
    logits_stride,
    T,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    OVER_CHOSEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < T
    expert = tl.arange(0, BLOCK_E)
    known = expert < E
    choice = tl.arange(0, BLOCK_K)[None, :]
    place = row[:, None] * K + choice
    held = inside[:, None] & (choice < K)
    id = tl.load(ids_ptr + place, held, other=-1)  # noqa: A001
    there = id >= 0
    prob = tl.load(probs_ptr + place, held, other=0.0)
    grad = tl.load(grad_ptr + place, there, other=0.0)
    logits_ptr += row[:, None] * logits_stride
    dchosen = prob * grad
    if OVER_CHOSEN:
        dchosen = prob * (grad - tl.sum(dchosen, 1)[:, None] / scale)
    if SIGMOID:
        chosen = tl.load(logits_ptr + id, there & (id < E), other=0.0).to(tl.float32)
        dchosen = dchosen * tl.sigmoid(-chosen)
    dlogit = tl.zeros([ROWS, BLOCK_E], tl.float32)
    if not (SIGMOID or OVER_CHOSEN):
        # Those of a token without choices are not read: a zero gradient does not stop a NaN.
        used = tl.max(there.to(tl.int32), 1) > 0
        mask = used[:, None] & known[None, :]
        power, total = exponentials(tl.load(logits_ptr + expert[None, :], mask, other=0.0).to(tl.float32), known)
        dlogit -= power / total[:, None] * tl.sum(dchosen, 1)[:, None]
    # One choice after the other: the same expert may be chosen twice.
    for k in range(K):
        id_k = tl.sum(tl.where(choice == k, id, 0), 1)[:, None]
        dlogit += tl.where(expert[None, :] == id_k, tl.sum(tl.where(choice == k, dchosen, 0.0), 1)[:, None], 0.0)
    tl.store(
        dlogits_ptr + row[:, None] * E + expert[None, :],
        dlogit.to(dlogits_ptr.dtype.element_ty),
        inside[:, None] & known[None, :],
    )


@triton.jit
def top_k_kernel(
    x_ptr,
    ids_ptr,
    x_stride,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < T)[:, None]
    position = tl.arange(0, BLOCK_E)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + position, inside & (position < E), other=0.0).to(tl.float32)
    best = best_positions(tl.where(position < E, finite(x), float("-inf")), K, BLOCK_K)
    choice = tl.arange(0, BLOCK_K)[None, :]
    tl.store(ids_ptr + row[:, None] * K + choice, best.to(tl.int64), inside & (choice < K))


def _fake_route(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    given: Tensor | None,
    top_k: int,
    groups: int,
    group_top_k: int,
    sigmoid: bool,
    over_chosen: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    ids = logits.new_empty((tokens, top_k), dtype=torch.int64)
    probs = logits.new_empty((tokens, top_k), dtype=torch.float32)
    return ids, probs, logits.new_empty(experts + 1, dtype=torch.int64)


@operator(
    "route(Tensor logits, Tensor? bias, Tensor? valid, Tensor? given, int top_k, int groups, int group_top_k, "
    "bool sigmoid, bool over_chosen, float scale) -> (Tensor, Tensor, Tensor)",
    fake=_fake_route,
)
def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    given_TK: Tensor | None,
    top_k: int,
    groups: int,
    group_top_k: int,
    sigmoid: bool,
    over_chosen: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and weights of the choices, and [E + 1] the choices of each expert and the number of bad rows.

    Args:
        given_TK: choices to repeat.
        over_chosen: weights are normalised over the chosen experts.
    """
    logits_TE = feature_rows(logits_TE)
    tokens, experts = logits_TE.shape
    ids_TK = logits_TE.new_empty((tokens, top_k), dtype=torch.int64)
    probs_TK = logits_TE.new_empty((tokens, top_k), dtype=torch.float32)
    counts = logits_TE.new_zeros(experts + 1, dtype=torch.int64)
    block_g, block_w = next_power_of_2(groups), next_power_of_2(experts // groups)
    rows = tile_rows(block_g * block_w)
    route_forward_kernel[(cdiv(tokens, rows),)](
        logits_TE,
        None if bias_E is None else bias_E.contiguous(),
        None if valid_T is None else valid_T.contiguous(),
        None if given_TK is None else given_TK.contiguous(),
        ids_TK,
        probs_TK,
        counts,
        logits_TE.stride(0),
        tokens,
        scale,
        E=experts,
        K=top_k,
        G=groups,
        OPEN=group_top_k,
        SIGMOID=sigmoid,
        OVER_CHOSEN=over_chosen,
        BLOCK_G=block_g,
        BLOCK_W=block_w,
        BLOCK_K=next_power_of_2(top_k),
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return ids_TK, probs_TK, counts


@operator(
    "route_backward(Tensor grad, Tensor logits, Tensor ids, Tensor probs, bool sigmoid, bool over_chosen, float scale) "
    "-> Tensor",
    fake=lambda grad, logits, ids, probs, sigmoid, over_chosen, scale: logits.new_empty(logits.shape),
)
def route_backward(
    grad_TK: Tensor,
    logits_TE: Tensor,
    ids_TK: Tensor,
    probs_TK: Tensor,
    sigmoid: bool,
    over_chosen: bool,
    scale: float,
) -> Tensor:
    """Gradient of the logits, in their dtype."""
    logits_TE = feature_rows(logits_TE)
    tokens, experts = logits_TE.shape
    dlogits_TE = logits_TE.new_empty(logits_TE.shape)
    width = next_power_of_2(experts)
    rows = tile_rows(width)
    route_backward_kernel[(cdiv(tokens, rows),)](
        grad_TK.contiguous(),
        logits_TE,
        ids_TK,
        probs_TK,
        dlogits_TE,
        logits_TE.stride(0),
        tokens,
        scale,
        E=experts,
        K=ids_TK.shape[1],
        SIGMOID=sigmoid,
        OVER_CHOSEN=over_chosen,
        BLOCK_E=width,
        BLOCK_K=next_power_of_2(ids_TK.shape[1]),
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return dlogits_TE


@operator("top_k(Tensor x, int k) -> Tensor", fake=lambda x, k: x.new_empty((*x.shape[:-1], k), dtype=torch.int64))
def top_k(x: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, int64; the lower id wins a tie."""
    x_TE = feature_rows(x)
    tokens, experts = x_TE.shape
    ids_TK = x_TE.new_empty((tokens, k), dtype=torch.int64)
    width = next_power_of_2(experts)
    rows = tile_rows(width)
    top_k_kernel[(cdiv(tokens, rows),)](
        x_TE,
        ids_TK,
        x_TE.stride(0),
        tokens,
        E=experts,
        K=k,
        BLOCK_E=width,
        BLOCK_K=next_power_of_2(k),
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return ids_TK.view(*x.shape[:-1], k)


def _compile_cases() -> tuple[CompileCase, ...]:
    fp32 = ("logits_ptr", "bias_ptr", "probs_ptr", "grad_ptr", "dlogits_ptr", "x_ptr")
    int64 = ("given_ptr", "ids_ptr", "counts_ptr")
    types = dict.fromkeys(fp32, "*fp32") | dict.fromkeys(int64, "*i64") | {"valid_ptr": "*i1", "scale": "fp32"}
    cases = []
    # DeepSeek-V3, Qwen3-30B-A3B, and weights that are not normalised (DeepSeek-V2-Lite).
    for name, experts, choices, groups, opened, sigmoid, over_chosen in (
        ("E256 K8 groups 4/8 sigmoid bias", 256, 8, 8, 4, True, True),
        ("E128 K8 softmax", 128, 8, 1, 1, False, True),
        ("E64 K6 softmax, not normalised", 64, 6, 1, 1, False, False),
    ):
        sizes: dict[str, Any] = {"E": experts, "K": choices, "BLOCK_K": 8, "ROWS": tile_rows(experts)}
        rule = {"SIGMOID": sigmoid, "OVER_CHOSEN": over_chosen}
        forward = {"G": groups, "OPEN": opened, "BLOCK_G": groups, "BLOCK_W": experts // groups, "given_ptr": None}
        if not sigmoid:
            forward["bias_ptr"] = None
        for direction, kernel, constants in (
            ("route forward", route_forward_kernel, sizes | rule | forward),
            ("route backward", route_backward_kernel, sizes | rule | {"BLOCK_E": experts}),
            ("top_k", top_k_kernel, sizes | {"BLOCK_E": experts}),
        ):
            label = (
                f"{direction} {name if direction != 'top_k' else name.partition(' groups')[0].partition(' soft')[0]}"
            )
            cases.append(compile_case(label, kernel, constants, types=types, num_warps=NUM_WARPS))
    return tuple(cases)


COMPILE_CASES = _compile_cases()
