"""The model of the kits: what its ranks compute is one loss."""

import pytest
import torch

from moe_memory.testing.model import SmallMoE
from moe_memory.testing.reference import step_tokens
from moe_parallel import ParallelLayout, run_distributed


@pytest.mark.dist
def test_losses_of_ranks_add_up_to_that_of_one_process():
    def loss_of(groups):
        return SmallMoE(torch.float64, 1, groups)(step_tokens(1, 1)[0]).item()

    parts = run_distributed(ParallelLayout(world=4, tp=2, ep=2, etp=2), loss_of)
    assert len(set(parts)) == 4
    assert sum(parts) == pytest.approx(loss_of(None), rel=1e-12)
