"""Wall-clock of dispatchers between emulated nodes: network namespaces joined by links of a limited rate. Needs root.

    sudo python packages/moe-comm/benchmarks/emulated_network.py --rate-mbit 200 \
        alltoall:row=per_expert alltoall hybrid hybrid:rail=allgather allgather

A dispatcher is named by its kind, with options behind a colon; the first is what the others are compared to. Measured
is the routing of DeepSeek-V3 (256 experts, 8 choices, of 4 of 8 groups) with fewer features: plan, dispatch, combine
and their backward, median over repetitions, the slowest rank counts. What the ledgers say went over the network is
compared to what the links counted; the difference is headers and acknowledgements. A gather is less on the links than
in the ledger, which counts every pair of ranks: gloo's goes round a ring.

With `--trainer` the same dispatchers train `tiny_moe` for some steps, and its metrics are compared.

Gloo's own work and that of the ranks, which share the cores of this machine, is in the times: the lower the rate, the
less it matters.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_nodes import INTERFACE, EmulatedNodes, EmulationError, unavailable
from routings import NAMES, draw

from moe_comm import DISPATCHERS, build_dispatcher, combine, dispatch, record_traffic
from moe_kernels import Routing
from moe_parallel import FoldedMesh, LinkClass, ParallelLayout, Place, Topology, gather_json, joined

DEFAULT = ("alltoall:row=per_expert", "alltoall", "hybrid", "hybrid:rail=allgather", "hybrid:lanes=4", "allgather")
TRAINED = (
    *("model.num_experts=64", "model.router.top_k=8", "model.router.groups=8", "model.router.group_top_k=4"),
    *("model.num_layers=2", "model.model_features=256", "model.expert_features=32", "train.valid_sequences=4"),
    *(
        "train.global_batch_sequences=16",
        "train.microbatch_sequences=4",
        "observe.sample_tokens=0",
    ),
)
TIMEOUT_S, LIMIT_S = 120.0, 900.0
WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        dispatchers: as on the command line.
        ranks_per_node: of every node.
        routing: name of a routing.
        tokens: of each rank.
        repetitions: that are timed.
    """

    dispatchers: tuple[str, ...]
    ranks_per_node: int
    routing: str
    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    repetitions: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One dispatcher.

    Attributes:
        forward_s, backward_s: of a layer, median over repetitions of the slowest rank.
        ledger_bytes, link_bytes: of a repetition, from all nodes together over the network, as the ledgers say and as
            the links counted.
    """

    dispatcher: str
    forward_s: float
    backward_s: float
    ledger_bytes: float
    link_bytes: float

    @property
    def layer_s(self) -> float:
        return self.forward_s + self.backward_s


def configured(text: str) -> Any:
    """The configuration that `kind:option=value,option=value` stands for."""
    kind, _, options = text.partition(":")
    pairs = dict(option.split("=", 1) for option in options.split(",") if option)
    return DISPATCHERS.get(kind).config(**{name: _value(value) for name, value in pairs.items()})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def measure(case: Case) -> list[Measured]:
    """All dispatchers, on one rank of the case; collective."""
    place = Place.from_environment()
    layout = ParallelLayout(world=place.world, ep=place.world)
    topology = Topology.regular(place.world, ranks_per_node=case.ranks_per_node)
    with joined(place, device=torch.device("cpu"), timeout_s=TIMEOUT_S):
        mesh = FoldedMesh(layout, timeout_s=TIMEOUT_S, ep_inner=case.ranks_per_node)
        return [_measure_one(text, case, mesh, topology) for text in case.dispatchers]


def _measure_one(text: str, case: Case, mesh: FoldedMesh, topology: Topology) -> Measured:
    dispatcher = build_dispatcher(configured(text), mesh, case.num_experts)
    rank = mesh.rank("world")
    ids_TK = draw(case.routing, tokens=case.tokens, num_experts=case.num_experts, top_k=case.top_k, seed=1000 + rank)
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(case.tokens, case.hidden, generator=generator).bfloat16().requires_grad_()
    probs_TK = torch.rand(case.tokens, case.top_k, generator=generator).requires_grad_()
    routing = Routing(ids_TK=ids_TK, probs_TK=probs_TK.detach(), num_experts=case.num_experts)

    def once() -> tuple[float, float]:
        dist.barrier()
        began = time.perf_counter()
        plan = dispatcher.plan(routing)
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None].bfloat16())
        forward_s = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        y_TD.backward(torch.ones_like(y_TD))
        return forward_s, time.perf_counter() - began

    for _ in range(WARM_UP):
        once()
    dist.barrier()
    before = _link_bytes()
    with record_traffic() as ledger:
        times = [once() for _ in range(case.repetitions)]
    dist.barrier()
    link_bytes = _link_bytes() - before if rank % case.ranks_per_node == 0 else 0
    ledger_bytes = ledger.bytes_by_link(topology)[LinkClass.NETWORK]
    by_rank = gather_json({"times": times, "link": link_bytes, "ledger": ledger_bytes})
    slowest = [
        [max(pair) for pair in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*(r["times"] for r in by_rank), strict=True)
    ]
    forward_s, backward_s = (statistics.median(column) for column in zip(*slowest, strict=True))
    return Measured(
        dispatcher=text,
        forward_s=forward_s,
        backward_s=backward_s,
        ledger_bytes=sum(r["ledger"] for r in by_rank) / case.repetitions,
        link_bytes=sum(r["link"] for r in by_rank) / case.repetitions,
    )


def _link_bytes() -> int:
    return int(Path("/sys/class/net", INTERFACE, "statistics/tx_bytes").read_text())


def measured_on(nodes: EmulatedNodes, case: Case) -> list[Measured]:
    """Start the ranks of a case on the nodes, and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(asdict(case)), str(result)]
        nodes.run(command, ranks_per_node=case.ranks_per_node, limit_s=LIMIT_S)
        return [Measured(**values) for values in json.loads(result.read_text())]


