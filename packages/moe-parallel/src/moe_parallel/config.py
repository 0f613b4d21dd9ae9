"""The `parallel` section of the configuration. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from moe_parallel.problem import Problem

ScheduleName = Literal[
    "auto", "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "interleaved_zero_bubble", "zero_bubble_v"
]
CpKind = Literal["ring", "all_to_all", "gather", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism; `dp` and `edp` follow from the number of ranks (`ParallelLayout`).

    Attributes:
        tp: ranks that share one dense layer's features.
        cp: ranks that share one sequence.
        pp: ranks of a pipeline; the only degree that the dense and the expert view have in common.
        vpp: consecutive pieces of the model on each of them (virtual stages).
        pipeline: which layers each stage holds, as `Et*3|(tt|)*29m|L` (`PipelineLayout`); none shares them out evenly.
        schedule: in which order a rank of the pipeline works (`SCHEDULES`); `auto` is `one_f_one_b`, and with vpp > 1
            `interleaved`.
        ep: ranks over which the experts of a layer are spread.
        etp: ranks that share one expert's features; independent of `tp`.
        sequence_parallel: ranks of `tp` share the tokens between attention and feed-forward parts (arXiv 2205.05198),
            which saves memory there; otherwise each of them holds all.
        cp_kind: how the ranks of `cp` attend to each other's tokens: keys and values go round them (`ring`), all
            exchange tokens for heads (`all_to_all`), every rank gets all keys and values (`gather`), or `cp_inner`
            neighbours exchange tokens for heads and a ring goes round such neighbourhoods (`hierarchical`).
        cp_inner: ranks of such a neighbourhood.
        dynamic_cp_tokens: token slots that a rank has at most in a microbatch of training. With a number the ranks of
            `cp` and `dp` are grouped anew for every microbatch, many for long sequences and few for short ones, which
            share rows (dynamic context parallelism); none gives each sequence a row and its ranks of `cp`.
        ranks_per_node: consecutive ranks on one machine, which dispatchers of two levels go by and metrics tell links
            by; none asks the machines for their names.
        timeout_s: after so many seconds without its peers a rank gives up.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    pipeline: str | None = None
    schedule: ScheduleName = "auto"
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    cp_kind: CpKind = "ring"
    cp_inner: int = 1
    dynamic_cp_tokens: int | None = None
    ranks_per_node: int | None = None
    timeout_s: float = 600.0

    def problems(self) -> list[Problem]:
        """Rules that need no number of ranks; `ParallelLayout` knows the others."""
        found = []
        if not 0 < self.timeout_s < float("inf"):
            rule = "a number of seconds is finite and above 0"
            found.append(Problem(key="parallel.timeout_s", value=self.timeout_s, rule=rule))
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            rule = "a machine has at least one rank"
            found.append(Problem(key="parallel.ranks_per_node", value=self.ranks_per_node, rule=rule))
        if self.dynamic_cp_tokens is not None and self.dynamic_cp_tokens < 1:
            rule = "a rank has room for at least one token"
            found.append(Problem(key="parallel.dynamic_cp_tokens", value=self.dynamic_cp_tokens, rule=rule))
        if self.dynamic_cp_tokens is not None and self.cp_kind == "hierarchical":
            rule = "its neighbourhoods are of one size, and parallel.dynamic_cp_tokens changes the number of ranks"
            legal = ", ".join(kind for kind in get_args(CpKind) if kind != "hierarchical")
            found.append(Problem(key="parallel.cp_kind", value=self.cp_kind, rule=rule, legal=legal))
        if self.cp_inner != 1 and self.cp_kind != "hierarchical":
            rule = f"has no effect with parallel.cp_kind = {self.cp_kind}"
            found.append(Problem(key="parallel.cp_inner", value=self.cp_inner, rule=rule, legal="1"))
        return found
