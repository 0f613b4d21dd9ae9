import pytest
import torch

from moe_train.data.batch import Batch
from moe_train.scale import StepScale


def batch(valid_lengths, slots=4, masked=()):
    rows = len(valid_lengths)
    valid = torch.arange(slots) < torch.tensor(valid_lengths)[:, None]
    mask = torch.ones(rows, slots, dtype=torch.bool)
    for row, slot in masked:
        mask[row, slot] = False
    tokens = torch.zeros(rows, slots, dtype=torch.int64)
    return Batch.from_rows(tokens, tokens, valid, mask)


def weights(whole, size, loss_norm, balance_sequences=1):
    scale = StepScale.count([whole], balance_sequences=balance_sequences, loss_norm=loss_norm)
    return [scale.microbatch(part, torch.float64) for part in whole.microbatches(size)]


def weight(part, name):
    return getattr(part if hasattr(part, name) else part.routing, name)


def test_counts_by_hand():
    whole = batch([4, 2, 0, 1, 0, 0], masked=[(0, 0), (3, 0)])
    scale = StepScale.count([whole], balance_sequences=2, loss_norm="token")
    assert (scale.num_tokens, scale.targets.targets, scale.num_segments) == (7, 5, 3)
    assert (scale.num_balance, scale.targets.balance) == (2, 1)  # rows 4 and 5 hold nothing, row 3 no target


@pytest.mark.parametrize("loss_norm", ["token", "microbatch"])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_every_mean_has_weights_that_sum_to_one(loss_norm, size):
    parts = weights(batch([4, 2, 0, 1, 3, 4], masked=[(0, 0)]), size, loss_norm, balance_sequences=2)
    for name in ("target_weight_T", "token_weight_T", "balance_weight_M", "segment_weight_G"):
        assert sum(weight(part, name).sum() for part in parts) == pytest.approx(1.0, abs=1e-12), name


def test_r119_token_norm_weighs_tokens_and_microbatch_norm_weighs_microbatches():
    # Losses [1, 1, 1, 1] and [5]: mean over tokens 1.8, mean of means 3.0.
    whole = batch([4, 1])
    losses = torch.tensor([1.0, 1, 1, 1, 5, 99, 99, 99], dtype=torch.float64)
    for loss_norm, expected in (("token", 1.8), ("microbatch", 3.0)):
        for size in (1, 2):
            joined = torch.cat([part.target_weight_T for part in weights(whole, size, loss_norm)])
            assert float((losses * joined).sum()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss_norm", ["token", "microbatch"])
def test_a_batch_without_any_token_gives_zero_weights_and_no_nan(loss_norm):
    (part,) = weights(batch([0, 0]), 2, loss_norm)
    for name in ("target_weight_T", "token_weight_T", "balance_weight_M", "segment_weight_G"):
        assert weight(part, name).abs().sum() == 0, name


def test_balance_microbatches_follow_the_global_order():
    whole = batch([4] * 8)
    joined = [part.routing.balance_T for part in weights(whole, 4, "token", balance_sequences=2)]
    assert [part.tolist() for part in joined] == [[0] * 8 + [1] * 8] * 2
