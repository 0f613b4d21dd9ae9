"""What a dispatch must give, computed without one: loops and dense sums over the inputs of all ranks.

Shape legend: T tokens of one rank, K choices per token, D model, R rows at one rank, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.testing.cases import Case


@dataclass(frozen=True)
class Row:
    """Where a dispatched row comes from."""

    rank: int
    token: int
    choice: int


def expected_rows(case: Case, rank: int) -> list[list[Row]]:
    """The rows of each local expert of a rank, in the order of the contract: source rank, token, choice."""
    ids = [case.inputs(source).ids_TK.tolist() for source in range(case.world)]
    first = case.local(rank).start
    return [
        [
            Row(source, token, choice)
            for source in range(case.world)
            for token, choices in enumerate(ids[source])
            for choice, expert in enumerate(choices)
            if expert == first + local
        ]
        for local in range(case.local_experts)
    ]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Outputs and gradients over all ranks, in float64; lists are by rank."""

    y_TD: list[Tensor]
    grad_x_TD: list[Tensor]
    grad_probs_TK: list[Tensor]
    grad_experts_EDD: Tensor


def dense_reference(case: Case) -> Expected:
    """y = sum over choices of p * (x @ M[expert]), and its gradients for the output gradients of a float64 case."""
    experts_EDD = case.experts().requires_grad_()
    inputs = [case.inputs(rank) for rank in range(case.world)]
    leaves = [given.leaves() for given in inputs]
    outputs = []
    for given, (x_TD, probs_TK) in zip(inputs, leaves, strict=True):
        chosen_TK = given.ids_TK >= 0
        matrices_TKDD = experts_EDD[given.ids_TK.clamp(min=0)]
        rows_TKD = torch.einsum("td,tkdo->tko", x_TD, matrices_TKDD)
        outputs.append((rows_TKD * (probs_TK * chosen_TK).unsqueeze(-1)).sum(1))
    grad_outputs = [given.grad_TD for given in inputs]
    grads = torch.autograd.grad(outputs, [experts_EDD, *(leaf for pair in leaves for leaf in pair)], grad_outputs)
    return Expected(
        y_TD=[y_TD.detach() for y_TD in outputs],
        grad_x_TD=list(grads[1::2]),
        grad_probs_TK=list(grads[2::2]),
        grad_experts_EDD=grads[0],
    )


def apply_experts(rows_RD: Tensor, offsets: list[int], experts_EDD: Tensor) -> Tensor:
    """Each local expert's rows times its matrix; rows after the last offset become zero."""
    parts = []
    start = 0
    for end, matrix_DD in zip(offsets, experts_EDD, strict=True):
        parts.append(rows_RD[start:end] @ matrix_DD)
        start = end
    return torch.cat([*parts, torch.zeros_like(rows_RD[start:])])
