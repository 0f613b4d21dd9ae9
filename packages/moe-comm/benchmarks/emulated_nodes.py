"""Nodes of a cluster as network namespaces of this machine, joined by links of a limited rate.

Every node has one interface, `eth0`, on a switch that is a namespace of its own; nothing of the machine's own network
is touched, and nothing of it can be reached. A token bucket (`tc tbf`) limits what a node sends and what it receives:
nodes that all send to one share its link. Ranks of a node reach each other over its loopback, without a limit.

It takes root, `ip` and `tc` (iproute2) and a kernel with network namespaces, veth, bridges and tbf; `unavailable` says
what is missing. Latency takes netem as well.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

INTERFACE = "eth0"

# A bucket as deep as the kernel's timer needs at the rate, and a queue that is full for so long before it drops.
_BURST_S, _QUEUE_S = 0.004, 0.05
_LEAST_BURST_BYTES = 64 * 1024

_PREFIX = "moe-nodes"
_PORT = 29500  # namespaces are new, so that every port is free
_GRACE_S = 5.0


class EmulationError(Exception):
    """Nodes could not be made, or a rank on them failed."""


@cache
def unavailable(*, latency: bool = False) -> str | None:
    """Why nodes cannot be made here, in words; None if they can. Tries it once."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} (iproute2) is not installed"
    try:
        with EmulatedNodes(2, rate_mbit=100, latency_us=100 if latency else 0):
            return None
    except EmulationError as error:
        return str(error)


class EmulatedNodes:
    """So many nodes, while the context is open.

    Args:
        nodes: how many.
        rate_mbit: of the link of a node, in 10^6 bits per second and direction.
        latency_us: added to every packet that a node sends.

    Raises:
        EmulationError: the kernel lacks something, and the message has what `ip` or `tc` said; or the rate is none.
    """

    def __init__(self, nodes: int, *, rate_mbit: float, latency_us: int = 0) -> None:
        if rate_mbit <= 0:
            raise EmulationError(f"rate_mbit = {rate_mbit:g} is no rate; it must be above 0")
        self.rate_mbit, self.latency_us = rate_mbit, latency_us
        self._switch = f"{_PREFIX}-{os.getpid()}-switch"
        self._names = [f"{_PREFIX}-{os.getpid()}-{node}" for node in range(nodes)]

    def __enter__(self) -> Self:
        _remove_those_of_the_dead()
        try:
            for name in (self._switch, *self._names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for node, name in enumerate(self._names):
                self._connect(node, name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """Of a node on the network between them."""
        return f"10.0.0.{node + 1}"

    def sent_bytes(self) -> list[int]:
        """Bytes that each node has sent over its link, headers included."""
        found = []
        for name in self._names:
            said = _run("ip", "-n", name, "-s", "-j", "link", "show", "dev", INTERFACE)
            found.append(int(json.loads(said)[0]["stats64"]["tx"]["bytes"]))
        return found

    def run(self, command: Sequence[str], *, ranks_per_node: int, limit_s: float) -> None:
        """Run a command once per rank, each on its node, told its place as a launcher does (`RANK` and so on).

        What it prints is dropped, errors are not.

        Raises:
            EmulationError: a rank failed, or did not end in time; the others are ended.
        """
        world = len(self._names) * ranks_per_node
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                node, local = divmod(rank, ranks_per_node)
                place = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(ranks_per_node),
                    "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # no name server knows the addresses, which torch warns of
                }
                inside = ["ip", "netns", "exec", self._names[node], *command]
                ranks.append(subprocess.Popen(inside, env={**os.environ, **place}, stdout=subprocess.DEVNULL))
            _wait(ranks, time.monotonic() + limit_s, limit_s)
        finally:
            _end(ranks)

    def _connect(self, node: int, name: str) -> None:
        port = f"port{node}"
        _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        bytes_per_s = self.rate_mbit * 1e6 / 8
        burst = max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_S))
        limit = burst + round(bytes_per_s * _QUEUE_S)
        bucket = ["tbf", "rate", f"{self.rate_mbit}mbit", "burst", str(burst), "limit", str(limit)]
        _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *bucket)
        _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, "root", *bucket)
        if self.latency_us:
            delay = ["parent", "1:1", "netem", "delay", f"{self.latency_us}us", "limit", "100000"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *delay)

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            _delete(name)


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float, limit_s: float) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            said = ", ".join(f"rank {rank} with {code}" for rank, code in failed.items())
            raise EmulationError(f"ranks ended with an error: {said}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise EmulationError(f"after {limit_s:g} s ranks {late} still run")
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End those that still run; `ip netns exec` becomes the command, so its process is the rank."""
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _remove_those_of_the_dead() -> None:
    """Namespaces of this script whose process is gone, for instance because it was killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if not Path("/proc", pid).exists():
            _delete(path.name)


def _delete(name: str) -> None:
    if Path("/run/netns", name).exists():
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
