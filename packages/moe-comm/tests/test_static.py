"""Fixed sizes beyond the kit: no operator that reads on the host, tensors without data, and what goes wrong late."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm import (
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    LocalConfig,
    MoeCommError,
    Sizing,
    build_dispatcher,
    combine,
    dispatch,
    record_traffic,
    refuse_overflow,
)
from moe_kernels import Routing
from moe_parallel import AxisGroups, CollectiveError, ParallelLayout, run_distributed
from moe_parallel.testing import run_threads

READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

every_dispatcher = pytest.mark.parametrize(
    "config",
    [AllToAllConfig(), AllGatherConfig(), HybridConfig(lanes=2), HybridConfig(rail="allgather")],
    ids=["alltoall", "allgather", "lanes", "rail_allgather"],
)


class Reads(TorchDispatchMode):
    """Operators whose result, or its shape, comes from the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.partition("::")[2].rstrip("2") in READS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def routing(rank, num_tokens, num_experts):
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.randint(-1, num_experts, (num_tokens, 3), generator=generator)
    return Routing(ids_TK=ids_TK, probs_TK=torch.rand(num_tokens, 3, generator=generator), num_experts=num_experts)


def layer(dispatcher, given, sizing):
    x_TD = torch.ones(len(given.ids_TK), 4, requires_grad=True)
    plan = dispatcher.plan(given, sizing)
    sent = dispatch(dispatcher, plan, x_TD, given.probs_TK)
    y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None])
    y_TD.sum().backward()
    return plan, sent, y_TD


@pytest.mark.dist
@every_dispatcher
def test_r082_no_operator_reads_on_the_host(config):
    """On gloo, forward and backward; gloo itself works on the host, and reads nothing through operators."""

    def on_rank(mesh):
        rank = mesh.rank("ep")
        dispatcher = build_dispatcher(config, mesh, 8)
        sizing = Sizing(capacity_rows=20, row_multiple=4, most_tokens=6)
        layer(dispatcher, routing(rank, 3 + rank, 8), sizing)
        with Reads() as reads:
            layer(dispatcher, routing(rank + 10, 6 - rank, 8), sizing)
        with Reads() as exact:
            layer(dispatcher, routing(rank, 4, 8), Sizing())
        return reads.found, len(exact.found) > 0

    assert run_distributed(ParallelLayout(world=4, ep=4), on_rank, timeout_s=20, ep_inner=2) == [([], True)] * 4


@pytest.mark.parametrize(
    "config",
    [LocalConfig(), AllToAllConfig(), AllToAllConfig(row="per_expert"), AllGatherConfig(), HybridConfig()],
    ids=["local", "alltoall", "per_expert", "allgather", "hybrid"],
)
def test_r082_a_plan_needs_no_data(config):
    """On tensors without data every read is an error; shapes are those of a run with data."""
    dispatcher = build_dispatcher(config, AxisGroups(), 8)
    sizing = Sizing(capacity_rows=12, row_multiple=2)
    plan, sent, y_TD = layer(dispatcher, routing(0, 5, 8), sizing)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        given = Routing(ids_TK=torch.empty(5, 3, dtype=torch.int64), probs_TK=torch.empty(5, 3), num_experts=8)
        fake_plan, fake_sent, fake_TD = layer(dispatcher, given, sizing)
    assert mode is not None
    assert fake_plan.num_rows == plan.num_rows == 12
    assert fake_sent.rows_RD.shape == sent.rows_RD.shape
    assert fake_TD.shape == y_TD.shape


@pytest.mark.parametrize("overflow", ["raise", "drop"])
def test_r082_an_overflow_is_an_error_unless_it_is_meant(overflow):
    dispatcher = build_dispatcher(LocalConfig(), AxisGroups(), 2)
    given = Routing(ids_TK=torch.tensor([[0, 1], [1, 0], [0, 0]]), probs_TK=torch.ones(3, 2), num_experts=2)
    sizing = Sizing(capacity_rows=5, overflow=overflow)
    plan = dispatcher.plan(given, sizing)
    assert int(plan.overflow) == 1
    refuse_overflow(0, sizing)
    if overflow == "drop":
        refuse_overflow(int(plan.overflow), sizing)
    else:
        words = r"1 choices found no row: capacity_rows = 5 is too few for this routing, or expert ids are out of range"
        with pytest.raises(MoeCommError, match=words):
            refuse_overflow(int(plan.overflow), sizing)


def test_sizes_that_are_none_are_refused():
    dispatcher = build_dispatcher(AllToAllConfig(), AxisGroups(), 2)
    with pytest.raises(MoeCommError, match="capacity_rows = -1 is no number of rows"):
        dispatcher.plan(routing(0, 2, 2), Sizing(capacity_rows=-1))
    with pytest.raises(MoeCommError, match="most_tokens is for fixed sizes; give capacity_rows with it"):
        dispatcher.plan(routing(0, 2, 2), Sizing(most_tokens=4))
    with pytest.raises(MoeCommError, match="most_tokens = -1 is no number of tokens"):
        dispatcher.plan(routing(0, 2, 2), Sizing(capacity_rows=8, most_tokens=-1))


