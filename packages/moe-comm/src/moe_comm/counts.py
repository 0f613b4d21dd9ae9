"""What an actual routing makes the dispatchers send: rows by sender and receiver, and their bytes, exactly.

The ledger must equal these. Nothing is communicated: the ids of all ranks are given.

Shape legend: T tokens of one rank, K choices per token, D features, W expert-parallel ranks, L of them on a node, N
nodes, P equal parts of the experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError
from moe_comm.traffic import BACKWARD_OF, Leg
from moe_comm.volume import Algorithm
from moe_kernels import internal_dtype

# Legs on which rows travel to their experts, and on which they return; in backward gradients go the other way.
_THERE: tuple[Leg, ...] = ("dispatch", "dispatch_rail", "dispatch_node", "gather")
_BACK: tuple[Leg, ...] = ("combine", "combine_rail", "combine_node", "scatter")
_TOWARDS_EXPERTS = frozenset(_THERE) | {BACKWARD_OF[leg] for leg in _BACK}
_WITH_PROBABILITIES = frozenset(_THERE) | {BACKWARD_OF[leg] for leg in _THERE}

METADATA_WORD_BYTES = 8
_ID_BYTES = 4


def rows_by_rank(ids_TK: Tensor, num_experts: int, world: int) -> tuple[int, ...]:
    """Rows that an all-to-all with one row per (token, expert) sends to each of W ranks, for one rank's routing."""
    chosen = ids_TK[ids_TK >= 0] // (num_experts // world)
    return tuple(torch.bincount(chosen, minlength=world).tolist())


