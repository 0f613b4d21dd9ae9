"""A grouped GEMM from somebody else's package: it conforms, is found by its entry point, and computes the experts."""

import runpy
from pathlib import Path

import pytest
import torch
from acme_gemm import AcmeGroupedGemm

from moe_kernels import GROUPED_GEMM, GroupedExperts, PluginError, select_grouped_gemm
from moe_kernels.testing import GroupedGemmConformance

install_acme = runpy.run_path(str(Path(__file__).parent / "third_party" / "install.py"))["install_acme"]


class TestAcmeConforms(GroupedGemmConformance):
    backend = AcmeGroupedGemm()
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_r048_it_is_found_by_entry_point_selected_by_name_and_gives_the_same_experts(tmp_path, monkeypatch):
    with pytest.raises(PluginError, match=r"unknown grouped GEMM backend 'acme-padded'; installed here: loop, torch"):
        select_grouped_gemm("acme-padded", torch.float64, "cpu")
    install_acme(tmp_path, monkeypatch)
    backend = select_grouped_gemm("acme-padded", torch.float64, "cpu")
    assert type(backend) is AcmeGroupedGemm
    assert "acme-gemm" in {line.distribution for line in GROUPED_GEMM.inventory()}

    offsets_E, rows_RD, probs_R = torch.tensor([3, 3, 10], dtype=torch.int32), torch.randn(12, 6), torch.rand(12)
    experts = [GroupedExperts(3, 6, 5, backend=b, dtype=torch.float64) for b in (backend, select_loop())]
    for weight, other in zip(experts[0].parameters(), experts[1].parameters(), strict=True):
        other.data.copy_(torch.nn.init.normal_(weight.data))
    results = [e(rows_RD.double(), probs_R.double(), offsets_E) for e in experts]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), list(e.parameters())) for y, e in zip(results, experts, strict=True)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert results[0].abs().max() > 0.1


def select_loop():
    return select_grouped_gemm("loop", torch.float64, "cpu")


def test_two_distributions_that_claim_one_name_are_refused(tmp_path, monkeypatch):
    install_acme(tmp_path, monkeypatch)
    second = tmp_path / "second"
    second.mkdir()
    install_acme(second, monkeypatch, distribution="acme-gemm-fork")
    with pytest.raises(PluginError, match=r"'acme-padded' is claimed by acme-gemm 0.1.0 and by acme-gemm-fork 0.1.0"):
        select_grouped_gemm("acme-padded", torch.float32, "cpu")
