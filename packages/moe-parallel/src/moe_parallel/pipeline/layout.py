"""`PipelineLayout`: which layers each stage of a pipeline holds, written as one string.

    E embedding    t layer    m layer of multi-token prediction    L final norm, output projection and loss
    | boundary of stages    *n repeats the sign or the group in parentheses before it

`Et*3|(tt|)*29m|L` has 32 stages: the embedding and three layers, twenty-nine times two layers, multi-token prediction
alone, and the loss alone. Commas and blanks mean nothing. torch is not imported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.placement import Placement, PlacementKind
from moe_parallel.problem import Problem

KEY = "parallel.pipeline"

_SIGNS = "EtmL|"
# Shorter repetitions are easier to read written out.
_LEAST_REPEATED = 3
# Far above any model; a mistyped repetition shall not eat the memory.
_MOST_SIGNS = 65_536


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage holds.

    Attributes:
        layers: global numbers of its layers, from 0; may be empty.
        mtp_depths: its layers of multi-token prediction, from 0.
        has_embedding: the embedding is here.
        has_loss: the final norm, the output projection and the loss are here.
    """

    layers: range
    mtp_depths: range
    has_embedding: bool = False
    has_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The stages of a model in order.

    An illegal layout can be made, so that `problems()` can report everything that is wrong with it at once; `parse`
    refuses it.

    Attributes:
        pp: pipeline ranks.
        contents: of each stage, the signs of what it holds, without boundaries: `("Et", "tt", "tL")`.
        placement: how the stages go round the ranks (`Placement.kind`).
    """

    pp: int
    contents: tuple[str, ...]
    placement: PlacementKind = "loop"

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        pp: int,
        placement: PlacementKind = "loop",
        num_layers: int | None = None,
        mtp_layers: int | None = None,
    ) -> Self:
        """Read a layout string.

        Args:
            num_layers: layers of the model; None accepts any number.
            mtp_layers: its layers of multi-token prediction; None accepts any number.

        Raises:
            MoeParallelError: the message has everything that is wrong, one a line.
        """
        found = layout_problems(text, pp=pp, placement=placement, num_layers=num_layers, mtp_layers=mtp_layers)
        if found:
            raise MoeParallelError("\n".join(map(str, found)))
        return cls(pp=pp, contents=tuple(_written_out(text)[0].split("|")), placement=placement)

    def __str__(self) -> str:
        """The canonical string: what repeats three times or more is written as a repetition."""
        text = ""
        for stage, same in groupby(f"{_runs(content)}|" for content in self.contents[:-1]):
            text += _repeated(stage, len(list(same)))
        return text + "".join(map(_runs, self.contents[-1:]))

    @property
    def vpp(self) -> int:
        """Stages of each rank."""
        return len(self.contents) // self.pp

    @property
    def num_layers(self) -> int:
        return "".join(self.contents).count("t")

    @property
    def mtp_layers(self) -> int:
        return "".join(self.contents).count("m")

    @property
    def places(self) -> Placement:
        """Where the stages are."""
        return Placement(kind=self.placement, pp=self.pp, vpp=self.vpp)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each stage holds, in the order of the model."""
        stages, layer, depth = [], 0, 0
        for content in self.contents:
            layers = range(layer, layer + content.count("t"))
            depths = range(depth, depth + content.count("m"))
            stages.append(
                Stage(layers=layers, mtp_depths=depths, has_embedding="E" in content, has_loss="L" in content)
            )
            layer, depth = layers.stop, depths.stop
        return tuple(stages)

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """The chunks of a pipeline rank."""
        places = self.places
        return tuple(self.stages[places.stage_of(rank, chunk)] for chunk in range(self.vpp))

    def problems(self, *, num_layers: int | None = None, mtp_layers: int | None = None) -> list[Problem]:
        """Every violated rule, in a fixed order; empty for a legal layout."""
        if self.pp < 1:
            rule = "the number of pipeline ranks is at least 1"
            return [Problem(key="parallel.pp", value=self.pp, rule=rule)]
        return [
            Problem(key=KEY, value=str(self), rule=rule, legal=legal)
            for rule, legal in self._violations(num_layers, mtp_layers)
        ]

    def _violations(self, num_layers: int | None, mtp_layers: int | None) -> Iterator[tuple[str, str]]:
        """Rule and legal values, in words."""
        signs, stages = "".join(self.contents), len(self.contents)
        if stages % self.pp:
            low = stages // self.pp * self.pp
            legal = f"{low} or {low + self.pp} stages" if low else f"{self.pp} stages"
            yield f"{stages} stages cannot be dealt out evenly to pp = {self.pp} ranks", f"{legal}, or other multiples"
        for sign, what, where, found in (
            ("E", "embedding", "first", signs[:1]),
            ("L", "loss", "last", signs[-1:]),
        ):
            if signs.count(sign) != 1:
                yield f"the {what} is there {signs.count(sign)} times", f"one {sign}, which comes {where}"
            elif found != sign:
                yield f"the {what} does not come {where}", f"{sign} {where} of all signs"
        if "m" in signs:
            yield from self._mtp_violations()
        for sign, what, count in (
            ("t", "layers", num_layers),
            ("m", "layers of multi-token prediction", mtp_layers),
        ):
            if count is not None and signs.count(sign) != count:
                yield f"it has {signs.count(sign)} {what}, and the model has {count}", f"{count} signs {sign}"

    def _mtp_violations(self) -> Iterator[tuple[str, str]]:
        signs = "".join(self.contents)
        holders = [stage for stage, content in enumerate(self.contents) if "m" in content]
        if len(holders) > 1:
            yield f"multi-token prediction is spread over {len(holders)} stages", "every m in one stage"
        if "t" in signs[signs.index("m") :]:
            yield "a layer stands behind multi-token prediction, which needs the output of all layers", "m behind all t"
        if self.pp > 1 and len(self.contents) % self.pp == 0:
            places = self.places
            first = [stage for stage in holders if places.rank_of(stage) == 0]
            others = [stage for stage in range(places.num_stages) if places.rank_of(stage)]
            if first:
                rule = f"multi-token prediction in stage {first[0]} is on the first pipeline rank"
                yield rule, f"a stage of another rank, the last of them is {others[-1]}"


