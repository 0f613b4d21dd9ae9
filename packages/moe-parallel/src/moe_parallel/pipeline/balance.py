"""How evenly a pipeline is loaded, and the layout that a model gets where none is given."""

from collections.abc import Mapping

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.layout import PipelineLayout
from moe_parallel.pipeline.placement import Placement, PlacementKind
from moe_parallel.problem import Problem

# Work in layers: looking up embeddings is next to none, an output projection is about one layer, and a layer of
# multi-token prediction has an output projection of its own.
_WORK = {"E": 0, "t": 1, "m": 2, "L": 1}


def even_layout(
    num_layers: int, mtp_layers: int = 0, *, pp: int, vpp: int = 1, placement: PlacementKind = "loop"
) -> PipelineLayout:
    """The legal layout whose busiest stage has the least work.

    A layer counts 1, the loss 1, a layer of multi-token prediction 2 and the embedding nothing. No stage is without
    any of the three. Multi-token prediction goes into the last stage or into the one before it. A layer that could go
    to several stages goes to the rank with the least work, and there to a late stage, because early ones hold more
    activations.

    Raises:
        MoeParallelError: the model has too few layers for so many stages; the message has the legal values.
    """
    found = even_problems(num_layers, mtp_layers, pp=pp, vpp=vpp)
    if found:
        raise MoeParallelError("\n".join(map(str, found)))
    places = Placement(kind=placement, pp=pp, vpp=vpp)
    last = places.num_stages - 1
    # The stage with multi-token prediction is the last with layers.
    holders = [last]
    if mtp_layers:
        holders = [stage for stage in (last, last - 1) if stage >= 0 and (pp == 1 or places.rank_of(stage))]
    spread = [_spread(num_layers, mtp_layers, places, holder) for holder in holders]
    best = min(spread, key=lambda contents: sorted((_cost(content, _WORK) for content in contents), reverse=True))
    return PipelineLayout(pp=pp, contents=tuple(best), placement=placement)


def stage_costs(layout: PipelineLayout, costs: Mapping[str, float]) -> tuple[float, ...]:
    """Cost of each stage.

    Args:
        costs: of one item, by its sign `E`, `t`, `m` or `L`, in any unit (parameters, operations, bytes); a sign that
            is left out costs nothing.

    Raises:
        MoeParallelError: a sign is unknown or a cost is negative.
    """
    for sign, cost in costs.items():
        if sign not in _WORK:
            raise MoeParallelError(f"the cost of {sign!r} is of no use; a layout has the signs {', '.join(_WORK)}")
        if not 0 <= cost < float("inf"):
            raise MoeParallelError(f"the cost of {sign} is {cost}, and costs are finite and not negative")
    return tuple(_cost(content, costs) for content in layout.contents)


def describe_balance(layout: PipelineLayout, costs: Mapping[str, float]) -> str:
    """A table of ranks: what their stages hold and what that costs (`stage_costs`), and how far the busiest is off."""
    of_stage, places = stage_costs(layout, costs), layout.places
    rows, totals = [], []
    for rank in range(layout.pp):
        stages = [places.stage_of(rank, chunk) for chunk in range(layout.vpp)]
        totals.append(sum(of_stage[stage] for stage in stages))
        rows.append((str(rank), " / ".join(layout.contents[stage] or "-" for stage in stages)))
    width = max(len("stages"), *(len(held) for _, held in rows))
    lines = [f"rank  {'stages':{width}}        cost"]
    lines += [f"{rank:>4}  {held:{width}}  {total:10.4g}" for (rank, held), total in zip(rows, totals, strict=True)]
    for what, values in (("rank", totals), ("stage", of_stage)):
        mean = sum(values) / len(values)
        ratio = max(values) / mean if mean else 1.0
        lines.append(f"busiest {what} {max(values):.4g}, mean {mean:.4g}: {ratio:.3f}")
    return "\n".join(lines)


def _cost(content: str, costs: Mapping[str, float]) -> float:
    return sum(costs.get(sign, 0) for sign in content)


def _spread(num_layers: int, mtp_layers: int, places: Placement, holder: int) -> list[str]:
    """Contents of the stages when none behind `holder`, which has multi-token prediction, has a layer."""
    stages = range(places.num_stages)
    ends = ["m" * mtp_layers * (stage == holder) + "L" * (stage == stages[-1]) for stage in stages]
    layers = [int(not end and stage <= holder) for stage, end in enumerate(ends)]
    on_stage = [_cost(ends[stage], _WORK) + layers[stage] for stage in stages]
    on_rank = [0.0] * places.pp
    for stage in stages:
        on_rank[places.rank_of(stage)] += on_stage[stage]
    for _ in range(num_layers - sum(layers)):
        least = min(range(holder + 1), key=lambda stage: (on_stage[stage], on_rank[places.rank_of(stage)], -stage))
        layers[least] += 1
        on_stage[least] += 1
        on_rank[places.rank_of(least)] += 1
    return ["E" * (stage == 0) + "t" * layers[stage] + ends[stage] for stage in stages]


def even_problems(num_layers: int, mtp_layers: int, *, pp: int, vpp: int) -> list[Problem]:
    """Why a model cannot have an even layout; empty if it can."""
    found = [
        Problem(key=key, value=value, rule=f"{what} is an integer of at least {least}")
        for key, value, what, least in (
            ("model.num_layers", num_layers, "the number of layers", 1),
            ("model.mtp_layers", mtp_layers, "the number of layers of multi-token prediction", 0),
            ("parallel.pp", pp, "the number of pipeline ranks", 1),
            ("parallel.vpp", vpp, "the number of stages of a rank", 1),
        )
        if value < least
    ]
    if not found and num_layers < pp * vpp - 1:
        most = num_layers + 1
        key, value, legal = ("parallel.vpp", vpp, most // pp) if vpp > 1 and pp <= most else ("parallel.pp", pp, most)
        rule = f"pp * vpp = {pp} * {vpp} = {pp * vpp} stages, of which all but the last need one of {num_layers} layers"
        found.append(Problem(key=key, value=value, rule=rule, legal=f"1 to {legal}"))
    return found
