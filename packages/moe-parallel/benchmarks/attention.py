"""Attention over rows that documents share: by tiles, as `LocalAttention`, against a mask over the whole rows.

    OMP_NUM_THREADS=1 python packages/moe-parallel/benchmarks/attention.py

Forward and backward of one layer in processor time, both in turns, so that a busy machine slows both; the ratio is the
median of the turns. Deciding the tiles, once for all layers of a microbatch, is in none of them but shown as a share of
one layer by tiles.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_parallel import LocalAttention, SequenceInfo
from moe_parallel.attention.tiles import RowTiles

HEADS, KV_HEADS, FEATURES = 8, 4, 64
TURNS = 5
# Rows, slots of a row, slots of a document on average.
CASES = ((2, 2048, 200), (16, 256, 60), (16, 256, 20))


def documents(rows: int, slots: int, mean: int) -> Tensor:
    begins_BS = torch.rand(rows, slots, generator=torch.Generator().manual_seed(slots + mean)) < 1 / mean
    return begins_BS.cumsum(1)


def masked(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, info: SequenceInfo) -> Tensor:
    """What `LocalAttention` computes, with all that is hidden."""
    document_BS = info.document_BS
    assert document_BS is not None
    visible_BSS = (document_BS.unsqueeze(2) == document_BS.unsqueeze(1)).tril()
    q_BHSD, k_BGSD, v_BGSV = (x.transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGV))
    out_BHSV = F.scaled_dot_product_attention(
        q_BHSD, k_BGSD, v_BGSV, attn_mask=visible_BSS.unsqueeze(1), enable_gqa=True
    )
    return out_BHSV.transpose(1, 2)


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(rows: int, slots: int, mean: int, dtype: torch.dtype) -> tuple[float, float]:
    """Time under a mask, and time to decide the tiles, in that of a layer by tiles."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(rows, slots, heads, FEATURES, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    nothing_BS = torch.zeros(rows, slots, dtype=torch.int64)
    document_BS = documents(rows, slots, mean)
    info = SequenceInfo(
        position_BS=nothing_BS, token_index_BS=nothing_BS, valid_BS=nothing_BS == 0, document_BS=document_BS
    )
    local = LocalAttention()

    def by_mask() -> None:
        torch.autograd.grad(masked(q, k, v, info), leaves, grad)

    def by_tiles() -> None:
        torch.autograd.grad(local(q, k, v, info), leaves, grad)

    def decide() -> None:
        slot_1BS = torch.arange(slots).expand(1, rows, -1)
        RowTiles(slot_1BS, document_BS).of(0, None, q.device)

    turns = []
    for turn in range(TURNS + 1):
        tiles = seconds(by_tiles)
        if turn:  # the first warms up, and decides
            turns.append((seconds(by_mask) / tiles, seconds(decide) / tiles))
    return median(turn[0] for turn in turns), median(turn[1] for turn in turns)


def main() -> None:
    print(f"{HEADS} query and {KV_HEADS} key/value heads of {FEATURES} features, torch {torch.__version__}")
    print(f"{'rows':>6}{'slots':>7}{'mean document':>15}  {'dtype':10}{'mask / tiles':>13}{'deciding / tiles':>18}")
    for rows, slots, mean in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            mask, decide = measure(rows, slots, mean, dtype)
            name = str(dtype).removeprefix("torch.")
            print(f"{rows:6}{slots:7}{mean:15}  {name:10}{mask:13.2f}{decide:18.3f}")


if __name__ == "__main__":
    main()
