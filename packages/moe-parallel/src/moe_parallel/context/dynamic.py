"""Dynamic context parallelism: ranks are grouped anew for every microbatch, many for long sequences.

A microbatch takes as long as its slowest rank, and microbatches need not take equally long. So each is filled, longest
sequences first, up to a time that all its ranks can be busy for: a sequence that would take longer, or that does not
fit, goes to more ranks, and shorter ones join it where there is time and memory left. Every rank computes the plan
alone and gets the same as the others.

Measured on one core: 64 sequences on 8 ranks take 10 to 30 ms, 1,024 on 64 ranks 0.2 to 0.4 s, and 4,096 on 256 ranks
0.7 to 1.6 s. The time grows with the number of sequences, and with that of sizes that the longest of them may have.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from itertools import accumulate
from math import inf, sqrt

from moe_parallel.context.microbatches import Block, ContextPlan, SequenceWork, group_sizes
from moe_parallel.errors import MoeParallelError

# A microbatch is filled up to the time that its longest sequence takes on some number of ranks, times one of these.
_FACTORS = (1.0, 1.2, 1.5)
# Ranks get at most so many times the mean tokens, so that no microbatch stays empty where memory would do with fewer.
_SPREAD = 2.0
# A plan of fewer microbatches may be slower by this share, because each costs something that `work` does not say.
_FEWER = 0.01
# Times differ by this share for rounding alone.
_ROUNDING = 1e-9
# The least time of a microbatch is found by growth from one that is too short, and halvings.
_GROWTH, _GROWTHS, _HALVINGS = 1.3, 20, 6


def plan_context(
    lengths: Sequence[int],
    *,
    ranks: int,
    rank_slots: int,
    work: SequenceWork,
    slot_multiple: int = 1,
    microbatch_multiple: int = 1,
    least_microbatches: int = 1,
) -> ContextPlan:
    """The fastest plan found, or one of fewer microbatches that is next to as fast; none of `fixed_plan` is faster.

    Args:
        lengths: tokens of each sequence; one without a token is in a block all the same.
        ranks: how many take part, those of data and context parallelism together.
        rank_slots: token slots that a rank has memory for in a microbatch.
        work: what a sequence costs; without `shared` work the plan is that all ranks share every sequence.
        slot_multiple: slots of a row of n ranks are a multiple of 2 * n * slot_multiple (`padded_slots`).
        microbatch_multiple: the number of microbatches is a multiple of this, as interleaved pipelines need it.
        least_microbatches: how many microbatches there are at least; some may be without a sequence.

    Raises:
        MoeParallelError: a sequence does not fit on all ranks that may share it, or a number is not positive.
    """
    capacity = _capacity(lengths, ranks, rank_slots, slot_multiple, max(group_sizes(ranks)))
    _check(microbatch_multiple=microbatch_multiple, least_microbatches=least_microbatches)
    task = _Task.of(lengths, ranks, capacity, work)
    fewest = max(least_microbatches, -(-sum(lengths) // (ranks * capacity)), 1)
    plans = []
    for count in (fewest, fewest + 1, fewest + 2, fewest + fewest // 2 + 1):
        microbatches = _fill_all(task, _rounded(count, microbatch_multiple))
        used = max(len(microbatches), least_microbatches)
        plans.append(_plan(task, microbatches, _rounded(used, microbatch_multiple)))
    plan = _best(plans, lengths, work, within=_FEWER)
    fixed = [
        _fixed(lengths, ranks, size, capacity, microbatch_multiple, least_microbatches)
        for size in group_sizes(ranks)
        if max(lengths, default=0) <= capacity * size
    ]
    static = _best(fixed, lengths, work)
    if plan.time(lengths, work) <= static.time(lengths, work) * (1 + _ROUNDING):
        return plan
    return _best([*plans, static], lengths, work)


def fixed_plan(
    lengths: Sequence[int],
    *,
    ranks: int,
    size: int,
    rank_slots: int,
    slot_multiple: int = 1,
    microbatch_multiple: int = 1,
) -> ContextPlan:
    """Static context parallelism: all blocks have the same size, and sequences are packed in the order they come.

    A row has as many sequences as fit, and rows are dealt to the blocks in turn.

    Raises:
        MoeParallelError: the size is not one of `group_sizes`, or as in `plan_context`.
    """
    if size not in group_sizes(ranks):
        legal = ", ".join(map(str, group_sizes(ranks)))
        raise MoeParallelError(f"blocks of {size} ranks do not cut {ranks} ranks; legal sizes are {legal}")
    capacity = _capacity(lengths, ranks, rank_slots, slot_multiple, size)
    _check(microbatch_multiple=microbatch_multiple)
    return _fixed(lengths, ranks, size, capacity, microbatch_multiple, 1)


@dataclass(slots=True)
class _Part:
    """A block while it is filled."""

    size: int
    tokens: int = 0
    work: float = 0.0
    sequences: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What there is to plan.

    Attributes:
        capacity: tokens that a rank has room for.
        sizes: of blocks, ascending.
        work_N: of each sequence that one rank has alone.
        longest_first: numbers of the sequences that have tokens.
    """

    lengths: Sequence[int]
    ranks: int
    capacity: int
    work: SequenceWork
    sizes: tuple[int, ...]
    work_N: list[float]
    longest_first: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: int, capacity: int, work: SequenceWork) -> "_Task":
        return cls(
            lengths=lengths,
            ranks=ranks,
            capacity=capacity,
            work=work,
            sizes=group_sizes(ranks),
            work_N=[work.of(tokens) for tokens in lengths],
            longest_first=sorted((it for it, tokens in enumerate(lengths) if tokens), key=lambda it: -lengths[it]),
        )

    def times(self, sequence: int) -> list[float]:
        """Of a sequence alone in a block, for every size that it fits in."""
        tokens, work = self.lengths[sequence], self.work_N[sequence]
        return [self.work.on_rank(work, tokens, size) for size in self.sizes if tokens <= self.capacity * size]

    def add(self, sequence: int, part: _Part) -> None:
        part.sequences.append(sequence)
        part.tokens += self.lengths[sequence]
        part.work += self.work_N[sequence]

    def time(self, part: _Part, doublings: int = 0) -> float:
        return self.work.on_rank(part.work, part.tokens, part.size << doublings)

    def longest(self, part: _Part, time: float, spread: float = inf) -> float:
        """Tokens of the longest sequence that a block can still take for its ranks to end in time; below 0 if none."""
        others = part.size - 1
        left = part.size * time - part.work - self.work.shared * part.tokens * others
        if left <= 0:
            return -1.0
        # The positive root of quadratic x^2 + linear x = left, in the form that also holds where quadratic is 0.
        linear = self.work.linear + self.work.shared * others
        in_time = 2 * left / (linear + sqrt(linear * linear + 4 * self.work.quadratic * left))
        return min(in_time, part.size * min(self.capacity, spread) - part.tokens)


