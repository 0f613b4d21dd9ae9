"""Codes of 8 bits and the blocks that they are relative to."""

import pytest
import torch

from moe_memory.optim.blocks import BLOCK, block_dim, scale_box, scale_shape, view_by_block
from moe_memory.optim.codes import _limits, code_values, decode, encode, nearest_codes
from moe_parallel import Box, ParameterKind, ShardSpec

CPU = torch.device("cpu")


def coded(x, shape_ABC, *, signed):
    """Codes and scales."""
    a, b, c = shape_ABC
    code = torch.full((a, b, c), 77, dtype=torch.uint8)
    scale = torch.full((a, -(-b // BLOCK), c), torch.nan)
    encode(x.view(shape_ABC), code, scale, signed=signed)
    return code, scale


def decoded(code, scale, dtype, *, signed):
    x = torch.full(code.shape, torch.nan, dtype=dtype)
    decode(code, scale, x, signed=signed)
    return x


@pytest.mark.parametrize(("signed", "zero", "smallest"), [(True, 127, 0.55e-6), (False, 0, 0.325e-6)])
def test_the_code_is_the_dynamic_tree_of_its_paper(signed, zero, smallest):
    values = code_values(signed, CPU)
    assert values.shape == (256,)
    assert bool((values.diff() > 0).all())
    assert values[zero] == 0
    assert values[255] == 1
    assert float(values[zero + 1]) == pytest.approx(smallest)
    # A decade has twice as many values as the one below it.
    counts = [int(((values >= 10.0**-n) & (values < 10.0 ** (1 - n))).sum()) for n in range(1, 7)]
    assert counts == [(64 if signed else 128) // 2**n for n in range(6)]
    if signed:
        assert torch.equal(values[:127], -values[128:255].flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 1), (2, 256, 3), (1, 700, 2), (4, 512, 1)])
def test_every_value_gets_the_nearest_code_of_its_block(shape, signed, dtype):
    length = shape[1]
    x = torch.randn(shape, dtype=dtype) * 10.0 ** (-torch.rand(shape) * 5)
    x = x if signed else x.abs()
    code, scale = coded(x, shape, signed=signed)
    values = code_values(signed, CPU)
    for block in range(scale.shape[1]):
        inside = slice(block * BLOCK, min((block + 1) * BLOCK, length))
        largest = x[:, inside].abs().amax(1)
        assert torch.equal(scale[:, block], largest.float())
        relative = x[:, inside].double() / scale[:, block : block + 1].double()
        distance = (relative[..., None] - values).abs()
        if not signed:
            distance[..., 0][relative > 0] = torch.inf
        chosen = values[code[:, inside].int()]
        assert bool(((relative - chosen).abs() <= distance.amin(-1) + 1e-7 * relative.abs()).all())
    assert torch.equal(
        decoded(code, scale, dtype, signed=signed),
        values.to(dtype)[code.int()] * scale.repeat_interleave(BLOCK, 1)[:, :length],
    )


@pytest.mark.parametrize(("signed", "error"), [(True, 0.9 / 128), (False, 0.9 / 256)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_codes_rise_with_the_values_and_are_off_by_half_their_distance_at_most(signed, error, scale):
    """Judged in float64: of the highest decade, in parts of the scale."""
    x = torch.linspace(-1.0 if signed else 0.0, 1.0, BLOCK, dtype=torch.float64).view(1, BLOCK, 1) * scale
    code, found = coded(x.float(), (1, BLOCK, 1), signed=signed)
    assert bool((code.int().diff(dim=1) >= 0).all())
    near = code_values(signed, CPU)[code.int()] * float(found)
    assert float((near - x).abs().max()) <= (error + 1e-6) * scale


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_not_finite_when_it_is_read(bad):
    x = torch.ones(1, 2 * BLOCK, 1)
    x[0, 3] = bad
    again = decoded(*coded(x, (1, 2 * BLOCK, 1), signed=True), torch.float32, signed=True)
    assert not bool(again[0, :BLOCK].isfinite().all())
    assert bool((again[0, BLOCK:] == 1).all())


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_decoded_has_the_same_codes_again(signed):
    code = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)  # 1, the largest, among them
    for scale in (1.0, 3e-20, 7e9):
        x = decoded(code, torch.full((1, 1, 1), scale), torch.float32, signed=signed)
        again, found = coded(x, (1, 256, 1), signed=signed)
        assert torch.equal(again, code)
        assert found.item() == pytest.approx(scale)


def test_zeros_stay_zeros_and_what_is_above_zero_stays_above():
    """The root of a second moment is a divisor."""
    x = torch.zeros(1, 300, 1)
    code, scale = coded(x, (1, 300, 1), signed=False)
    assert torch.equal(decoded(code, scale, torch.float32, signed=False), x)
    x[0, 0], x[0, 1], x[0, 2] = 1e30, 1e-30, 1e-10
    again = decoded(*coded(x, (1, 300, 1), signed=False), torch.float32, signed=False)
    assert bool((again[0, 1:3] > 0).all())
    assert bool((again[0, 3:] == 0).all())


@pytest.mark.parametrize(
    ("shape", "kind", "placements", "expected"),
    [
        ((512, 64), ParameterKind.DENSE, (), 0),
        ((64, 64), ParameterKind.DENSE, (), 1),
        ((512, 64), ParameterKind.DENSE, (("tp", 0),), 1),
        ((64, 512), ParameterKind.DENSE, (("tp", 1),), 0),
        ((8, 64, 2, 32), ParameterKind.EXPERT, (("ep", 0), ("etp", 3)), 1),
        ((8, 64, 32), ParameterKind.EXPERT, (("ep", 0), ("etp", 1)), 2),
        ((512,), ParameterKind.DENSE, (), None),
        ((8, 512), ParameterKind.EXPERT, (("ep", 0),), None),  # stacked vectors
        ((), ParameterKind.DENSE, (), None),
        ((8, 1), ParameterKind.DENSE, (("tp", 0),), None),
    ],
)
def test_blocks_lie_along_the_longest_dim_that_no_axis_splits(shape, kind, placements, expected):
    assert block_dim(ShardSpec(name="x", shape=shape, kind=kind, placements=placements)) == expected


def test_scales_of_a_part_are_a_part_of_the_scales():
    assert scale_shape((4, 600, 3), 1) == (4, 3, 3)
    assert scale_box(Box((1, 256, 0), (2, 344, 3)), 1) == Box((1, 1, 0), (2, 2, 3))
    assert view_by_block((4, 600, 3, 5), 1) == (4, 600, 15)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_that_is_looked_up_is_the_one_that_is_searched_for(signed):
    """At every limit, its neighbours in float32, and at the ends."""
    values = code_values(signed, CPU)
    limits = ((values[:-1] + values[1:]) / 2).float()
    ends = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 1.0001, -1.0001])
    x = torch.cat([limits, limits.nextafter(torch.tensor(2.0)), limits.nextafter(torch.tensor(-2.0)), ends])
    x = torch.cat([x, torch.rand(5000) * 2 - 1, 10.0 ** (-torch.rand(5000) * 9)])
    x = x if signed else x.abs()
    expected = torch.bucketize(x, _limits(signed, CPU).float(), out_int32=True)
    assert torch.equal(nearest_codes(x, signed=signed), expected)
