"""A rank that dies or stays away, in every step of a layer: the others end in time and say whom they waited for.

Ranks are processes on gloo. What the survivors say they leave in files, since the run itself reports the dead.
"""

import os
import re
import signal
import time

import pytest
import torch

from moe_comm import AllGatherConfig, AllToAllConfig, HybridConfig, MoeCommError, build_dispatcher, combine, dispatch
from moe_kernels import Routing
from moe_parallel import CollectiveError, MoeParallelError, ParallelLayout, run_distributed

pytestmark = pytest.mark.dist

STEPS = ("plan", "exchange", "exchange_return", "backward of exchange_return", "backward of exchange")


def layer(dispatcher, rank, before):
    """A layer and its backward; `before(step)` is called ahead of every step that communicates."""
    x_TD, probs_TK = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    ids_TK = torch.tensor([[0, 11], [3, 4], [rank, 6]])
    before("plan")
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=12))
    before("exchange")
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    sent.rows_RD.register_hook(lambda grad: before("backward of exchange"))
    before("exchange_return")
    y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None])
    y_TD.register_hook(lambda grad: before("backward of exchange_return"))
    y_TD.sum().backward()


def what_survivors_say(folder, config, step, misbehave, *, world, timeout_s, ep_inner):
    """The message of each rank but the last, which misbehaves ahead of a step, and the seconds that it took."""

    def on_rank(mesh):
        rank = mesh.rank("ep")
        dispatcher = build_dispatcher(config, mesh, 12)

        def before(name):
            if name == step and rank == world - 1:
                misbehave()

        layer(dispatcher, rank, lambda name: None)
        began = time.monotonic()
        try:
            layer(dispatcher, rank, before)
        except CollectiveError as error:
            (folder / str(rank)).write_text(f"{time.monotonic() - began:.2f} {error}")
            raise

    with pytest.raises(MoeParallelError) as caught:
        run_distributed(
            ParallelLayout(world=world, ep=world), on_rank, timeout_s=timeout_s, ep_inner=ep_inner, limit_s=60
        )
    said = {int(file.name): file.read_text().split(" ", 1) for file in folder.iterdir()}
    said.pop(world - 1, None)
    assert sorted(said) == list(range(world - 1)), f"ranks {sorted(said)} of {world} said something: {caught.value}"
    return [(float(seconds), words) for _, (seconds, words) in sorted(said.items())]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def names_group_and_ranks(rank, words):
    return re.match(rf"rank {rank}: \w+ in group [\w*= ]+ of ranks \d[\d, ]* failed after [\d.]+ s: ", words)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("config", "world", "ep_inner"),
    [(AllToAllConfig(), 2, 1), (AllGatherConfig(), 3, 1), (HybridConfig(lanes=2), 4, 2)],
    ids=["alltoall", "allgather", "hybrid"],
)
def test_a_rank_that_dies_ends_the_others(tmp_path, step, config, world, ep_inner):
    """Within the timeout, which is far off: its peers see that the connection is gone."""
    said = what_survivors_say(tmp_path, config, step, die, world=world, timeout_s=20, ep_inner=ep_inner)
    for rank, (seconds, words) in enumerate(said):
        assert names_group_and_ranks(rank, words), words
        assert seconds < 15


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_stays_away_ends_the_others(tmp_path, step):
    """After the timeout. Row 39."""
    said = what_survivors_say(
        tmp_path, AllToAllConfig(), step, lambda: time.sleep(60), world=2, timeout_s=1, ep_inner=1
    )
    for rank, (seconds, words) in enumerate(said):
        assert names_group_and_ranks(rank, words), words
        assert 0.9 < seconds < 15


@pytest.mark.parametrize("step", ["exchange", "backward of exchange_return"])
def test_a_rank_that_stays_away_ends_other_nodes(tmp_path, step):
    """Also those that only wait for a rank that waits for it."""
    said = what_survivors_say(tmp_path, HybridConfig(), step, lambda: time.sleep(6), world=4, timeout_s=1.5, ep_inner=2)
    for rank, (seconds, words) in enumerate(said):
        assert names_group_and_ranks(rank, words), words
        assert 1.4 < seconds < 15


def test_a_rank_that_raises_ends_the_others():
    """An error of one rank alone, between steps, is not a hang; the first report is that of the rank that raised."""

    def on_rank(mesh):
        dispatcher = build_dispatcher(AllToAllConfig(), mesh, 12)

        def before(name):
            if name == "exchange_return" and mesh.rank("ep") == 1:
                raise MoeCommError("something is wrong here")

        layer(dispatcher, mesh.rank("ep"), before)

    with pytest.raises((MoeCommError, MoeParallelError), match="something is wrong here"):
        run_distributed(ParallelLayout(world=2, ep=2), on_rank, timeout_s=5, limit_s=30)
