"""What it costs to split experts: bytes and time of a layer with etp = 2, ep = 2 beside ep = 4, on gloo.

    OMP_NUM_THREADS=1 python packages/moe-comm/benchmarks/expert_tensor.py

Prints the bytes that leave rank 0 on each leg beside the formula, and the time of dispatch and combine, forward and
backward, of the same tokens on the same ranks in both layouts. Times are medians, the slowest rank counts.

Shape legend: T tokens of one rank, K choices per token, D features.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import AllToAllConfig, build_dispatcher, combine, dispatch, record_traffic
from moe_comm.counts import leg_bytes, metadata_bytes, rows_by_leg, shared_rows
from moe_comm.traffic import Leg
from moe_kernels import Routing
from moe_parallel import FoldedMesh, ParallelLayout, run_distributed

WORLD, NUM_EXPERTS, TOP_K = 4, 16, 4
TOKENS, HIDDEN, DTYPE = 1024, 512, torch.bfloat16
REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank measured.

    Attributes:
        legs: name, bytes of the ledger, bytes of the formula; of what leaves the rank.
        layer_us: dispatch and combine, forward and backward.
    """

    legs: list[tuple[str, int, int]]
    layer_us: float


def ids_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(TOKENS, NUM_EXPERTS, generator=generator).topk(TOP_K).indices


def formula(mesh: FoldedMesh, leg: Leg) -> int:
    """Bytes that leave this rank on a leg."""
    etp, ep, shard, place = mesh.size("etp"), mesh.size("ep"), mesh.rank("etp"), mesh.rank("ep")
    if leg == "metadata":
        return metadata_bytes(6 + NUM_EXPERTS + ep) * (WORLD - 1)
    by_shard = [
        rows_by_leg(
            "alltoall_per_rank",
            [ids_of(rank) for rank in range(s, WORLD, etp)],
            num_experts=NUM_EXPERTS,
            ranks_per_node=1,
        )["dispatch"]
        for s in range(etp)
    ]
    if "gather" in leg or "scatter" in leg:
        by_rank = torch.stack(by_shard, 1).flatten(0, 1).tolist()  # etp fastest
        rows, rank = torch.tensor(shared_rows(by_rank, place, etp)), shard
    else:
        rows, rank = by_shard[shard], place
    sent = leg_bytes(leg, rank, rows, hidden=HIDDEN, dtype=DTYPE, choices=TOP_K, with_ids=True)
    return sum(sent) - sent[rank]


def measure(mesh: FoldedMesh) -> Report:
    dispatcher = build_dispatcher(AllToAllConfig(), mesh, NUM_EXPERTS)
    ids_TK, x_TD = ids_of(mesh.rank("world")), torch.randn(TOKENS, HIDDEN).to(DTYPE).requires_grad_()
    probs_TK = torch.rand(TOKENS, TOP_K, requires_grad=True)

    def layer() -> None:
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=NUM_EXPERTS))
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].to(DTYPE)).sum().backward()

    with record_traffic() as ledger:
        layer()
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        began = time.perf_counter()
        layer()
        times.append((time.perf_counter() - began) * 1e6)
    legs = [(entry.leg, entry.leaving_bytes, formula(mesh, entry.leg)) for entry in ledger.entries]
    return Report(legs=legs, layer_us=median(times[2:]))


def main() -> None:
    print(f"{WORLD} ranks on gloo, {TOKENS} tokens each, {HIDDEN} features, {DTYPE}, top-{TOP_K} of {NUM_EXPERTS}")
    layer_us = {}
    for etp, ep in ((1, 4), (2, 2)):
        reports = run_distributed(ParallelLayout(world=WORLD, etp=etp, ep=ep), measure)
        layer_us[etp] = max(report.layer_us for report in reports)
        print(f"\netp = {etp}, ep = {ep}: bytes that leave rank 0        ledger       formula")
        for leg, ledger, expected in reports[0].legs:
            print(f"  {leg:40} {ledger:13,} {expected:13,}{'' if ledger == expected else '   DIFFERENT'}")
        print(f"  {'all':40} {sum(ledger for _, ledger, _ in reports[0].legs):13,}")
        print(f"  layer, forward and backward {layer_us[etp]:22,.0f} us")
    print(f"\netp = 2, ep = 2 takes {layer_us[2] / layer_us[1]:.2f} times as long as ep = 4")


if __name__ == "__main__":
    main()
