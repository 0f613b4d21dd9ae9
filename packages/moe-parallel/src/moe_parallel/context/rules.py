"""Which kinds of context parallelism there are, and which degrees and heads go with them. Imports nothing heavy.

Heads are those of one rank of tensor parallelism. A core that exchanges heads gives each of its ranks equally many
query heads, and the key/value heads that they read: equally many of these too, or, where there are fewer than ranks,
each to equally many ranks.
"""

from moe_parallel.errors import MoeParallelError
from moe_parallel.problem import Problem

KINDS = ("ring", "all_to_all", "gather", "hierarchical")


def context_problems(kind: str, *, cp: int, heads: int, kv_heads: int, inner: int = 1) -> list[Problem]:
    """Violated rules of a kind of context parallelism.

    Args:
        cp: ranks that share a row.
        heads: query heads of a layer on one rank of tensor parallelism; kv_heads likewise.
        inner: of `hierarchical`, consecutive ranks of the cp group that exchange heads; other kinds do not read it.
    """
    if kind not in KINDS:
        return [Problem(key="parallel.cp_kind", value=kind, rule="there is no such kind", legal=", ".join(KINDS))]
    if cp < 1:
        return [Problem(key="parallel.cp", value=cp, rule="a degree is at least 1")]
    if cp == 1:
        rule = "there is no rank to share a row with where parallel.cp = 1"
        return [] if inner == 1 else [Problem(key="parallel.cp_inner", value=inner, rule=rule, legal="1")]
    if kind == "all_to_all" and not _shares(heads, kv_heads, cp):
        legal = [ranks for ranks in range(1, heads + 1) if _shares(heads, kv_heads, ranks)]
        return [Problem(key="parallel.cp", value=cp, rule=_rule(heads, kv_heads), legal=_words(legal))]
    if kind == "hierarchical":
        splits = [ranks for ranks in range(2, cp) if cp % ranks == 0]
        legal = [ranks for ranks in splits if _shares(heads, kv_heads, ranks)]
        if inner not in splits:
            rule = f"it divides the {cp} ranks of cp into several groups of several ranks"
        elif inner not in legal:
            rule = _rule(heads, kv_heads)
        else:
            return []
        other = "" if legal else "No value fits; take parallel.cp_kind = ring"
        return [Problem(key="parallel.cp_inner", value=inner, rule=rule, legal=_words(legal), next_step=other)]
    return []


def check_heads(kind: str, heads: int, kv_heads: int, *, ranks: int) -> None:
    """Raise a `MoeParallelError` if the heads cannot be shared out to the ranks that exchange them."""
    if not _shares(heads, kv_heads, ranks):
        legal = [other for other in range(1, heads + 1) if _shares(heads, kv_heads, other)]
        raise MoeParallelError(
            f"attention by {kind} over {ranks} ranks: {_rule(heads, kv_heads)}; legal here: {_words(legal)} ranks, "
            "or parallel.cp_kind = ring or gather, which need no heads to share"
        )


def _shares(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _rule(heads: int, kv_heads: int) -> str:
    return (
        f"the ranks that exchange heads divide the {heads} query heads, and divide or are a multiple of the {kv_heads} "
        "key/value heads"
    )


def _words(values: list[int]) -> str:
    return ", ".join(map(str, values))
