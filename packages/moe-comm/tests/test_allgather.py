"""The all-gather dispatcher: the conformance kit, and that sizes are all that it asks for."""

import pytest
import torch

from moe_comm import AllGatherConfig, allgather, build_dispatcher, combine, dispatch, record_traffic
from moe_comm.testing import DispatcherConformance
from moe_kernels import Routing
from moe_parallel.testing import count_collectives, run_threads


class TestAllGatherConforms(DispatcherConformance):
    plugin = allgather.PLUGIN
    config = AllGatherConfig()
    worlds = (1, 3, (2, 2))
    large_worlds = (2, 6, (2, 3))
    roundings = 2  # sums of a rank, and of all ranks


@pytest.mark.parametrize("tokens", [(4, 4, 4), (5, 0, 2)])
def test_every_rank_gets_every_token_whatever_it_chose(tokens):
    """Bytes depend on the number of tokens alone: K more would not change them. Row 6."""

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(AllGatherConfig(), groups, 6)
        probs_TK = torch.ones(tokens[rank], 2)
        ids_TK = torch.full((tokens[rank], 2), -1)  # nobody chose anything
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=6))
        x_TD = torch.randn(tokens[rank], 3)
        with record_traffic() as ledger, count_collectives() as issued:
            sent = dispatch(dispatcher, plan, x_TD, probs_TK)
            y_TD = combine(dispatcher, plan, sent.rows_RD)
        assert sent.rows_RD.shape == (0, 3)
        assert not y_TD.any()
        return ledger.leaving_bytes("dispatch"), len(issued)

    # Three features, two probabilities and two ids of four bytes to each of two other ranks.
    assert run_threads(3, on_rank) == [(count * (3 + 2 + 2) * 4 * 2, 3) for count in tokens]
