"""Stochastic rounding: right on average, and decided by the element and the update alone."""

from math import prod

import pytest
import torch

from moe_memory.optim.rounding import FIELDS, element_numbers, random_bits, round_to_bfloat16
from moe_parallel import Box

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((7,), Box((2,), (5,))),
        ((6, 5), Box((1, 0), (4, 5))),
        ((6, 5), Box((0, 2), (6, 2))),
        ((6, 5), Box((2, 1), (3, 3))),
        ((3, 4, 5), Box((1, 0, 0), (2, 4, 5))),
        ((3, 4, 5), Box((0, 1, 0), (3, 2, 5))),
        ((3, 4, 2, 5), Box((1, 1, 0, 3), (2, 3, 2, 2))),
        ((), Box((), ())),
    ],
)
def test_element_numbers_are_places_in_the_whole(shape, box):
    whole = torch.arange(prod(shape)).view(shape)
    index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
    expected = whole[index].flatten()
    assert torch.equal(element_numbers(box, shape, 0, len(expected), CPU), expected)
    middle = element_numbers(box, shape, len(expected) // 3, len(expected) - 1, CPU)
    assert torch.equal(middle, expected[len(expected) // 3 : -1])


def test_bits_depend_on_the_element_the_update_the_name_and_the_seed():
    bits = random_bits(1, 2, "a", torch.arange(100))
    assert torch.equal(random_bits(1, 2, "a", torch.arange(40, 60)), bits[40:60])
    for other in ((2, 2, "a"), (1, 3, "a"), (1, 2, "b")):
        assert not bool((random_bits(*other, torch.arange(100)) == bits).any())


def test_what_bfloat16_holds_is_kept_and_the_rest_goes_to_a_neighbour():
    bits = random_bits(0, 0, "a", torch.arange(4096))
    kept = torch.randn(4096).bfloat16()
    assert torch.equal(round_to_bfloat16(kept.float(), bits, "master"), kept)
    x = torch.randn(4096)
    rounded = round_to_bfloat16(x, bits, "master").float()
    assert bool(((rounded - x).abs() < x.abs() * 2.0**-7).all())
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    assert torch.equal(round_to_bfloat16(odd, bits[:4], "master").float().nan_to_num(), odd.nan_to_num())


def test_nothing_finite_becomes_infinite_and_nan_stays_nan():
    """Also where all lower bits are set, as a GPU makes it: adding to them would give zero."""
    bits = random_bits(0, 0, "a", torch.arange(1000))
    largest = torch.finfo(torch.bfloat16).max
    between = torch.full((1000,), 0x7F7F8000, dtype=torch.int32).view(torch.float32)
    for x in (between, -between, torch.full((1000,), torch.finfo(torch.float32).max)):
        assert torch.equal(round_to_bfloat16(x, bits, "master"), x.sign().mul(largest).bfloat16())
    for pattern in (0x7FFFFFFF, -1, 0x7FC00000):
        x = torch.full((1000,), pattern, dtype=torch.int32).view(torch.float32)
        assert bool(round_to_bfloat16(x, bits, "exp_avg").isnan().all())


def test_denormal_numbers_are_rounded_to_a_neighbour():
    bits = random_bits(0, 0, "a", torch.arange(4096))
    x = torch.randn(4096) * 1e-39
    rounded = round_to_bfloat16(x, bits, "exp_avg_sq").float()
    assert bool(((rounded - x).abs() < 2.0**-133).all())  # the lowest bit that bfloat16 has there
    assert float((rounded - x).mean().abs()) < 5 * 2.0**-133 / 64


@pytest.mark.parametrize("field", FIELDS)
def test_the_mean_is_right(field):
    """Of 2^16 draws of a value between two neighbours, 2^-7 apart, within five standard deviations."""
    for part in (0.1, 0.5, 0.9):
        bits = random_bits(3, 0, field, torch.arange(2**16))
        x = torch.full((2**16,), 1 + part * 2.0**-7)
        up = (round_to_bfloat16(x, bits, field) > 1).double().mean()
        assert abs(float(up) - part) < 5 * (part * (1 - part) / 2**16) ** 0.5


def test_fields_are_independent():
    bits = random_bits(3, 0, "a", torch.arange(2**14))
    x = torch.full((2**14,), 1 + 2.0**-8)
    ups = torch.stack([(round_to_bfloat16(x, bits, field) > 1).double() for field in FIELDS])
    correlation = torch.corrcoef(ups)
    assert float((correlation - torch.eye(3)).abs().max()) < 5 / 2**7