def tokens_by_part(ids_TK: Tensor, num_experts: int, parts: int) -> Tensor:
    """Tokens with at least one choice in each of P equal parts of the experts, int64 [P]: a row for each, sent once."""
    part_TK = torch.div(ids_TK, num_experts // parts, rounding_mode="floor").masked_fill(ids_TK < 0, parts)
    hit_TP = torch.zeros(len(ids_TK), parts + 1, dtype=torch.bool, device=ids_TK.device)
    return hit_TP.scatter_(1, part_TK.to(torch.int64), value=True)[:, :parts].sum(0)


def rows_by_leg(
    algorithm: Algorithm, ids_by_rank: Sequence[Tensor], *, num_experts: int, ranks_per_node: int
) -> dict[Leg, Tensor]:
    """Rows that each rank sends to each on the legs there, int64 [W, W], sender first; what it keeps included.

    The rows of the legs back are the transpose, those of `combine_backward` the same and of `dispatch_backward` the
    transpose again.

    Args:
        ids_by_rank: [T, K] of each of W ranks, -1 for none; T may differ.
        num_experts: E.
        ranks_per_node: L; rank r is on node r // L.

    Raises:
        MoeCommError: nodes do not divide the ranks, or ranks the experts.
    """
    world = len(ids_by_rank)
    if ranks_per_node < 1 or world % ranks_per_node:
        raise MoeCommError(f"ranks_per_node = {ranks_per_node} does not divide the group of {world} ranks")
    if num_experts % world:
        raise MoeCommError(f"{num_experts} experts cannot be spread evenly over {world} ranks")
    nodes = world // ranks_per_node

    def everything(receivers: int) -> Tensor:
        return torch.tensor([len(ids_TK) for ids_TK in ids_by_rank])[:, None].expand(world, receivers)

    def hits(parts: int) -> Tensor:
        return torch.stack([tokens_by_part(ids_TK, num_experts, parts) for ids_TK in ids_by_rank])

    if algorithm == "local":
        return {}
    if algorithm == "allgather":
        return {"dispatch": everything(world)}
    if algorithm == "alltoall_per_expert":
        return {"dispatch": torch.tensor([rows_by_rank(ids_TK, num_experts, world) for ids_TK in ids_by_rank])}
    if algorithm == "alltoall_per_rank":
        return {"dispatch": hits(world)}
    to_nodes_WN = hits(nodes) if algorithm == "hybrid" else everything(nodes)
    return {
        "dispatch_rail": _along_rails(to_nodes_WN, ranks_per_node),
        "dispatch_node": _inside_nodes(hits(world), nodes),
    }


def _along_rails(to_nodes_WN: Tensor, ranks_per_node: int) -> Tensor:
    """[W, W]: what a rank sends to a node goes to the rank there that has its own place."""
    world, nodes = to_nodes_WN.shape
    rows_WNL = to_nodes_WN.new_zeros(world, nodes, ranks_per_node)
    rows_WNL[torch.arange(world), :, torch.arange(world) % ranks_per_node] = to_nodes_WN
    return rows_WNL.view(world, world)


def _inside_nodes(to_ranks_WW: Tensor, nodes: int) -> Tensor:
    """[W, W]: what is for rank j of a node and comes along rail l, from all nodes, goes from l to j there."""
    world = len(to_ranks_WW)
    by_rail_LNL = to_ranks_WW.view(nodes, world // nodes, nodes, world // nodes).sum(0)
    rows_NLNL = to_ranks_WW.new_zeros(nodes, world // nodes, nodes, world // nodes)
    rows_NLNL[torch.arange(nodes), :, torch.arange(nodes)] = by_rail_LNL.transpose(0, 1)
    return rows_NLNL.view(world, world)


def shared_rows(rows_by_sender: Sequence[Sequence[int]], place: int, etp: int) -> list[list[int]]:
    """Rows that each of the `etp` ranks at one place of the expert-parallel axis sends to each on the leg `gather`.

    Args:
        rows_by_sender: rows of every rank's routing to each place, all `etp * W` of them in rank order (etp fastest).
            The rows of a leg of `dispatch` are every etp-th of them, `rows_by_sender[shard::etp]`.
        place: of the expert-parallel axis.
        etp: ranks that share an expert.
    """
    return [[sum(rows[place] for rows in rows_by_sender[shard::etp])] * etp for shard in range(etp)]


def bytes_per_row(leg: Leg, hidden: int, dtype: torch.dtype, *, choices: int = 1, with_ids: bool = False) -> int:
    """Bytes of one row on a leg.

    Args:
        leg: any but the metadata. Features are on all; probabilities ride on those of dispatch, and their gradients on
            those of its backward.
        hidden: D.
        dtype: of the features; probabilities are in the internal dtype.
        choices: probabilities that ride with a row: 1 where a row is one choice, K where it is a token.
        with_ids: the ids of the choices ride with it to the experts; they do the first time that a plan is used.

    Raises:
        MoeCommError: metadata is not sent in rows.
    """
    if leg == "metadata":
        raise MoeCommError("metadata is not sent in rows; `metadata_bytes` tells its size")
    row_bytes = hidden * dtype.itemsize
    if leg in _WITH_PROBABILITIES:
        row_bytes += choices * internal_dtype(dtype).itemsize
    if leg in _THERE and with_ids:
        row_bytes += choices * _ID_BYTES
    return row_bytes


def leg_bytes(
    leg: Leg,
    rank: int,
    rows_by_sender: Sequence[Sequence[int]] | Tensor,
    *,
    hidden: int,
    dtype: torch.dtype,
    choices: int = 1,
    with_ids: bool = False,
) -> tuple[int, ...]:
    """Bytes that a rank sends to each rank of a group on one leg.

    Args:
        leg: any but the metadata.
        rank: place of the sender in the group.
        rows_by_sender: rows that each sends to each on the way to the experts: a matrix of `rows_by_leg`,
            `rows_by_rank` of every rank's routing, or, between the ranks that share experts, `shared_rows`.
        hidden, dtype, choices, with_ids: as for `bytes_per_row`.
    """
    rows = torch.as_tensor(rows_by_sender)
    sent = rows[rank] if leg in _TOWARDS_EXPERTS else rows[:, rank]
    row_bytes = bytes_per_row(leg, hidden, dtype, choices=choices, with_ids=with_ids)
    return tuple(count * row_bytes for count in sent.tolist())


def metadata_bytes(words: int) -> int:
    """Bytes that a plan sends to each rank: words of 64 bits, as many as its dispatcher says."""
    return words * METADATA_WORD_BYTES
