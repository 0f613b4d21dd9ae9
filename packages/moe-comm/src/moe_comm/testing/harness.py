"""What the rules of the kit share: a dispatcher per rank, the cases it is put through, and a small MoE layer.

Shape legend: T tokens here, K choices per token, D model, R rows here after dispatch, E experts on this rank.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatcher import (
    EXACT,
    Capabilities,
    Dispatched,
    DispatcherPlugin,
    Plan,
    Sizing,
    TokenDispatcher,
    combine,
    dispatch,
)
from moe_comm.testing.cases import Case, Inputs, World, block, edge_cases, few_cases, random_cases
from moe_comm.testing.reference import Row, apply_experts
from moe_comm.testing.verdict import poisoned_memory
from moe_parallel import AxisGroups, Groups
from moe_parallel.testing import run_threads

T = TypeVar("T")

EXACT_TO = 1e-12  # float64, values of order one
SAME_SUM = 1e-12  # float64, the same terms in another order


class Harness:
    """Base of all rules; the attributes are those of `DispatcherConformance`."""

    plugin: ClassVar[DispatcherPlugin[Any]]
    config: ClassVar[Any]
    worlds: ClassVar[tuple[World, ...]] = (1, 2, 3, 4)
    large_worlds: ClassVar[tuple[World, ...]] = ()
    roundings: ClassVar[int] = 1
    nodes: ClassVar[int] = 1

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run every test that takes `world` once per world."""
        if "world" in metafunc.fixturenames:
            more = self.large_worlds if metafunc.function.__name__ == "test_random_cases" else ()
            metafunc.parametrize("world", (*self.worlds, *more), ids=str)

    def on_cases(self, cases: list[Case], on_rank: Callable[[Case, int, TokenDispatcher[Any]], T]) -> list[list[T]]:
        """Run `on_rank(case, rank, dispatcher)` on every rank for every case; results by case, then by rank."""

        def run(rank: int, groups: AxisGroups) -> list[T]:
            inner = split_groups(rank, groups, cases[0].etp, self.nodes)
            return [on_rank(case, rank, self.build(inner, case.num_experts)) for case in cases]

        with poisoned_memory():
            by_rank = run_threads(cases[0].world, run)
        return [list(results) for results in zip(*by_rank, strict=True)]

    def build(self, groups: Groups, num_experts: int) -> TokenDispatcher[Any]:
        """The dispatcher of one rank."""
        return self.plugin.build(self.config, groups, num_experts)

    def capabilities(self, world: World) -> Capabilities:
        """What a dispatcher built for this many ranks says of itself."""
        etp, ep = block(world)

        def run(rank: int, groups: AxisGroups) -> Capabilities:
            return self.build(split_groups(rank, groups, etp, self.nodes), 3 * ep).capabilities

        return run_threads(etp * ep, run)[0]

    def hidden(self, world: World) -> int:
        """A number of features that the dispatcher carries and that differs from the other sizes."""
        multiple = self.capabilities(world).hidden_multiple
        return multiple * (1 if multiple >= 5 else 6)

    def edge_cases(self, world: World) -> list[Case]:
        """Routings at the edge, within the limits of the dispatcher."""
        return edge_cases(world, hidden=self.hidden(world), largest_top_k=self.capabilities(world).largest_top_k)

    def few_cases(self, world: World) -> list[Case]:
        """The edge cases that differ most."""
        return few_cases(self.edge_cases(world))

    def random_cases(self, world: World) -> list[Case]:
        """Random routings, within the limits of the dispatcher."""
        limit = self.capabilities(world).largest_top_k
        return list(random_cases(world, 6, hidden=self.hidden(world), largest_top_k=limit))

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the dispatcher carries."""
        return sorted(self.capabilities(self.worlds[0]).dtypes, key=str)


def split_groups(rank: int, groups: AxisGroups, etp: int, nodes: int = 1) -> AxisGroups:
    """The ranks of a threaded world as a block of `etp` times the rest, etp fastest, the rest over so many nodes."""
    world = groups.group("world")
    if world is None:
        return groups

    def group_of(members: list[range]) -> ProcessGroup:
        # Every rank makes all of them.
        made: list[ProcessGroup] = [dist.new_group(list(ranks)) for ranks in members]
        return next(group for ranks, group in zip(members, made, strict=True) if rank in ranks)

    size = world.size()
    axes: dict[str | tuple[str, ...], ProcessGroup] = {"world": world, ("etp", "ep"): world, "ep": world}
    if etp > 1:
        axes["etp"] = group_of([range(first, first + etp) for first in range(0, size, etp)])
        axes["ep"] = group_of([range(shard, size, etp) for shard in range(etp)])
    if nodes == 1:
        axes["ep_inner"] = axes["ep"]
    else:
        per_node = size // nodes
        inner = [
            range(first, first + per_node, etp)
            for node in range(0, size, per_node)
            for first in range(node, node + etp)
        ]
        axes["ep_inner"] = group_of(inner)
        axes["ep_outer"] = group_of([range(place, size, per_node) for place in range(per_node)])
    return AxisGroups(axes)


def local_experts(case: Case, rank: int) -> Tensor:
    """The matrices of the experts of a rank, or its share of them."""
    return case.experts()[case.local(rank)] * case.share(rank)


def send(dispatcher: TokenDispatcher[Any], given: Inputs, sizing: Sizing = EXACT) -> tuple[Dispatched, Plan]:
    """Plan and dispatch."""
    plan = dispatcher.plan(given.routing(), sizing)
    return dispatch(dispatcher, plan, given.x_TD, given.probs_TK), plan


def experts(sent: Dispatched, experts_EDD: Tensor) -> Tensor:
    """Each row times its expert's matrix and its probability."""
    rows_RD = apply_experts(sent.rows_RD, sent.offsets_E.tolist(), experts_EDD)
    return rows_RD * sent.probs_R.unsqueeze(1).to(rows_RD.dtype)


def layer(dispatcher: TokenDispatcher[Any], plan: Plan, x_TD: Tensor, probs_TK: Tensor, experts_EDD: Tensor) -> Tensor:
    """The MoE layer: dispatch, experts, combine."""
    return combine(dispatcher, plan, experts(dispatch(dispatcher, plan, x_TD, probs_TK), experts_EDD))


def layer_with_grads(
    dispatcher: TokenDispatcher[Any], plan: Plan, given: Inputs, experts_EDD: Tensor, *, recompute: bool = False
) -> list[Tensor]:
    """Output, and the gradients of tokens, probabilities and local experts."""
    leaves = [*given.leaves(), experts_EDD.clone().requires_grad_()]

    def run(*leaves: Tensor) -> Tensor:
        return layer(dispatcher, plan, *leaves)

    if recompute:
        # Ranks are threads here and share the generator whose state checkpoint would save and restore.
        y_TD = cast(Tensor, checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False))
    else:
        y_TD = run(*leaves)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, given.grad_TD)]


def content(case: Case, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The tokens and probabilities that these rows stand for."""
    inputs = [case.inputs(rank) for rank in range(case.world)]
    x_TD = torch.cat([given.x_TD for given in inputs])
    probs_TK = torch.cat([given.probs_TK for given in inputs])
    first = [sum(case.tokens[:rank]) for rank in range(case.world)]
    tokens = torch.tensor([first[row.rank] + row.token for row in rows], dtype=torch.int64)
    choices = torch.tensor([row.choice for row in rows], dtype=torch.int64)
    return x_TD[tokens], probs_TK[tokens, choices]