@pytest.mark.dist
@every_dispatcher
def test_row_10_sizes_that_differ_are_an_error_on_every_rank(config):
    """The first time that ranks meet: each says which rank has which size, and the group still works."""

    def on_rank(mesh):
        rank = mesh.rank("ep")
        dispatcher = build_dispatcher(config, mesh, 4)
        said = []
        for tokens, sizing in (
            (4, Sizing(capacity_rows=20, most_tokens=4 + rank // 3)),
            (4, Sizing(capacity_rows=20 + rank // 3)),
            (4 + rank // 3, Sizing(capacity_rows=20)),
            (4 + rank // 3, Sizing(capacity_rows=20, most_tokens=4)),
        ):
            with pytest.raises(MoeCommError) as caught:
                dispatcher.plan(routing(rank, tokens, 4), sizing)
            said.append(str(caught.value))
        layer(dispatcher, routing(rank, 4, 4), Sizing(capacity_rows=20))
        return said

    for said in run_distributed(ParallelLayout(world=4, ep=4), on_rank, timeout_s=10, ep_inner=2):
        others = [f"{value} on rank 0, {value} on rank 1, {value} on rank 2, " for value in (4, 20, 4)]
        for words, values, last in zip(said, others, (5, 21, 5), strict=False):
            assert f"{values}{last} on rank 3" in words
        assert said[3].endswith("there are more tokens: 5 on rank 3")


@pytest.mark.dist
@every_dispatcher
@pytest.mark.parametrize("late", ["sizes", "tokens"])
def test_sizes_that_differ_later_end_every_rank(late, config):
    """After ranks have agreed they do not read what others say: who is wrong says so, and the others miss it."""

    def on_rank(mesh):
        rank = mesh.rank("ep")
        dispatcher = build_dispatcher(config, mesh, 4)
        sizing = Sizing(capacity_rows=20, most_tokens=4)
        layer(dispatcher, routing(rank, 4, 4), sizing)
        other = Sizing(capacity_rows=30, most_tokens=4) if late == "sizes" and rank == 3 else sizing
        try:
            layer(dispatcher, routing(rank, 5 if late == "tokens" and rank == 3 else 4, 4), other)
        except (MoeCommError, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    *others, wrong = run_distributed(ParallelLayout(world=4, ep=4), on_rank, timeout_s=2, limit_s=20, ep_inner=2)
    assert re.match("MoeCommError: .*(30 on rank 3|this rank brings 5 tokens)", wrong), wrong
    for error in others:
        assert re.match(r"CollectiveError: rank \d: \w+ in group [\w*= ]+ of ranks \d[\d, ]* failed", error), error


def test_row_10_numbers_of_tokens_that_all_ranks_had_in_turn_do_not_mix():
    """Without `most_tokens`: who comes with another number than last time compares, though all ranks had it once."""

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(AllToAllConfig(), groups, 4)
        sizing = Sizing(capacity_rows=20)
        for tokens in (4, 6):
            dispatcher.plan(routing(rank, tokens, 4), sizing)
        with record_traffic() as again:
            dispatcher.plan(routing(rank, 6, 4), sizing)
        try:
            dispatcher.plan(routing(rank, (6, 4)[rank], 4), sizing)
        except MoeCommError as error:
            return again.host_syncs, str(error).partition(";")[0]
        return again.host_syncs, "no error"

    told = "all ranks need the same sizes, but most_tokens is 6 on rank 0, 4 on rank 1"
    assert run_threads(2, on_rank) == [(0, "no error"), (0, told)]


@pytest.mark.dist
def test_row_10_exact_and_fixed_sizes_do_not_mix():
    """One rank plans with fixed sizes and the other without, or with other choices per token: each is told."""

    def on_rank(mesh):
        dispatcher = build_dispatcher(AllToAllConfig(), mesh, 4)
        first = mesh.rank("ep") == 0
        words = []
        for sizing, top_k in ((Sizing(capacity_rows=8) if first else Sizing(), 2), (Sizing(), 2 if first else 3)):
            ids_TK = torch.zeros(2, top_k, dtype=torch.int64)
            routing = Routing(ids_TK=ids_TK, probs_TK=torch.ones(2, top_k), num_experts=4)
            with pytest.raises(MoeCommError) as error:
                dispatcher.plan(routing, sizing)
            words.append(str(error.value))
        return words

    for words in run_distributed(ParallelLayout(world=2, ep=2), on_rank, timeout_s=20):
        assert "most_tokens is 2 on rank 0, -1 on rank 1" in words[0]
        assert "choices per token is 2 on rank 0, 3 on rank 1" in words[1]