def _as_rank(case_json: str, result: str) -> None:
    values = json.loads(case_json)
    found = measure(Case(**{**values, "dispatchers": tuple(values["dispatchers"])}))
    if Place.from_environment().rank == 0:
        Path(result).write_text(json.dumps([asdict(measured) for measured in found]))


def table(found: list[Measured], nodes: int, rate_mbit: float) -> str:
    """Times and bytes of a layer, and how busy a link was on average."""
    width = max(len(one.dispatcher) for one in found)
    lines = [
        f"{'':{width}}   forward  backward     layer  {'times as':>8}   network MB of a node    header   link",
        f"{'dispatcher':{width}}        ms        ms        ms  {'fast':>8}    ledger      link        %  busy %",
    ]
    for one in found:
        ledger, link = one.ledger_bytes / nodes / 1e6, one.link_bytes / nodes / 1e6
        over = 100 * (link / ledger - 1) if ledger else 0.0
        busy = 100 * link * 8 / rate_mbit / one.layer_s
        lines.append(
            f"{one.dispatcher:{width}}  {one.forward_s * 1e3:8.0f}  {one.backward_s * 1e3:8.0f}"
            f"  {one.layer_s * 1e3:8.0f}  {found[0].layer_s / one.layer_s:8.2f}"
            f"  {ledger:8.2f}  {link:8.2f}  {over:7.1f}  {busy:6.0f}"
        )
    return "\n".join(lines)