@dataclass(frozen=True, kw_only=True)
class _Filled:
    """A microbatch, the largest time of its ranks, and the sequences that found no place in it, longest first."""

    parts: list[_Part]
    time: float
    left: list[int]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def work(self) -> float:
        return sum(part.work for part in self.parts)


def _fill_all(task: _Task, count: int) -> list[_Filled]:
    """Microbatches for all sequences, if possible no more than `count`."""
    microbatches: list[_Filled] = []
    left = task.longest_first
    while left:
        others = max(count - len(microbatches) - 1, 0)
        filled = None if others else _fill_with(task, left)
        microbatches.append(filled or _fill_best(task, left, others))
        left = microbatches[-1].left
    return microbatches


def _fill_best(task: _Task, sequences: list[int], others: int) -> _Filled:
    """A microbatch of some of these sequences that keeps ranks busy; so many others can take the rest."""
    tokens, work = sum(task.lengths[it] for it in sequences), sum(task.work_N[it] for it in sequences)
    shares = task.ranks * (others + 1)
    alone = task.times(sequences[0])
    times = [max(work / shares, min(alone)), *(factor * time for time in alone for factor in _FACTORS)]
    room = task.ranks * task.capacity
    least = min(tokens - others * room, room)

    def merit(filled: _Filled) -> tuple[int, float, int]:
        # First the rest must fit in the others. Of those that keep ranks as busy, to a thousandth, the most tokens.
        return min(filled.tokens, least), round(filled.work / filled.time / task.ranks, 3), filled.tokens

    return max((_fill(task, sequences, time, _SPREAD * tokens / shares) for time in times), key=merit)


