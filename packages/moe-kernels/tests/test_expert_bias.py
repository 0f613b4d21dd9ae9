import pytest
import torch

from moe_kernels import MoeKernelsError, RouterConfig, route, update_expert_bias


def test_r024_sign_of_the_distance_from_the_mean_load():
    # Ranks with [3, 1] and [0, 4] choices: [3, 5] together.
    bias = torch.zeros(2)
    update_expert_bias(bias, torch.tensor([3, 1]) + torch.tensor([0, 4]), 1e-3)
    assert torch.equal(bias, torch.tensor([1e-3, -1e-3]))
    at_the_mean = torch.tensor([0.5, 0.25, 0.0])
    update_expert_bias(at_the_mean, torch.tensor([7, 2, 12]), 0.25)
    assert at_the_mean.tolist() == [0.5, 0.5, -0.25]


def test_r024_a_recentred_bias_does_not_drift():
    generator = torch.Generator().manual_seed(0)
    plain, recentred = torch.zeros(8), torch.zeros(8)
    for _ in range(1000):
        counts = (torch.rand(8, generator=generator) ** 4 * 100).long()
        update_expert_bias(plain, counts, 1e-3)
        update_expert_bias(recentred, counts, 1e-3, recentred=True)
    assert abs(float(recentred.mean())) < 1e-7
    assert abs(float(plain.mean())) > 1e-2


def test_it_balances_a_router_that_prefers_one_expert():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(512, 8, generator=generator)
    logits[:, 3] += 2
    config = RouterConfig(top_k=2, score="sigmoid")
    bias = torch.zeros(8)
    before = route(logits, config, bias_E=bias).counts_E()
    for _ in range(200):
        update_expert_bias(bias, route(logits, config, bias_E=bias).counts_E(), 5e-3)
    after = route(logits, config, bias_E=bias).counts_E()
    assert int(before.max()) > 3 * 128
    assert int(after.max()) < 1.1 * 128


@pytest.mark.parametrize("counts", [torch.zeros(3, dtype=torch.int64), torch.zeros(2)])
def test_other_counts_are_refused(counts):
    with pytest.raises(MoeKernelsError, match="as many int64 counts"):
        update_expert_bias(torch.zeros(2), counts, 1e-3)
