"""Box."""

import pytest

from moe_parallel import Box, MoeParallelError, ParameterKind, ShardSpec


def test_boxes():
    assert Box.whole((2, 3)) == Box((0, 0), (2, 3))
    assert Box.whole(()) == Box((), ())
    with pytest.raises(MoeParallelError, match="as many offsets as sizes"):
        Box((0,), (2, 3))


def test_a_spec_is_a_value():
    spec = ShardSpec(name="w", shape=(4, 2), kind=ParameterKind.EXPERT, placements=(("ep", 0),))
    assert spec == ShardSpec(name="w", shape=(4, 2), kind=ParameterKind.EXPERT, placements=(("ep", 0),))
    assert hash(spec) == hash(ShardSpec(name="w", shape=(4, 2), kind=ParameterKind.EXPERT, placements=(("ep", 0),)))
