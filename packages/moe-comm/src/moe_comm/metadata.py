"""What ranks tell each other before rows travel: one all-gather, from which each knows every size it needs.

Shape legend: T tokens here, K choices, B ranks of the block (`etp` fastest), E experts over all ranks, W
expert-parallel ranks, N nodes of them, L lanes (consecutive parts of the tokens), S sizes that all ranks share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.checks import words_for_id
from moe_comm.dispatcher import Sizing
from moe_comm.errors import MoeCommError
from moe_comm.hops import Reach
from moe_comm.traffic import TrafficEntry, note_traffic
from moe_parallel import all_gather


@dataclass(frozen=True, kw_only=True)
class Announced:
    """What every rank of the block said of its routing, all int64.

    Attributes:
        bad_id_B: an expert id out of range, or -1.
        tokens_B: T.
        counts_BE: choices of each expert.
        rows_BLW: rows to each expert-parallel rank, by lane.
        rows_BLN: rows to each node.
        sizes_BS: what has to be the same on all ranks, in the order of `common_sizes`.
    """

    bad_id_B: Tensor
    tokens_B: Tensor
    counts_BE: Tensor
    rows_BLW: Tensor
    rows_BLN: Tensor
    sizes_BS: Tensor

    def on_host(self) -> "Announced":
        """A copy on the CPU; one synchronisation of the host, where they are on a device."""
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        words = torch.cat([part.reshape(len(self.tokens_B), -1) for part in parts.values()], 1).cpu()
        of_part = torch.split(words, [part[0].numel() for part in parts.values()], 1)
        return Announced(**{name: x.reshape(parts[name].shape) for name, x in zip(parts, of_part, strict=True)})


def announce(
    block: ProcessGroup | None,
    bad_id: Tensor,
    counts_E: Tensor,
    rows_LW: Tensor,
    rows_LN: Tensor,
    num_tokens: int,
    sizes: Mapping[str, int],
) -> Announced:
    """Tell every rank of the block the sizes of this one's routing: one all-gather. The host is not synchronised."""
    own = [counts_E.new_full((1,), size) for size in (num_tokens, *sizes.values())]  # filled on the device
    mine = torch.cat((bad_id.view(1), own[0], counts_E, rows_LW.flatten(), rows_LN.flatten(), *own[1:])).unsqueeze(0)
    words_BM = mine
    if block is not None:
        row_bytes = mine.numel() * mine.itemsize
        note_traffic(TrafficEntry.between(block, "metadata", [row_bytes] * block.size()))
        words_BM = all_gather(mine, block).wait()
    parts = [1, 1, len(counts_E), rows_LW.numel(), rows_LN.numel(), len(sizes)]
    bad_id_B, tokens_B, counts_BE, to_ranks, to_nodes, sizes_BS = torch.split(words_BM, parts, 1)
    return Announced(
        bad_id_B=bad_id_B[:, 0],
        tokens_B=tokens_B[:, 0],
        counts_BE=counts_BE,
        rows_BLW=to_ranks.reshape(len(words_BM), *rows_LW.shape),
        rows_BLN=to_nodes.reshape(len(words_BM), *rows_LN.shape),
        sizes_BS=sizes_BS,
    )


def rows_by_member(members_TK: Tensor, reach: Reach, lane_size: int, lanes: int) -> Tensor:
    """Rows to each member by lane, int64 [L, M], where a row is made for each member that is not -1."""
    place_TK = members_TK
    if lanes > 1:
        lane_T = torch.arange(len(members_TK), device=members_TK.device) // lane_size
        place_TK = members_TK + lane_T.unsqueeze(1) * reach.members
    slots = lanes * reach.members
    place = place_TK.where(members_TK >= 0, slots).flatten()
    counts = torch.zeros(slots + 1, dtype=torch.int64, device=place.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))[:-1].view(lanes, reach.members)


def refuse_bad_ids(bad_ids: list[int], block: ProcessGroup | None, num_experts: int) -> None:
    """Raise if a rank of the block, in whose order the ids are, reported one that is out of range."""
    ranks = [""] if block is None else [f"rank {r}: " for r in dist.get_process_group_ranks(block)]
    found = [
        rank + words_for_id(bad_id, num_experts) for rank, bad_id in zip(ranks, bad_ids, strict=True) if bad_id != -1
    ]
    if found:
        raise MoeCommError("; ".join(found))


def common_sizes(sizing: Sizing, num_tokens: int, num_choices: int) -> dict[str, int]:
    """What has to be the same on all ranks, by name; -1 for what is exact."""
    is_fixed = sizing.capacity_rows is not None
    most_tokens = num_tokens if sizing.most_tokens is None else sizing.most_tokens
    return {
        "most_tokens": most_tokens if is_fixed else -1,
        "capacity_rows": -1 if sizing.capacity_rows is None else sizing.capacity_rows,
        "row_multiple": sizing.row_multiple,
        "choices per token": num_choices,
    }


def refuse_different_sizes(told: Announced, block: ProcessGroup | None, sizes: Mapping[str, int]) -> None:
    """Raise if the ranks of the block were not given the same sizes, or bring too many tokens; `told` is on the CPU."""
    ranks = [0] if block is None else dist.get_process_group_ranks(block)
    *columns, tokens = torch.cat((told.sizes_BS, told.tokens_B.unsqueeze(1)), 1).t().tolist()
    for name, values in zip(sizes, columns, strict=True):
        if len(set(values)) > 1:
            by_rank = ", ".join(f"{value} on rank {rank}" for value, rank in zip(values, ranks, strict=True))
            raise MoeCommError(
                f"all ranks need the same sizes, but {name} is {by_rank}; give every rank the same sizing, and with "
                "capacity_rows also most_tokens where they bring different numbers of tokens"
            )
    most = sizes["most_tokens"]
    if most < 0:
        return
    over = [f"{count} on rank {rank}" for count, rank in zip(tokens, ranks, strict=True) if count > most]
    if over:
        raise MoeCommError(f"sizing.most_tokens is {most}, but there are more tokens: {', '.join(over)}")