def _fill_with(task: _Task, sequences: list[int]) -> _Filled | None:
    """A microbatch with all these sequences, of about the least time; None if none was found."""
    short = max(sum(task.work_N[it] for it in sequences) / task.ranks, min(task.times(sequences[0])))
    enough = short
    for _ in range(_GROWTHS):
        best = _fill(task, sequences, enough)
        if not best.left:
            break
        short, enough = enough, enough * _GROWTH
    else:
        return None
    enough = best.time
    for _ in range(_HALVINGS):
        time = (short + enough) / 2
        filled = _fill(task, sequences, time)
        if filled.left:
            short = time
        else:
            best, enough = filled, filled.time
    return best


def _fill(task: _Task, sequences: list[int], time: float, spread: float = inf) -> _Filled:
    """As many of these sequences as ranks can work on in this time, longest first.

    Each gets a new block of the fewest ranks that take it, as long as so many are free. Then it joins a block that has
    room for it, of the smallest size, and of these the one that has most.

    Args:
        spread: tokens for each rank of a block beyond which no sequence joins others.
    """
    time *= 1 + _ROUNDING
    sizes = task.sizes
    # Of an empty block, by size; and the most of all smaller sizes.
    longest = [task.longest(_Part(size), time) for size in sizes]
    longest_of_smaller = [-1.0, *accumulate(longest, max)]
    # By size (-longest sequence that the block can take, its number): the first has most room.
    rooms: list[list[tuple[float, int]]] = [[] for _ in sizes]
    parts: list[_Part] = []
    left: list[int] = []
    free, least, position = task.ranks, len(sizes) - 1, 0
    while position < len(sequences):
        sequence = sequences[position]
        tokens = task.lengths[sequence]
        while longest_of_smaller[least] >= tokens:
            least -= 1
        if sizes[least] <= free and longest[least] >= tokens:
            # Sizes never grow from one block to the next, so that each begins at a multiple of its own.
            parts.append(_Part(sizes[least]))
            free -= sizes[least]
            task.add(sequence, parts[-1])
            heappush(rooms[least], (-task.longest(parts[-1], time, spread), len(parts) - 1))
            position += 1
            continue
        heap = next((heap for heap in rooms[least:] if heap and -heap[0][0] >= tokens), None)
        if heap is not None:
            number = heap[0][1]
            task.add(sequence, parts[number])
            heapreplace(heap, (-task.longest(parts[number], time, spread), number))
            position += 1
            continue
        # The next that finds a place is the first one no longer than what some block still takes.
        room = max([-heap[0][0] for heap in rooms if heap], default=-1.0)
        room = max([room, *(most for size, most in zip(sizes, longest, strict=True) if size <= free)])
        after = bisect_left(sequences, -room, position + 1, key=lambda it: -task.lengths[it])
        left += sequences[position:after]
        position = after
    _use_idle(task, parts, free)
    return _Filled(parts=parts, time=max(map(task.time, parts), default=0.0), left=left)


def _use_idle(task: _Task, parts: list[_Part], free: int) -> None:
    """Double blocks while ranks are free, those of most work first, but none that would take longest then."""
    while free:
        slowest = max(map(task.time, parts), default=0.0)
        doubled = [part for part in parts if part.size <= free and 2 * part.size <= task.sizes[-1]]
        doubled = [part for part in doubled if task.time(part, doublings=1) <= slowest]
        if not doubled:
            return
        part = max(doubled, key=task.time)
        free -= part.size
        part.size *= 2


