"""A model family from somebody else's package, in one file, through the unchanged trainer."""

from pathlib import Path

import pytest

from moe_parallel import ParallelConfig
from moe_train.assemble import assemble, load_data
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, SMALL, microbatches, short_corpus, small_config
from moe_train.verify import Case, verify

FILE = Path(__file__).parent / "third_party" / "acme_parallel.py"
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def acme(install):
    source = FILE.read_text()
    install("acme-models", "[moe_train.models]\nacme_parallel = acme_models:SPEC\n", source)


def config(*overrides):
    return load_config("tiny_moe", [], ["model.kind=acme_parallel", *SMALL, *ALL_LOSSES, *overrides]).config


@pytest.mark.usefixtures("acme")
def test_it_is_selected_by_config_and_learns():
    with short_corpus():
        run = assemble(config("model.balance.bias_rate=1e-3", "model.mtp_layers=1"))
    assert type(run.model.layers[0]).__module__ == "acme_models"
    losses = [
        run_step(run, microbatches(run, run.data.train.next_batch()), updates=i, window=None).loss for i in range(12)
    ]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.usefixtures("acme")
def test_its_counts_are_those_of_its_parameters():
    with short_corpus():
        run = assemble(config())
    assert sum(parameter.numel() for parameter in run.model.parameters()) == run.costs.parameters


@pytest.mark.dist
@pytest.mark.usefixtures("acme")
def test_its_loss_does_not_depend_on_the_layout():
    chosen = [
        Case(world=2, parallel=parallel, engine="zero1", microbatch_sequences=2)
        for parallel in (ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2))
    ]
    with short_corpus():
        found = config("model.num_experts=8")
        for deviation in verify(found, chosen, steps=2, timeout_s=20, data=load_data(found)):
            assert deviation.holds, deviation


def test_without_its_package_the_error_lists_what_is_installed():
    with pytest.raises(ConfigError, match=r"(?s)acme_parallel.*decoder"):
        small_config("model.kind=acme_parallel")


def test_the_readme_shows_the_file():
    assert FILE.read_text().strip() in README.read_text()
