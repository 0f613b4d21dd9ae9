"""Routings that dispatchers stumble over, and random ones.

Every rank can make the inputs of every other rank, because they depend on (case, rank) alone; expectations therefore
need no communication.

Shape legend: T tokens of one rank, K choices per token, D model, E experts over all ranks.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Generator, Tensor

from moe_kernels import Routing, internal_dtype

# A number of expert-parallel ranks; or (etp, ep), a block of etp * ep ranks where each expert is split over etp.
World = int | tuple[int, int]


def block(world: World) -> tuple[int, int]:
    """etp and ep."""
    return world if isinstance(world, tuple) else (1, world)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch over all ranks.

    Attributes:
        name: for messages.
        tokens: T of each rank.
        etp: ranks that share an expert; a rank is `shard + etp * place`.
        local_experts: experts per rank, shared or not.
        top_k: K.
        hidden: D.
        pattern: how ids are drawn, a key of `PATTERNS`.
        seed: of everything random.
        dtype: of the tokens.
        whole_numbers: tokens and gradients are integers in [-2, 2], whose sums are exact in every dtype.
    """

    name: str
    tokens: tuple[int, ...]
    etp: int = 1
    local_experts: int = 3
    top_k: int = 2
    hidden: int = 8
    pattern: str = "uniform"
    seed: int = 0
    dtype: torch.dtype = torch.float64
    whole_numbers: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.world // self.etp * self.local_experts

    def local(self, rank: int) -> slice:
        """The experts of a rank among all."""
        place = rank // self.etp
        return slice(place * self.local_experts, (place + 1) * self.local_experts)

    def share(self, rank: int) -> float:
        """What a rank multiplies its outputs with, so that those of the ranks that share an expert sum to the whole.

        Shares differ, so that a part that is missing or counted twice shows. They are powers of two of both signs (4,
        -2, -1 for three ranks): the product is exact in every dtype, and so is the sum.
        """
        shard = rank % self.etp
        return (1.0 if shard == 0 else -1.0) * 2.0 ** (self.etp - 1 - shard)

    def inputs(self, rank: int) -> "Inputs":
        """What one rank brings."""
        made = _inputs(self, rank)  # copies, so that nobody's writing reaches the next who asks
        return replace(
            made,
            x_TD=made.x_TD.clone(),
            ids_TK=made.ids_TK.clone(),
            probs_TK=made.probs_TK.clone(),
            grad_TD=made.grad_TD.clone(),
        )

    def experts(self) -> Tensor:
        """One matrix per expert, [E, D, D] in float64, so scaled that outputs are of order one."""
        generator = Generator().manual_seed(self.seed * 64 + 63)
        rows = _normal(self.num_experts * self.hidden, self.hidden, generator) / math.sqrt(self.hidden)
        return rows.view(self.num_experts, self.hidden, self.hidden)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens, choices and output gradient of one rank."""

    x_TD: Tensor
    ids_TK: Tensor
    probs_TK: Tensor
    grad_TD: Tensor
    num_experts: int

    def routing(self) -> Routing:
        """The choices as a `Routing`."""
        return Routing(ids_TK=self.ids_TK, probs_TK=self.probs_TK, num_experts=self.num_experts)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Fresh tokens and probabilities that collect gradients."""
        return self.x_TD.detach().clone().requires_grad_(), self.probs_TK.detach().clone().requires_grad_()


def edge_cases(world: World, *, hidden: int, largest_top_k: int | None) -> list[Case]:
    """Routings and token counts at the edge; sizes differ from each other and from the number of ranks."""
    etp, ep = block(world)
    ranks = etp * ep
    ragged = tuple((65, 1, 63, 15)[rank % 4] for rank in range(ranks))
    nothing = (0,) * ranks
    plain = Case(name="uniform", tokens=ragged, etp=etp, hidden=hidden, seed=ranks)
    cases = [
        plain,
        replace(plain, name="one choice", top_k=1),
        replace(plain, name="eight choices", local_experts=8, top_k=8),
        replace(plain, name="every expert", top_k=plain.num_experts),
        replace(plain, name="one expert per rank", local_experts=1, top_k=min(2, ep)),
        replace(plain, name="all to one expert", pattern="one expert"),
        replace(plain, name="one rank's experts unused", pattern="last rank unused"),
        replace(plain, name="duplicates", pattern="duplicates", top_k=5),
        replace(plain, name="no choice at all", pattern="nothing"),
        replace(plain, name="every other choice is none", pattern="alternate", top_k=min(4, plain.num_experts)),
        replace(plain, name="a third of the choices is none", pattern="masked", top_k=3),
        replace(plain, name="a few tokens", tokens=tuple(1 + rank for rank in range(ranks))),
        replace(plain, name="no tokens anywhere", tokens=nothing),
        replace(plain, name="no tokens on the first rank", tokens=(0, *ragged[1:])),
        replace(plain, name="tokens on the last rank only", tokens=(*nothing[1:], 7)),
    ]
    return [case for case in cases if largest_top_k is None or case.top_k <= largest_top_k]


