"""Fixed rows of experts in the trainer: the same training while they suffice, an error or a count when they do not."""

from dataclasses import replace

import pytest

from moe_comm import EXACT, Sizing
from moe_comm.config import AutoConfig, LayerConfig
from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble
from moe_train.config.checks import mesh_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.rows import dispatcher_config, most_tokens, sizing_of
from moe_train.step import run_step
from moe_train.testing import short_corpus

SETTINGS = (
    "train.global_batch_sequences=6",
    "train.microbatch_sequences=2",
    "data.sequence_length=31",
    "train.threads=1",
)


class Sizes:
    """`Groups` of which only the sizes are asked for."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def size(self, *axes):
        return self.sizes.get(axes[0], 1)


def config(*settings, world=1):
    return load_config("tiny_moe", [], [*SETTINGS, *settings], world=world).config


def steps(settings, layout=None, count=2):
    """Losses, gradient norms and the numbers of choices without a row, of rank 0."""
    layout = layout or ParallelLayout(world=1)
    given = config(*settings, world=layout.world)

    def on_rank(mesh):
        with short_corpus():
            training = assemble(given, mesh)
        found = []
        for number in range(count):
            tokens = next_step(training.data.train, training.cut, None)
            result = run_step(training, tokens.microbatches, updates=number, window=None)
            found.append((result.loss, result.gradient_norm, int(result.statistics.overflow.sum())))
        return found

    return run_distributed(layout, on_rank, timeout_s=60, limit_s=240, **mesh_of(given, layout))[0]


def test_tokens_of_a_rank_are_those_of_its_largest_microbatch():
    """Rows of 31 slots, padded to what cp and tp share; no more sequences than a rank has of the batch."""
    assert most_tokens(config(), Sizes()) == 2 * 31
    assert most_tokens(config(), Sizes(tp=2)) == 2 * 16
    assert most_tokens(config(), Sizes(cp=2)) == 2 * 16
    assert most_tokens(config("train.balance_sequences=1"), Sizes(dp=6)) == 31


def test_with_dynamic_context_a_rank_has_as_many_tokens_as_it_has_room_for():
    given = config()
    given = replace(given, parallel=replace(given.parallel, dynamic_cp_tokens=48))
    assert [most_tokens(given, Sizes(tp=tp)) for tp in (1, 2)] == [48, 24]


def test_rows_are_a_multiple_of_those_under_even_load():
    """Each of the ranks that share an expert gets the rows of all of them."""
    given = config("comm.rank_capacity_factor=1.5", "comm.overflow=drop")
    top_k = given.model.router.top_k
    assert sizing_of(given, Sizes()) == Sizing(capacity_rows=93 * top_k, overflow="drop", most_tokens=62)
    assert sizing_of(given, Sizes(etp=2)).capacity_rows == 186 * top_k
    assert sizing_of(config(), Sizes()) == EXACT


def test_auto_is_told_the_sizes_of_the_layer_unless_it_was():
    import torch

    given = config()
    model = given.model
    layer = LayerConfig(tokens=62, hidden=model.model_features, itemsize=2, top_k=model.router.top_k)
    assert dispatcher_config(given, Sizes(), torch.bfloat16) == AutoConfig(layer=layer)
    told = replace(given, comm=AutoConfig(layer=replace(layer, tokens=7)))
    assert dispatcher_config(told, Sizes(), torch.bfloat16) is told.comm


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["alltoall", "allgather", "hybrid"])
def test_r082_rows_that_suffice_change_nothing(kind):
    """Loss and gradient norm bit for bit, without a number that the host would have to know first."""
    layout = ParallelLayout(world=2, ep=2)
    settings = [f"comm.kind={kind}", "parallel.ep=2", "parallel.ranks_per_node=1"]
    exact = steps(settings, layout)
    assert steps([*settings, "comm.rank_capacity_factor=2"], layout) == exact
    assert [overflow for *_, overflow in exact] == [0, 0]


@pytest.mark.dist
def test_rows_that_do_not_suffice_are_an_error_on_all_ranks_before_the_update():
    from moe_parallel import MoeParallelError

    settings = ["comm.kind=alltoall", "parallel.ep=2", "comm.rank_capacity_factor=0.5"]
    with pytest.raises((MoeParallelError, ValueError), match=r"choices found no row: capacity_rows = \d+ is too few"):
        steps(settings, ParallelLayout(world=2, ep=2))


def test_choices_without_a_row_are_dropped_and_counted_where_that_is_meant():
    """Half of the rows: half of the choices find none."""
    given = config()
    ((loss, norm, overflow),) = steps(["comm.rank_capacity_factor=0.5", "comm.overflow=drop"], count=1)
    layers = given.model.num_layers - len(given.model.dense_layers)
    assert overflow == 6 * 31 * given.model.router.top_k * layers // 2
    assert (loss, norm) != steps([], count=1)[0][:2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["comm.rank_capacity_factor=0"], "must be finite and above 0, or none"),
        (["comm.kind=hybrid", "comm.lanes=0"], "must be at least 1"),
        (
            ["comm.rank_capacity_factor=2", "parallel.dynamic_cp_tokens=64", "data.sequences=sentences"],
            "with parallel.dynamic_cp_tokens microbatches have as many tokens as fit",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        config(*settings)
