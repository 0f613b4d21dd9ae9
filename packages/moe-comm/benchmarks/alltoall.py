"""What the all-to-all dispatcher sends and what it costs, between two forked ranks on gloo.

    OMP_NUM_THREADS=1 python packages/moe-comm/benchmarks/alltoall.py

Prints, for one routing: bytes per leg beside the formula; the time of dispatch and combine beside a bare
`all_to_all_single` of the same bytes and beside a copy of them; and, with tokens so small that bytes do not matter, the
time of each step beside the bare collectives in it. Times are medians, the slower rank counts.

Shape legend: T tokens of one rank, K choices per token, D features.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import AllToAllConfig, Dispatched, build_dispatcher, combine, dispatch, record_traffic
from moe_comm.counts import leg_bytes, metadata_bytes, rows_by_leg
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.volume import RandomRouting, expected_rows
from moe_kernels import Routing
from moe_parallel import FoldedMesh, ParallelLayout, run_distributed

RANKS, NUM_EXPERTS, TOP_K = 2, 16, 4
TOKENS, HIDDEN, DTYPE = 2048, 512, torch.bfloat16
FEW_TOKENS, FEW_FEATURES = 4, 8
REPEATS, FEW_REPEATS = 30, 300


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank measured; times in microseconds."""

    entries: list[tuple[str, int, int]]
    rows_per_token: float
    move_us: dict[str, float]
    step_us: dict[str, float]


def ids_of(rank: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices


def median_us(mesh: FoldedMesh, repeats: int, call: Callable[[], object]) -> float:
    """Median time of a call that both ranks start at the same time."""
    times = []
    for _ in range(repeats + 3):
        dist.barrier(mesh.group("ep"))
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return median(times[3:])


def bare_exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows, receive, send, group=group)
    return out


def measure(mesh: FoldedMesh) -> Report:
    rank, group = mesh.rank("ep"), mesh.group("ep")
    dispatcher = build_dispatcher(AllToAllConfig(), mesh, NUM_EXPERTS)
    assert isinstance(dispatcher, TwoLevelDispatcher)

    def inputs(tokens: int, hidden: int) -> tuple[Tensor, Routing]:
        probs_TK = torch.rand(tokens, TOP_K)
        routing = Routing(ids_TK=ids_of(rank, tokens), probs_TK=probs_TK, num_experts=NUM_EXPERTS)
        return torch.randn(tokens, hidden).to(DTYPE), routing

    x_TD, routing = inputs(TOKENS, HIDDEN)
    with record_traffic() as ledger:
        x, probs = x_TD.clone().requires_grad_(), routing.probs_TK.clone().requires_grad_()
        plan = dispatcher.plan(routing)
        sent = dispatch(dispatcher, plan, x, probs)
        combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].to(DTYPE)).sum().backward()
    ids = [ids_of(other, TOKENS) for other in range(RANKS)]
    rows_WW = rows_by_leg("alltoall_per_rank", ids, num_experts=NUM_EXPERTS, ranks_per_node=1)["dispatch"]
    formula = {"metadata": (metadata_bytes(6 + NUM_EXPERTS + RANKS),) * RANKS}
    for leg in ("dispatch", "combine", "combine_backward", "dispatch_backward"):
        formula[leg] = leg_bytes(leg, rank, rows_WW, hidden=HIDDEN, dtype=DTYPE, choices=TOP_K, with_ids=True)
    leaving = [(e.leg, e.leaving_bytes, sum(formula[e.leg]) - formula[e.leg][rank]) for e in ledger.entries]

    ((hop,),) = plan.journey.lanes
    send, receive = list(hop.send_rows), list(hop.receive_rows)

    def both() -> None:
        combine(dispatcher, plan, dispatch(dispatcher, plan, x_TD, routing.probs_TK).rows_RD)

    with torch.no_grad():
        parcel = dispatcher.prepare(plan, x_TD, routing.probs_TK)
        received = dispatcher.exchange(plan, parcel).wait()
        assert parcel.probs is not None

        def bare() -> None:
            bare_exchange(parcel.rows, send, receive, group)
            bare_exchange(parcel.probs, send, receive, group)
            bare_exchange(received.rows, receive, send, group)

        def copies() -> None:
            parcel.rows.clone()
            parcel.probs.clone()
            received.rows.clone()

        move_us = {
            "dispatch + combine": median_us(mesh, REPEATS, both),
            "bare all_to_all_single": median_us(mesh, REPEATS, bare),
            "copy": median_us(mesh, REPEATS, copies),
        }
        step_us = steps(mesh, dispatcher, *inputs(FEW_TOKENS, FEW_FEATURES))
    return Report(
        entries=leaving,
        rows_per_token=(rows_WW[rank].sum() - rows_WW[rank, rank]).item() / TOKENS,
        move_us=move_us,
        step_us=step_us,
    )


