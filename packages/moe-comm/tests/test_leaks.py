"""Many exchanges, many dispatchers: what is held afterwards is what was held before."""

import gc
import os

import pytest
import torch

from moe_comm import (
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    Sizing,
    build_dispatcher,
    combine,
    dispatch,
    record_traffic,
)
from moe_comm.testing.harness import split_groups
from moe_kernels import Routing
from moe_parallel import ParallelLayout, run_distributed
from moe_parallel.testing import run_threads

CONFIGS = {
    "alltoall": (AllToAllConfig(), 2, 1),
    "allgather": (AllGatherConfig(), 2, 1),
    "hybrid": (HybridConfig(lanes=2), 4, 2),
}
every_dispatcher = pytest.mark.parametrize(("config", "world", "ep_inner"), CONFIGS.values(), ids=CONFIGS)
BOTH_SIZINGS = (Sizing(), Sizing(capacity_rows=64, most_tokens=8))


def layer(dispatcher, step, sizing, num_experts=8):
    generator = torch.Generator().manual_seed(step)
    num_tokens = 1 + step % 8
    x_TD = torch.randn(num_tokens, 4, generator=generator).requires_grad_()
    ids_TK = torch.randint(-1, num_experts, (num_tokens, 2), generator=generator)
    probs_TK = torch.rand(num_tokens, 2, generator=generator).requires_grad_()
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts), sizing)
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None])
    y_TD.sum().backward()
    return y_TD.detach()


def held():
    """Live tensors, open files and resident bytes of this process."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())  # lazy proxies warn if asked
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return tensors, len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def exchanges_leak_nothing(config, world, ep_inner, count):
    """Each layer exchanges four times: there and back, forward and backward."""

    def on_rank(mesh):
        dispatcher = build_dispatcher(config, mesh, 8)
        before = ()
        for step in range(count // 4):
            layer(dispatcher, step + mesh.rank("ep"), BOTH_SIZINGS[step % 2])
            if step == count // 8:
                before = held()
        return [now - then for now, then in zip(held(), before, strict=True)]

    for more_tensors, more_files, more_bytes in run_distributed(
        ParallelLayout(world=world, ep=world), on_rank, timeout_s=30, limit_s=280, ep_inner=ep_inner
    ):
        assert more_tensors <= 0
        assert more_files <= 0  # connections may still close
        assert more_bytes < 4 * 2**20


@pytest.mark.dist
@every_dispatcher
def test_hundreds_of_exchanges_leak_nothing(config, world, ep_inner):
    exchanges_leak_nothing(config, world, ep_inner, 600 // world)


@pytest.mark.dist
@pytest.mark.slow
@every_dispatcher
def test_row_28_ten_thousand_exchanges_leak_nothing(config, world, ep_inner):
    exchanges_leak_nothing(config, world, ep_inner, 10_000)


@every_dispatcher
def test_row_28_plans_die_with_their_last_user(config, world, ep_inner):
    """No cache holds a plan, a map or a row: tensors of a step are gone when its results are."""

    def on_rank(rank, groups):
        inner = split_groups(rank, groups, 1, world // ep_inner)
        dispatcher = build_dispatcher(config, inner, 8)
        for step in range(3):
            layer(dispatcher, step, BOTH_SIZINGS[step % 2])
        return True

    run_threads(world, on_rank)  # torch's own one-time state
    before = held()[0]
    run_threads(world, on_rank)
    assert held()[0] == before


@pytest.mark.dist
@every_dispatcher
def test_a_dispatcher_can_be_dropped_and_made_again(config, world, ep_inner):
    """On the same groups, with the same bits; two side by side do not disturb each other, with sizes of their own.

    Rows 23 and 51.
    """

    def on_rank(mesh):
        first, second = (build_dispatcher(config, mesh, num_experts) for num_experts in (8, 16))
        sizings = (Sizing(capacity_rows=40, most_tokens=8), Sizing(capacity_rows=56, most_tokens=9))
        alone = [layer(first, 3, sizings[0]), layer(second, 4, sizings[1], 16)]
        together = []
        plans = []
        for dispatcher, step, sizing, num_experts in ((first, 3, sizings[0], 8), (second, 4, sizings[1], 16)):
            generator = torch.Generator().manual_seed(step)
            x_TD = torch.randn(1 + step, 4, generator=generator)
            ids_TK = torch.randint(-1, num_experts, (1 + step, 2), generator=generator)
            probs_TK = torch.rand(1 + step, 2, generator=generator)
            plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts), sizing)
            parcel = dispatcher.prepare(plan, x_TD, probs_TK)
            plans.append((dispatcher, plan, dispatcher.exchange(plan, parcel)))
        for dispatcher, plan, pending in plans:
            sent = dispatcher.arrange(plan, pending.wait())
            together.append(combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None]))
        del first, plans
        files = held()[1]
        with record_traffic() as ledger:
            again = layer(build_dispatcher(config, mesh, 8), 3, sizings[0])
        assert ledger.host_syncs == 1, "a new dispatcher compares sizes again"
        assert held()[1] <= files, "groups are the caller's: none is made"
        results = [*together, again]
        return [torch.equal(one, other) for one, other in zip(results, [*alone, alone[0]], strict=True)]

    results = run_distributed(ParallelLayout(world=world, ep=world), on_rank, timeout_s=20, ep_inner=ep_inner)
    assert results == [[True] * 3] * world
