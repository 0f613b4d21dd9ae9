"""The table of `ShardSpec`s: what every parameter of a model is globally."""

from fnmatch import fnmatchcase

from torch import nn

from moe_parallel import ParameterKind, ShardSpec
from moe_train.errors import MoeTrainError


def parameter_specs(model: nn.Module, expert_pattern: str) -> dict[str, ShardSpec]:
    """Specs by global name, in the order of the model; names that match the pattern are expert parameters.

    Raises:
        MoeTrainError: the pattern matches nothing; a pattern without effect is a mistake.
    """
    specs = {}
    for name, parameter in model.named_parameters():
        kind = ParameterKind.EXPERT if fnmatchcase(name, expert_pattern) else ParameterKind.DENSE
        specs[name] = ShardSpec(name=name, shape=tuple(parameter.shape), kind=kind)
    if not any(spec.kind is ParameterKind.EXPERT for spec in specs.values()):
        raise MoeTrainError(f"the pattern {expert_pattern!r} of expert parameters matches none of {', '.join(specs)}")
    return specs
