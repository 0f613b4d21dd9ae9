"""What every dispatcher sends for four routings, counted exactly: no clock, so every run prints the same.

    python packages/moe-comm/benchmarks/exact_traffic.py [--nodes 2 4 8] [--ranks-per-node 8]

Per token of a rank, over dispatch, combine and their backward: bytes to other nodes and inside the node (the mean over
ranks, and the rank with the most), and of plans. Per rank: collectives of a layer; messages to other nodes and their
mean size; the largest buffer of an exchange, to send and to receive; how unevenly bytes arrive (largest over mean). And
a time by these bytes, there and back, of the rank with the most: 50 GB/s over the network, 450 GB/s inside a node, both
at once as with many lanes, and 5 us for each collective.

A gather is counted for every pair of ranks. What 16 ranks execute, as threads, is compared to the counts at the end.

Shape legend: W ranks, L of them on a node, T tokens of one rank, K choices per token.
"""

import argparse
from dataclasses import dataclass
from typing import get_args

import torch
from routings import NAMES, draw
from torch import Tensor

from moe_comm import build_dispatcher, combine, dispatch, record_traffic
from moe_comm.config import AllGatherConfig, AllToAllConfig, HybridConfig
from moe_comm.cost import LinkSpeeds
from moe_comm.counts import bytes_per_row, metadata_bytes, rows_by_leg
from moe_comm.testing.harness import split_groups
from moe_comm.traffic import BACKWARD_OF, Leg
from moe_comm.volume import Algorithm
from moe_kernels import Routing
from moe_parallel import AxisGroups, LinkClass, Topology
from moe_parallel.testing import run_threads