def _plan(task: _Task, microbatches: list[_Filled], count: int) -> ContextPlan:
    """Blocks from the largest to the smallest; a rank that is left over is a block of its own without sequences."""
    parts_of = [sorted(filled.parts, key=lambda part: -part.size) for filled in microbatches]
    parts_of += [[] for _ in range(count - len(microbatches))]
    for parts in parts_of:
        parts += [_Part(1) for _ in range(task.ranks - sum(part.size for part in parts))]
    # Sequences without tokens cost nothing anywhere.
    parts_of[-1][-1].sequences += [it for it, tokens in enumerate(task.lengths) if not tokens]
    return _blocks(task.ranks, [[(part.size, part.sequences) for part in parts] for parts in parts_of])


def _fixed(
    lengths: Sequence[int], ranks: int, size: int, capacity: int, microbatch_multiple: int, least_microbatches: int
) -> ContextPlan:
    rows: list[list[int]] = [[]]
    slots = 0
    for sequence, tokens in enumerate(lengths):
        if slots + tokens > capacity * size:
            rows.append([])
            slots = 0
        rows[-1].append(sequence)
        slots += tokens
    groups = ranks // size
    count = _rounded(max(-(-len(rows) // groups), least_microbatches), microbatch_multiple)
    rows += [[] for _ in range(count * groups - len(rows))]
    microbatches = [rows[start : start + groups] for start in range(0, len(rows), groups)]
    return _blocks(ranks, [[(size, row) for row in microbatch] for microbatch in microbatches])


def _blocks(ranks: int, microbatches: list[list[tuple[int, list[int]]]]) -> ContextPlan:
    """The plan with blocks of these sizes one behind the other."""
    plan = []
    for parts in microbatches:
        firsts = accumulate((size for size, _ in parts), initial=0)
        plan.append(
            tuple(
                Block(first=first, size=size, sequences=tuple(sorted(sequences)))
                for first, (size, sequences) in zip(firsts, parts, strict=False)
            )
        )
    return ContextPlan(ranks=ranks, microbatches=tuple(plan))


def _best(
    plans: list[ContextPlan], lengths: Sequence[int], work: SequenceWork, *, within: float = _ROUNDING
) -> ContextPlan:
    """Of plans that are at most this share slower than the fastest the one of fewest microbatches, then the fastest."""
    times = [plan.time(lengths, work) for plan in plans]
    limit = min(times) * (1 + within)
    near = [(len(plan.microbatches), time, it) for it, (plan, time) in enumerate(zip(plans, times, strict=True))]
    return plans[min(entry for entry in near if entry[1] <= limit)[2]]


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _capacity(lengths: Sequence[int], ranks: int, rank_slots: int, slot_multiple: int, size: int) -> int:
    """Tokens for each of `size` ranks that share a row; all sequences fit."""
    _check(rank_slots=rank_slots, slot_multiple=slot_multiple)
    capacity = rank_slots // (2 * slot_multiple) * 2 * slot_multiple
    if not capacity:
        raise MoeParallelError(f"rank_slots is at least {2 * slot_multiple}, 2 * slot_multiple, not {rank_slots}")
    for sequence, tokens in enumerate(lengths):
        if tokens < 0:
            raise MoeParallelError(f"sequence {sequence} has {tokens} tokens; a length is not negative")
        if tokens > capacity * size:
            raise MoeParallelError(
                f"sequence {sequence} has {tokens} tokens, more than the {capacity * size} of {size} ranks that share "
                f"it, of {ranks}: each has {rank_slots} slots, of which it can use a multiple of 2 * {slot_multiple}. "
                "More slots for a rank, more ranks to share it, or shorter sequences help"
            )
    return capacity


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise MoeParallelError(f"{name} is at least 1, not {number}")
