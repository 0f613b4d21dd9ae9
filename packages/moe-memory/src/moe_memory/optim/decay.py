"""Which parameters AdamW decays: matrices, and nothing else."""

from moe_parallel import ParameterKind, ShardSpec


def is_decayed(spec: ShardSpec) -> bool:
    """True for parameters of at least two dims per expert: weights of linear maps and embeddings.

    Norm weights, biases and scalars are not decayed; nor are stacked expert biases, although [E, out] looks like a
    matrix. The experts' leading dim counts experts and is left out.
    """
    dims = len(spec.shape) - (spec.kind is ParameterKind.EXPERT)
    return dims >= 2