def even_case(name: str, world: World, hidden: int = 8) -> Case:
    """Four tokens on every rank."""
    etp, ep = block(world)
    return Case(name=name, tokens=(4,) * (etp * ep), etp=etp, hidden=hidden)


def few_cases(cases: list[Case]) -> list[Case]:
    """The cases that differ most, for rules that run each of them several times."""
    names = ("uniform", "every expert", "duplicates", "no choice at all", "no tokens anywhere")
    return [
        case for case in cases if case.name in (*names, "no tokens on the first rank", "tokens on the last rank only")
    ]


def random_cases(world: World, count: int, *, hidden: int, largest_top_k: int | None) -> Iterator[Case]:
    """Random token counts, sizes and patterns; the same ones in every run."""
    etp, ep = block(world)
    for seed in range(count):
        draw = random.Random(f"{world} {seed}")
        local_experts = draw.choice((1, 2, 3, 5))
        top_k = draw.randint(1, min(ep * local_experts, largest_top_k or 8, 8))
        yield Case(
            name=f"random {seed}",
            tokens=tuple(draw.choice((0, 1, 2, 7, 16, 33)) for _ in range(etp * ep)),
            etp=etp,
            local_experts=local_experts,
            top_k=top_k,
            hidden=hidden * draw.choice((1, 2)),
            pattern=draw.choice(sorted(PATTERNS)),
            seed=1000 + seed,
        )


@cache
def _inputs(case: Case, rank: int) -> Inputs:
    generator = Generator().manual_seed(case.seed * 64 + rank)
    num_tokens = case.tokens[rank]
    values = _whole_numbers if case.whole_numbers else _normal
    probs_TK = 0.1 + torch.rand(num_tokens, case.top_k, dtype=torch.float64, generator=generator)
    return Inputs(
        x_TD=values(num_tokens, case.hidden, generator).to(case.dtype),
        ids_TK=PATTERNS[case.pattern](case, num_tokens, generator),
        probs_TK=probs_TK.to(internal_dtype(case.dtype)),
        grad_TD=values(num_tokens, case.hidden, generator).to(case.dtype),
        num_experts=case.num_experts,
    )


def _normal(rows: int, columns: int, generator: Generator) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def _whole_numbers(rows: int, columns: int, generator: Generator) -> Tensor:
    return torch.randint(-2, 3, (rows, columns), generator=generator)


def _distinct(num_tokens: int, top_k: int, num_experts: int, generator: Generator) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]


def _uniform(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    return _distinct(num_tokens, case.top_k, case.num_experts, generator)


def _masked(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    ids_TK = _uniform(case, num_tokens, generator)
    return ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < 1 / 3, -1)


def _duplicates(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    return torch.randint(0, case.num_experts, (num_tokens, case.top_k), generator=generator)


def _one_expert(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    return torch.full((num_tokens, case.top_k), case.num_experts // 2)


def _last_rank_unused(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    used = max(1, case.num_experts - case.local_experts)
    return torch.randint(0, used, (num_tokens, case.top_k), generator=generator)


def _nothing(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    return torch.full((num_tokens, case.top_k), -1)


def _alternate(case: Case, num_tokens: int, generator: Generator) -> Tensor:
    ids_TK = _uniform(case, num_tokens, generator)
    odd = (torch.arange(num_tokens).unsqueeze(1) + torch.arange(case.top_k)) % 2 == 1
    return ids_TK.masked_fill(odd, -1)


PATTERNS: dict[str, Callable[[Case, int, Generator], Tensor]] = {
    "uniform": _uniform,
    "masked": _masked,
    "duplicates": _duplicates,
    "one expert": _one_expert,
    "last rank unused": _last_rank_unused,
    "nothing": _nothing,
    "alternate": _alternate,
}
