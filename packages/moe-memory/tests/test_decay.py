"""R064: AdamW decays matrices and nothing else."""

import pytest

from moe_memory import is_decayed
from moe_parallel import ParameterKind, ShardSpec


@pytest.mark.parametrize(
    ("name", "shape", "kind", "expected"),
    [
        ("embedding [V, D]", (100, 8), "dense", True),
        ("linear weight [O, I]", (3, 8), "dense", True),
        ("router [E, D]", (4, 8), "dense", True),
        ("convolution [O, I, W]", (3, 8, 2), "dense", True),
        ("norm [D]", (8,), "dense", False),
        ("bias [O]", (8,), "dense", False),
        ("scale", (), "dense", False),
        ("stacked expert weight [E, D, F]", (4, 8, 3), "expert", True),
        ("stacked expert bias [E, F]", (4, 3), "expert", False),
        ("expert scale [E]", (4,), "expert", False),
        ("one expert [1, D, F]", (1, 8, 3), "expert", True),
    ],
)
def test_r064_decayed_parameters(name, shape, kind, expected):
    assert is_decayed(ShardSpec(name=name, shape=shape, kind=ParameterKind(kind))) is expected
