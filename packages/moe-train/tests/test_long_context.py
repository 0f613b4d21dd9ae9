"""Long rows over ranks: the losses of one process, and a share of what it keeps for the backward."""

import pytest

from moe_memory import SavedBytes
from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.step import run_step
from moe_train.testing import short_corpus

pytestmark = pytest.mark.dist

# Ranks of `tp` hold the same of what goes into shared features: the inputs of attention and of the head, gathered, and
# the rotary tables. Here that is 1/20 of all that is kept.
MORE_OVER_TP = 1.06


def train(data, slots, steps, **degrees):
    """The losses of some steps, and by rank the bytes that the first of them keeps for its backward."""
    world = degrees.get("tp", 1) * degrees.get("cp", 1)
    layout = ParallelLayout(world=world, **degrees)
    settings = [f"data.sequence_length={slots}", "train.device=cpu", "train.threads=1"]
    settings += [f"parallel.{axis}={size}" for axis, size in degrees.items()]
    config = load_config("tiny_long_context", [], settings, world=world).config

    def on_rank(mesh):
        training = assemble(config, mesh, data)
        losses, kept = [], []
        for number in range(steps):
            microbatches = next_step(training.data.train, training.cut).microbatches
            with SavedBytes(training.model.parameters()) as saved:
                losses.append(run_step(training, microbatches, updates=number, window=None).loss)
            kept.append(saved.total_bytes)
        return losses, kept[0]

    results = run_distributed(layout, on_rank, timeout_s=1200, limit_s=1500, **mesh_of(config, layout))
    assert all(losses == results[0][0] for losses, _ in results)
    return results[0][0], [kept for _, kept in results]


def largest_difference(found, expected):
    return max(abs(f - e) / e for f, e in zip(found, expected, strict=True))


def rounding(slots):
    """A softmax over a row, and the mean of its losses, are sums of so many terms, which ranks add in another order."""
    return 2**-24 * slots**0.5


@pytest.fixture(scope="module")
def short():
    """A row of 2,048 tokens, in one process."""
    with short_corpus():
        data = load_data(load_config("tiny_long_context", [], ["data.sequence_length=2048"]).config)
    return data, *train(data, 2048, 3)


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2, "cp": 2}])
def test_ranks_share_a_row_and_what_is_kept_of_it(degrees, short):
    data, expected, (alone,) = short
    losses, kept = train(data, 2048, 3, **degrees)
    assert largest_difference(losses, expected) < rounding(2048)
    assert losses[2] < losses[1] < losses[0] - 0.2
    more = MORE_OVER_TP if "tp" in degrees else 1.001
    assert all(1 <= of_rank * len(kept) / alone < more for of_rank in kept)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_rows_of_65536_tokens_over_tp_and_cp_train_as_in_one_process():
    """The loss of the second step knows the gradients of the first."""
    data = load_data(load_config("tiny_long_context", [], []).config)
    losses, kept = train(data, 65536, 3, tp=2, cp=2)
    expected, (alone,) = train(data, 65536, 2)
    assert largest_difference(losses[:2], expected) < rounding(65536)
    assert losses[2] < losses[1] < losses[0] - 0.2
    assert all(1 <= of_rank * 4 / alone < MORE_OVER_TP for of_rank in kept)