def layout_problems(
    text: str,
    *,
    pp: int,
    placement: PlacementKind = "loop",
    num_layers: int | None = None,
    mtp_layers: int | None = None,
) -> list[Problem]:
    """Everything that is wrong with a layout string: its writing, or else the rules that it violates."""
    signs, faults = _written_out(text)
    if faults:
        legal = "the signs E t m L, | between stages, *n, and groups in parentheses"
        return [Problem(key=KEY, value=text, rule=fault, legal=legal) for fault in faults]
    layout = PipelineLayout(pp=pp, contents=tuple(signs.split("|")), placement=placement)
    found = layout.problems(num_layers=num_layers, mtp_layers=mtp_layers)
    return [replace(problem, value=text) if problem.key == KEY else problem for problem in found]


def _written_out(text: str) -> tuple[str, list[str]]:
    """The signs with every repetition written out, and faults of the writing in words."""
    faults: list[str] = []
    opened: list[int] = []
    # What repeats as one, for each open group.
    items: list[list[str]] = [[]]
    for token in re.finditer(r"\*[0-9]*|[^*\s,]", text):
        sign, place = token[0], token.start() + 1
        if sign in _SIGNS:
            items[-1].append(sign)
        elif sign == "(":
            opened.append(place)
            items.append([])
        elif sign == ")" and opened:
            opened.pop()
            group = "".join(items.pop())
            items[-1].append(group)
        elif sign == ")":
            faults.append(f"the parenthesis at character {place} closes no group")
        elif sign[0] != "*":
            faults.append(f"{sign!r} at character {place} has no meaning")
        elif not items[-1]:
            faults.append(f"the * at character {place} has nothing before it to repeat")
        else:
            count = int(sign[1:7] or 0)
            if count == 0:
                faults.append(f"the * at character {place} needs a number of at least 1 behind it")
            elif len(items[-1][-1]) * count > _MOST_SIGNS:
                faults.append(f"the * at character {place} makes more than {_MOST_SIGNS} signs")
            else:
                items[-1][-1] *= count
    faults += [f"the parenthesis at character {place} is not closed" for place in opened]
    return "".join("".join(group) for group in items), faults


def _runs(content: str) -> str:
    return "".join(_repeated(sign, len(list(same))) for sign, same in groupby(content))


def _repeated(item: str, count: int) -> str:
    if count < _LEAST_REPEATED:
        return item * count
    return f"{item}*{count}" if len(item) == 1 else f"({item})*{count}"
