"""Box and ShardSpec."""

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


@pytest.mark.parametrize(
    ("kind", "placements", "summed", "axes"),
    [
        (ParameterKind.DENSE, (), (), ("tp",)),
        (ParameterKind.DENSE, (), ("tp",), ("tp",)),
        (ParameterKind.DENSE, (("tp", 0),), (), ()),
        (ParameterKind.DENSE, (("tp", 0),), ("pp_embedding",), ("pp_embedding",)),
        (ParameterKind.DENSE, (), ("pp_head", "tp", "pp_embedding"), ("tp", "pp_embedding", "pp_head")),
        (ParameterKind.EXPERT, (), (), ("etp", "ep")),
        (ParameterKind.EXPERT, (("ep", 0),), (), ("etp",)),
        (ParameterKind.EXPERT, (("ep", 0), ("etp", 1)), (), ()),
    ],
)
def test_axes_whose_ranks_hold_the_same_part(kind, placements, summed, axes):
    spec = ShardSpec(name="w", shape=(4, 2), kind=kind, placements=placements, grad_sum_axes=summed)
    assert spec.copy_axes == axes
