"""A grouped GEMM from somebody else's package trains through the unchanged trainer."""

import runpy
from pathlib import Path

import pytest

from moe_train.assemble import assemble
from moe_train.config.error import ConfigError
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, microbatches, short_corpus, small_config

THIRD_PARTY = Path(__file__).parents[2] / "moe-kernels" / "tests" / "third_party" / "install.py"


def losses(*overrides):
    with short_corpus():
        training = assemble(small_config("memory.compute_dtype=float64", *ALL_LOSSES, *overrides))
    found = []
    for updates in range(3):
        batch = training.data.train.next_batch()
        found.append(run_step(training, microbatches(training, batch), updates=updates, window=None).loss)
    return type(training.model.layers[0].moe.experts.backend).__module__, found


def test_r050_an_unknown_grouped_gemm_lists_the_installed_ones():
    with pytest.raises(ConfigError, match=r"(?s)acme-padded.*loop, torch"):
        small_config("kernels.grouped_gemm=acme-padded")


def test_r048_it_is_found_by_entry_point_selected_by_config_and_gives_the_same_loss(tmp_path, monkeypatch):
    own, expected = losses()
    runpy.run_path(str(THIRD_PARTY))["install_acme"](tmp_path, monkeypatch)
    theirs, found = losses("kernels.grouped_gemm=acme-padded")
    assert own.startswith("moe_kernels.")
    assert theirs == "acme_gemm"
    assert found == pytest.approx(expected, rel=1e-10)
    assert len(set(found)) == 3