def steps(mesh: FoldedMesh, dispatcher: TwoLevelDispatcher, x_TD: Tensor, routing: Routing) -> dict[str, float]:
    """Times of each step with next to no bytes, and of the collectives alone in those that communicate."""
    group = mesh.group("ep")
    plan = dispatcher.plan(routing)
    parcel = dispatcher.prepare(plan, x_TD, routing.probs_TK)
    received = dispatcher.exchange(plan, parcel).wait()
    sent: Dispatched = dispatcher.arrange(plan, received)
    home = dispatcher.prepare_return(plan, sent.rows_RD)
    returned = dispatcher.exchange_return(plan, home).wait()
    assert parcel.probs is not None
    ((hop,),) = plan.journey.lanes
    send, receive = list(hop.send_rows), list(hop.receive_rows)
    metadata = torch.zeros(1, 2 + NUM_EXPERTS + RANKS, dtype=torch.int64)
    gathered = metadata.new_empty(RANKS, metadata.shape[1])

    def bare_dispatch() -> None:
        bare_exchange(parcel.rows, send, receive, group)
        bare_exchange(parcel.probs, send, receive, group)

    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: dispatcher.plan(routing),
        "  its collective alone": lambda: dist.all_gather(list(gathered.split(1)), metadata, group=group),
        "prepare": lambda: dispatcher.prepare(plan, x_TD, routing.probs_TK),
        "exchange": lambda: dispatcher.exchange(plan, parcel).wait(),
        "  its collectives alone": bare_dispatch,
        "arrange": lambda: dispatcher.arrange(plan, received),
        "prepare_return": lambda: dispatcher.prepare_return(plan, sent.rows_RD),
        "exchange_return": lambda: dispatcher.exchange_return(plan, home).wait(),
        "  its collective alone ": lambda: bare_exchange(home.rows, receive, send, group),
        "merge": lambda: dispatcher.merge(plan, returned),
    }
    return {name: median_us(mesh, FEW_REPEATS, call) for name, call in calls.items()}


def main() -> None:
    reports = run_distributed(ParallelLayout(world=RANKS, ep=RANKS), measure)
    routing = RandomRouting(num_experts=NUM_EXPERTS, top_k=TOP_K)
    expected = expected_rows("alltoall_per_rank", routing, world=RANKS, ranks_per_node=1).network
    print(f"{RANKS} ranks on gloo, {TOKENS} tokens each, {HIDDEN} features, {DTYPE}, top-{TOP_K} of {NUM_EXPERTS}")
    print("\nbytes that leave rank 0        ledger       formula")
    for leg, ledger, formula in reports[0].entries:
        print(f"  {leg:22} {ledger:13,} {formula:13,}{'' if ledger == formula else '   DIFFERENT'}")
    print(f"  rows per token {reports[0].rows_per_token:.3f}, expected for uniform routing {expected:.3f}")
    print("\ntime of the bytes above        us   times a copy   times bare")
    worst = {name: max(report.move_us[name] for report in reports) for name in reports[0].move_us}
    for name, us in worst.items():
        print(f"  {name:22} {us:8.0f} {us / worst['copy']:14.2f} {us / worst['bare all_to_all_single']:12.2f}")
    print(f"\ntime of each step with {FEW_TOKENS} tokens of {FEW_FEATURES} features, us")
    for name in reports[0].step_us:
        print(f"  {name:26} {max(report.step_us[name] for report in reports):6.0f}")


if __name__ == "__main__":
    main()