NUM_EXPERTS, TOP_K, HIDDEN, DTYPE = 256, 8, 7168, torch.bfloat16
TOKENS = 1024
ALGORITHMS = tuple(algorithm for algorithm in get_args(Algorithm) if algorithm != "local")
CONFIGS = {
    "allgather": AllGatherConfig(),
    "alltoall_per_expert": AllToAllConfig(row="per_expert"),
    "alltoall_per_rank": AllToAllConfig(),
    "hybrid": HybridConfig(),
    "hybrid_rail_allgather": HybridConfig(rail="allgather"),
}
HOME: dict[Leg, Leg] = {"dispatch": "combine", "dispatch_rail": "combine_rail", "dispatch_node": "combine_node"}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One algorithm; bytes by sender and receiver of all legs and passes but the metadata, float64 [W, W].

    Attributes:
        sent_WW: of dispatch, combine and both backward passes.
        there_and_back_WW: of the first two.
        messages_W: to other nodes in a pass there, by sender.
        buffer_bytes: the largest exchange of a rank, sent and received.
        hops: exchanges there.
    """

    sent_WW: Tensor
    there_and_back_WW: Tensor
    messages_W: Tensor
    buffer_bytes: float
    hops: int


def ids_of(routing: str, rank: int, tokens: int) -> Tensor:
    return draw(routing, tokens=tokens, num_experts=NUM_EXPERTS, top_k=TOP_K, seed=1000 + rank)


def count(algorithm: Algorithm, ids: list[Tensor], ranks_per_node: int, hidden: int = HIDDEN) -> Counted:
    """Bytes of all passes, from the rows there."""
    world = len(ids)
    crosses_WW = _node(world, ranks_per_node)[:, None] != _node(world, ranks_per_node)
    choices = 1 if algorithm == "alltoall_per_expert" else TOP_K
    sent_WW = torch.zeros(world, world, dtype=torch.float64)
    there_and_back_WW, messages_W, buffer_bytes = sent_WW.clone(), sent_WW[0].clone(), 0.0
    legs = rows_by_leg(algorithm, ids, num_experts=NUM_EXPERTS, ranks_per_node=ranks_per_node)
    for leg, rows_WW in legs.items():
        for name, rows in ((leg, rows_WW), (HOME[leg], rows_WW.T)):
            for passed, directed in ((name, rows), (BACKWARD_OF[name], rows.T)):
                row_bytes = bytes_per_row(passed, hidden, DTYPE, choices=choices, with_ids=True)
                exchanged_WW = directed.double() * row_bytes
                sent_WW += exchanged_WW
                there_and_back_WW += exchanged_WW if passed == name else 0
                buffer_bytes = max(buffer_bytes, (exchanged_WW.sum(0) + exchanged_WW.sum(1)).max().item())
        messages_W += ((rows_WW > 0) & crosses_WW).sum(1)
    return Counted(
        sent_WW=sent_WW,
        there_and_back_WW=there_and_back_WW,
        messages_W=messages_W,
        buffer_bytes=buffer_bytes,
        hops=len(legs),
    )


def metadata_per_rank(algorithm: Algorithm, world: int, nodes: int) -> int:
    """Bytes that one rank sends to the others for a plan."""
    return metadata_bytes(6 + NUM_EXPERTS + world + (nodes if algorithm == "hybrid" else 0)) * (world - 1)


def line(algorithm: Algorithm, counted: Counted, nodes: int, ranks_per_node: int, tokens: int) -> str:
    world, speeds = nodes * ranks_per_node, LinkSpeeds()
    node = _node(world, ranks_per_node)
    outside_WW, itself_WW = node[:, None] != node, torch.eye(world, dtype=torch.bool)
    inside_WW = ~outside_WW & ~itself_WW

    def both(links_WW: Tensor) -> str:
        of_rank = (counted.sent_WW * links_WW).sum(1) / tokens / 1e3
        return f"{of_rank.mean().item():7.1f} {of_rank.max().item():7.1f}"

    network_W = (counted.there_and_back_WW * outside_WW).sum(1)
    nvlink_W = (counted.there_and_back_WW * inside_WW).sum(1)
    network_us, nvlink_us = network_W / speeds.network_gb_per_s / 1e3, nvlink_W / speeds.nvlink_gb_per_s / 1e3
    collectives = 1 + 6 * counted.hops
    start_us = (1 + 3 * counted.hops) * speeds.collective_us
    model_us = torch.maximum(network_us, nvlink_us).max().item() + start_us
    arriving_W = (counted.sent_WW * ~itself_WW).sum(0)
    messages = counted.messages_W.mean().item()
    message_bytes = (counted.sent_WW * outside_WW).sum(1).mean().item() / 4 / max(messages, 1)
    plan_bytes = metadata_per_rank(algorithm, world, nodes) / tokens
    return (
        f"{algorithm:22} {both(outside_WW)} {both(inside_WW)}  {plan_bytes:7.1f}"
        f"  {collectives:5d}  {messages:5.1f} {message_bytes / 1e6:6.2f}  {counted.buffer_bytes / 1e6:7.1f}"
        f"  {(arriving_W.max() / arriving_W.mean()).item():5.2f}  {model_us / 1e3:7.2f}"
    )


def _node(world: int, ranks_per_node: int) -> Tensor:
    return torch.arange(world) // ranks_per_node


def execute(routing: str, nodes: int, ranks_per_node: int, *, tokens: int = 64, hidden: int = 16) -> dict[str, bool]:
    """Whether the ledgers of ranks that run as threads have the counted bytes, for each algorithm."""
    world = nodes * ranks_per_node
    topology = Topology.regular(world, ranks_per_node=ranks_per_node)
    ids = [ids_of(routing, rank, tokens) for rank in range(world)]

    def network_bytes(algorithm: str) -> list[int]:
        def on_rank(rank: int, groups: AxisGroups) -> int:
            dispatcher = build_dispatcher(CONFIGS[algorithm], split_groups(rank, groups, 1, nodes), NUM_EXPERTS)
            x_TD = torch.ones(tokens, hidden, dtype=DTYPE, requires_grad=True)
            probs_TK = torch.ones(tokens, TOP_K, requires_grad=True)
            with record_traffic() as ledger:
                plan = dispatcher.plan(Routing(ids_TK=ids[rank], probs_TK=probs_TK, num_experts=NUM_EXPERTS))
                sent = dispatch(dispatcher, plan, x_TD, probs_TK)
                combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].to(DTYPE)).sum().backward()
            metadata = ledger.bytes_by_link(topology, "metadata")[LinkClass.NETWORK]
            return ledger.bytes_by_link(topology)[LinkClass.NETWORK] - metadata

        return run_threads(world, on_rank)

    crosses_WW = _node(world, ranks_per_node)[:, None] != _node(world, ranks_per_node)
    return {
        algorithm: network_bytes(algorithm)
        == (count(algorithm, ids, ranks_per_node, hidden).sent_WW * crosses_WW).sum(1).tolist()
        for algorithm in ALGORITHMS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of dispatchers, counted; see the head of this file.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of each rank (default {TOKENS})")
    options = parser.parse_args()
    print(f"top-{TOP_K} of {NUM_EXPERTS} experts, {options.tokens} tokens of each rank, {HIDDEN} features, {DTYPE}")
    for nodes in options.nodes:
        for routing in NAMES:
            ids = [ids_of(routing, rank, options.tokens) for rank in range(nodes * options.ranks_per_node)]
            print(f"\n{nodes} nodes of {options.ranks_per_node} ranks, {routing}")
            print(
                f"{'':22} network kB/token    node kB/token  plan B/  coll.  messages to nodes  buffer   skew    model"
            )
            print(f"{'':22}    mean    most    mean    most    token         number     MB       MB              ms")
            for algorithm in ALGORITHMS:
                counted = count(algorithm, ids, options.ranks_per_node)
                print(line(algorithm, counted, nodes, options.ranks_per_node, options.tokens))
    same = {routing: execute(routing, 2, 8) for routing in NAMES}
    print(f"\nexecuted by 16 ranks on 2 nodes, network bytes of every rank as counted: {same}")


if __name__ == "__main__":
    main()