def trained_on(
    nodes: EmulatedNodes, dispatcher: str, *, world: int, ranks_per_node: int, steps: int, more: list[str]
) -> Measured:
    """Train `tiny_moe` with a dispatcher; the times are those of a step, all of them under `forward_s`."""
    kind, _, options = dispatcher.partition(":")
    comm = [f"comm.kind={kind}", *(f"comm.{option}" for option in options.split(",") if option)]
    layout = [f"parallel.ep={world}", f"parallel.ranks_per_node={ranks_per_node}", f"train.steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        before = sum(nodes.sent_bytes())
        command = [sys.executable, "-m", "moe_train", "run", "tiny_moe", *TRAINED, *layout, *comm, *more]
        nodes.run([*command, "--run-dir", str(run)], ranks_per_node=ranks_per_node, limit_s=LIMIT_S)
        link_bytes = sum(nodes.sent_bytes()) - before
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["record"] == "step"]
    return Measured(
        dispatcher=dispatcher,
        forward_s=statistics.median(record["step_seconds"] for record in records[WARM_UP:]),
        backward_s=0.0,
        ledger_bytes=statistics.mean(record["comm/network_bytes"] for record in records),
        link_bytes=link_bytes / steps,
    )


def trained_table(found: list[Measured], nodes: int) -> str:
    """Times of a step. The links also carry gradients, weights, metrics and checks, which are no dispatcher's."""
    width = max(len(one.dispatcher) for one in found)
    lines = [f"{'dispatcher':{width}}   step ms  times as fast  network MB of a node: dispatchers, all"]
    for one in found:
        ledger, link = one.ledger_bytes / nodes / 1e6, one.link_bytes / nodes / 1e6
        lines.append(
            f"{one.dispatcher:{width}}  {one.layer_s * 1e3:8.0f}  {found[0].layer_s / one.layer_s:13.2f}"
            f"  {ledger:33.2f}  {link:3.2f}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--rank"]:
        _as_rank(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description="Dispatchers between emulated nodes; see the head of this file.")
    parser.add_argument("dispatchers", nargs="*", default=DEFAULT, metavar="KIND[:OPTION=VALUE,...]")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of a node's link, each direction (default 200)")
    parser.add_argument("--latency-us", type=int, default=0, help="added to every packet; needs netem (default 0)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--routing", choices=NAMES, default="grouped")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank (default 1024)")
    parser.add_argument("--hidden", type=int, default=512, help="features of a token, in bf16 (default 512)")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--trainer", action="store_true", help="train tiny_moe instead")
    parser.add_argument("--steps", type=int, default=6, help="of the trainer (default 6)")
    parser.add_argument("--set", dest="more", action="append", default=[], metavar="KEY=VALUE", help="for the trainer")
    options = parser.parse_args(arguments)

    reason = unavailable(latency=options.latency_us > 0)
    if reason is not None:
        print(f"nodes cannot be emulated here: {reason}", file=sys.stderr)
        return 1
    # So that namespaces are removed when the script is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(
        f"{options.nodes} nodes of {options.ranks_per_node} ranks, links of {options.rate_mbit:g} Mbit/s in each "
        f"direction, {options.latency_us} us added; {os.cpu_count()} cores, gloo, torch {torch.__version__}"
    )
    try:
        _measure_and_print(options)
    except EmulationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measure_and_print(options: argparse.Namespace) -> None:
    world = options.nodes * options.ranks_per_node
    with EmulatedNodes(options.nodes, rate_mbit=options.rate_mbit, latency_us=options.latency_us) as nodes:
        if options.trainer:
            print(f"training tiny_moe, {options.steps} steps: {shlex.join([*TRAINED, *options.more])}")
            found = [
                trained_on(
                    nodes,
                    dispatcher,
                    world=world,
                    ranks_per_node=options.ranks_per_node,
                    steps=options.steps,
                    more=options.more,
                )
                for dispatcher in options.dispatchers
            ]
            print(trained_table(found, options.nodes))
            return
        case = Case(
            dispatchers=tuple(options.dispatchers),
            ranks_per_node=options.ranks_per_node,
            routing=options.routing,
            tokens=options.tokens,
            hidden=options.hidden,
            num_experts=options.experts,
            top_k=options.top_k,
            repetitions=options.repetitions,
        )
        print(
            f"{case.routing} routing, top-{case.top_k} of {case.num_experts}, {case.tokens} tokens of each rank, "
            f"{case.hidden} features in bf16, median of {case.repetitions}"
        )
        print(table(measured_on(nodes, case), options.nodes, options.rate_mbit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
