"""Emulated nodes: what their links carry, what is left of them, and dispatchers on them. Most of it needs root."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import emulated_network
import emulated_nodes
from emulated_network import Case, Measured, configured, measured_on, table
from emulated_nodes import EmulatedNodes, EmulationError, unavailable
from routings import NAMES, draw

from moe_comm import AllToAllConfig
from moe_comm.config import HybridConfig


@pytest.fixture
def nodes_here():
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"nodes cannot be emulated here: {reason}")


def namespaces():
    """Of this process; tests may run in several."""
    return sorted(path.name for path in Path("/run/netns").glob(f"moe-nodes-{os.getpid()}-*"))


def links():
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


# Rank 1, on the other node, sends a megabyte to rank 0; both only need what the interpreter has.
TRANSFER = """
import os, socket, time
size, rank = 1_000_000, int(os.environ["RANK"])
if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], 29501)) as server:
        connection, _ = server.accept()
        received = 0
        while part := connection.recv(1 << 16):
            received += len(part)
    assert received == size
else:
    for _ in range(100):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 29501))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes(size))
    connection.close()
"""


@pytest.mark.dist
def test_a_link_is_as_fast_as_it_is_told_and_counts_what_it_carries(nodes_here):
    with EmulatedNodes(2, rate_mbit=20) as nodes:
        began = time.monotonic()
        nodes.run([sys.executable, "-S", "-c", TRANSFER], ranks_per_node=1, limit_s=30)
        seconds = time.monotonic() - began
        receiver, sender = nodes.sent_bytes()
    assert 1_000_000 <= sender < 1_050_000
    assert 0 < receiver < 50_000
    assert seconds > (1_000_000 - emulated_nodes._LEAST_BURST_BYTES) * 8 / 20e6


@pytest.mark.dist
def test_nothing_is_left_of_nodes_and_the_machine_keeps_its_own_links(nodes_here, monkeypatch):
    before = [], links()
    with EmulatedNodes(3, rate_mbit=100):
        assert len(namespaces()) == 4  # and the switch
        assert links() == before[1]
    assert (namespaces(), links()) == before
    with pytest.raises(RuntimeError, match="of the body"), EmulatedNodes(2, rate_mbit=100):
        raise RuntimeError("of the body")
    assert (namespaces(), links()) == before
    monkeypatch.setattr(emulated_nodes, "INTERFACE", "a-name-that-is-too-long")
    with pytest.raises(EmulationError, match=r"`ip link add a-name.*` failed: ."), EmulatedNodes(2, rate_mbit=100):
        pass
    assert (namespaces(), links()) == before


@pytest.mark.dist
def test_nodes_of_a_process_that_was_killed_are_removed_by_the_next(nodes_here):
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"moe-nodes-{dead.pid}-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with EmulatedNodes(1, rate_mbit=100):
        assert not Path("/run/netns", name).exists()


@pytest.mark.dist
def test_a_rank_that_fails_or_does_not_end_is_named_and_the_others_are_ended(nodes_here):
    fails = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '2' else time.sleep(60)"
    began = time.monotonic()
    with EmulatedNodes(2, rate_mbit=100) as nodes:
        with pytest.raises(EmulationError, match=r"ranks ended with an error: rank 2 with 3$"):
            nodes.run([sys.executable, "-S", "-c", fails], ranks_per_node=2, limit_s=30)
        with pytest.raises(EmulationError, match=r"after 0\.5 s ranks 0, 1 still run"):
            nodes.run([sys.executable, "-S", "-c", "import time; time.sleep(60)"], ranks_per_node=1, limit_s=0.5)
    assert time.monotonic() - began < 30


@pytest.mark.dist
@pytest.mark.slow
def test_hybrid_is_faster_where_the_network_is_the_limit(nodes_here):
    """The routing of DeepSeek-V3 on 2 nodes of 2 ranks; links count what ledgers say, and headers.

    Those are 66 bytes of a packet of 1514, where the kernel does not count several packets as one.
    """
    case = Case(
        dispatchers=("alltoall:row=per_expert", "alltoall", "hybrid"),
        ranks_per_node=2,
        routing="grouped",
        tokens=256,
        hidden=512,
        num_experts=256,
        top_k=8,
        repetitions=3,
    )
    with EmulatedNodes(2, rate_mbit=100) as nodes:
        per_expert, per_rank, hybrid = measured_on(nodes, case)
    for one in (per_expert, per_rank, hybrid):
        assert one.ledger_bytes < one.link_bytes < 1.08 * one.ledger_bytes
    assert per_expert.ledger_bytes > 1.8 * per_rank.ledger_bytes > 1.8 * hybrid.ledger_bytes
    assert per_expert.layer_s > 1.8 * hybrid.layer_s


# Without nodes


def test_a_dispatcher_is_named_by_kind_and_options():
    assert configured("alltoall:row=per_expert") == AllToAllConfig(row="per_expert")
    assert configured("hybrid:rail=allgather,lanes=4") == HybridConfig(rail="allgather", lanes=4)
    assert configured("hybrid") == HybridConfig()


def test_the_table_compares_to_the_first():
    slow = Measured(dispatcher="slow", forward_s=3.0, backward_s=1.0, ledger_bytes=2e6, link_bytes=2.2e6)
    fast = Measured(dispatcher="fast", forward_s=0.5, backward_s=0.5, ledger_bytes=0, link_bytes=0)
    *_, first, second = table([slow, fast], 2, 10).splitlines()
    assert first.split() == ["slow", "3000", "1000", "4000", "1.00", "1.00", "1.10", "10.0", "22"]
    assert second.split() == ["fast", "500", "500", "1000", "4.00", "0.00", "0.00", "0.0", "0"]


def test_why_nodes_cannot_be_made(monkeypatch):
    with pytest.raises(EmulationError, match="rate_mbit = -1 is no rate"):
        EmulatedNodes(2, rate_mbit=-1)
    unavailable.cache_clear()
    monkeypatch.setattr(emulated_nodes.os, "geteuid", lambda: 1000)
    assert unavailable() == "network namespaces need root"
    unavailable.cache_clear()
    monkeypatch.setattr(emulated_nodes.os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated_nodes.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert unavailable() == "the program tc (iproute2) is not installed"
    monkeypatch.setattr(emulated_network, "unavailable", lambda latency: "no luck")
    assert emulated_network.main(["hybrid"]) == 1
    unavailable.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_routings(name):
    ids_TK = draw(name, tokens=2000, num_experts=64, top_k=6, seed=1)
    assert ids_TK.shape == (2000, 6)
    assert all(len(set(row)) == 6 for row in ids_TK.tolist())
    share_E = ids_TK.flatten().bincount(minlength=64) / 2000
    groups_T = [len({expert // 8 for expert in row}) for row in ids_TK.tolist()]
    assert (max(groups_T) <= 4) == (name == "grouped")
    assert (share_E.max() == 1) == (name == "hot")
    # An expert is chosen by 6 of 64 tokens, give or take five standard errors; those of zipf are not alike.
    even = ((share_E - 6 / 64).abs() < 0.033).float().mean().item()
    assert even == 1 if name in ("uniform", "grouped") else even < (0.99 if name == "hot" else 0.5)
    if name == "zipf":
        assert share_E.max() > 0.8
