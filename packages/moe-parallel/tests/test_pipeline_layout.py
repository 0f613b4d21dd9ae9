"""Layout strings say what every stage holds; those of published recipes say what was published."""

import re

import pytest
from hypothesis import given, settings, strategies as st

from moe_parallel import MoeParallelError
from moe_parallel.pipeline.balance import describe_balance, even_layout, stage_costs
from moe_parallel.pipeline.layout import PipelineLayout, Stage, layout_problems
from moe_parallel.pipeline.placement import Placement


def held(layout, rank):
    """Signs of the chunks of a rank."""
    return [layout.contents[layout.places.stage_of(rank, chunk)] for chunk in range(layout.vpp)]


def rules(text, **numbers):
    return [problem.rule for problem in layout_problems(text, **numbers)]


def test_published_layout_of_deepseek_v3_for_16_ranks():
    text = "Et*3|(tt|)*29m|L"
    layout = PipelineLayout.parse(text, pp=16, num_layers=61, mtp_layers=1)
    assert str(layout) == text
    assert layout.vpp == 2
    assert held(layout, 0) == ["Ettt", "tt"]
    for rank in range(1, 14):
        assert held(layout, rank) == ["tt", "tt"]
    assert held(layout, 14) == ["tt", "m"]
    assert held(layout, 15) == ["tt", "L"]
    nothing = range(0)
    assert layout.on_rank(0) == (
        Stage(layers=range(3), mtp_depths=nothing, has_embedding=True),
        Stage(layers=range(33, 35), mtp_depths=nothing),
    )
    assert layout.on_rank(14)[1] == Stage(layers=nothing, mtp_depths=range(1))
    assert layout.on_rank(15)[1] == Stage(layers=nothing, mtp_depths=nothing, has_loss=True)


def test_published_layout_of_deepseek_v3_for_4_ranks():
    layout = PipelineLayout.parse("Et*4|(tttt|)*14tmL", pp=4, num_layers=61, mtp_layers=1)
    assert layout.vpp == 4
    assert held(layout, 0) == ["Etttt", "tttt", "tttt", "tttt"]
    assert held(layout, 3) == ["tttt", "tttt", "tttt", "tmL"]
    assert layout.on_rank(3)[3] == Stage(layers=range(60, 61), mtp_depths=range(1), has_loss=True)
    assert str(layout) == "Et*4|(t*4|)*14tmL"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("EtL", "EtL"),
        ("E t, t | t L", "Ett|tL"),
        ("Et|||tL", "Et|||tL"),
        ("E||L", "E||L"),
        ("Et|(|)*3L", "Et||*3L"),
        ("E((t*2|)*2t|)*2L", "Ett|tt|t|tt|tt|t|L"),
        ("Et*2*2L", "Et*4L"),
        ("E()L", "EL"),
        ("E(tt)*3L", "Et*6L"),
        ("E|(t|)*2L", "E|t|t|L"),
        ("E|(t|)*3L", "E|(t|)*3L"),
        ("Etm*2L", "EtmmL"),
    ],
)
def test_writings_of_the_same_layout(text, same):
    layout = PipelineLayout.parse(text, pp=1)
    assert str(layout) == same
    assert PipelineLayout.parse(same, pp=1) == layout


@st.composite
def layouts(draw):
    """Legal layouts of any shape."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    placement = draw(st.sampled_from(["loop", "v"]))
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 2, 2, 3, 11]), min_size=pp * vpp, max_size=pp * vpp))
    places = Placement(kind=placement, pp=pp, vpp=vpp)
    last = max((stage for stage, count in enumerate(counts) if count), default=0)
    homes = [stage for stage in range(last, pp * vpp) if pp == 1 or places.rank_of(stage)]
    home, depths = draw(st.sampled_from(homes or [0])), draw(st.integers(0, 3)) if homes else 0
    contents = ["t" * count + "m" * depths * (stage == home) for stage, count in enumerate(counts)]
    contents[0] = "E" + contents[0]
    contents[-1] += "L"
    return PipelineLayout(pp=pp, contents=tuple(contents), placement=placement)


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_the_printed_string_is_read_as_the_same_layout(layout):
    assert layout.problems(num_layers=layout.num_layers, mtp_layers=layout.mtp_layers) == []
    again = PipelineLayout.parse(str(layout), pp=layout.pp, placement=layout.placement)
    assert again == layout
    assert str(again) == str(layout)
    assert len(str(layout)) <= len("|".join(layout.contents)) + 2 * len(layout.contents)


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_r084_stages_of_all_ranks_have_each_layer_once_and_in_order(layout):
    stages = [None] * len(layout.contents)
    for rank in range(layout.pp):
        for chunk, stage in enumerate(layout.on_rank(rank)):
            stages[layout.places.stage_of(rank, chunk)] = stage
    assert [layer for stage in stages for layer in stage.layers] == list(range(layout.num_layers))
    assert [depth for stage in stages for depth in stage.mtp_depths] == list(range(layout.mtp_layers))
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.has_loss for stage in stages] == [False] * (len(stages) - 1) + [True]


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="EtmL|()*2, ", max_size=25), st.integers(1, 3))
def test_any_string_is_a_layout_or_has_problems_that_name_it(text, pp):
    found = layout_problems(text, pp=pp)
    for problem in found:
        assert (problem.key, problem.value) == ("parallel.pipeline", text)
        assert problem.rule
        assert problem.legal
    if found:
        with pytest.raises(MoeParallelError, match=re.escape(found[0].rule)):
            PipelineLayout.parse(text, pp=pp)
    else:
        layout = PipelineLayout.parse(text, pp=pp)
        assert PipelineLayout.parse(str(layout), pp=pp) == layout


def test_every_violated_rule_is_named_at_once():
    assert rules("tE(t|)*3L|mt|m", pp=4, num_layers=4, mtp_layers=1) == [
        "6 stages cannot be dealt out evenly to pp = 4 ranks",
        "the embedding does not come first",
        "the loss does not come last",
        "multi-token prediction is spread over 2 stages",
        "a layer stands behind multi-token prediction, which needs the output of all layers",
        "it has 5 layers, and the model has 4",
        "it has 2 layers of multi-token prediction, and the model has 1",
    ]


def test_every_fault_of_the_writing_is_named_at_once():
    assert rules("*2E)x(t*|(t*0L*70000", pp=1) == [
        "the * at character 1 has nothing before it to repeat",
        "the parenthesis at character 4 closes no group",
        "'x' at character 5 has no meaning",
        "the * at character 8 needs a number of at least 1 behind it",
        "the * at character 12 needs a number of at least 1 behind it",
        "the * at character 15 makes more than 65536 signs",
        "the parenthesis at character 6 is not closed",
        "the parenthesis at character 10 is not closed",
    ]


@pytest.mark.parametrize(
    ("text", "pp", "rule"),
    [
        ("Et|tL", 3, "2 stages cannot be dealt out evenly to pp = 3 ranks"),
        ("EtL|t", 2, "the loss does not come last"),
        ("EtL|", 2, None),
        ("tL", 1, "the embedding is there 0 times"),
        ("EEtL", 1, "the embedding is there 2 times"),
        ("Et", 1, "the loss is there 0 times"),
        ("EtL|L", 2, "the loss is there 2 times"),
        ("", 1, "the embedding is there 0 times"),
        ("EmtL", 1, "a layer stands behind multi-token prediction, which needs the output of all layers"),
        ("Et|tm|tL", 3, "a layer stands behind multi-token prediction, which needs the output of all layers"),
        ("Et|tm|mL", 3, "multi-token prediction is spread over 2 stages"),
        ("Etm|L", 2, "multi-token prediction in stage 0 is on the first pipeline rank"),
        ("Et|t|m|L", 2, "multi-token prediction in stage 2 is on the first pipeline rank"),
        ("Et|t|m|L", 4, None),
        ("Et|t|tmL|", 4, None),
        ("Etm|L", 1, None),
        ("EL", 1, None),
    ],
)
def test_rules(text, pp, rule):
    assert (rules(text, pp=pp) or [None])[0] == rule


def test_in_a_v_the_last_stage_is_on_the_first_rank():
    assert rules("Et|t|t|tmL", pp=2, placement="v") == [
        "multi-token prediction in stage 3 is on the first pipeline rank"
    ]
    assert held(PipelineLayout.parse("Et|tt|t*3m|L", pp=2, placement="v"), 0) == ["Et", "L"]


def test_the_number_of_ranks_is_checked():
    assert [problem.key for problem in layout_problems("EtL", pp=0)] == ["parallel.pp"]


def test_messages():
    with pytest.raises(MoeParallelError) as caught:
        PipelineLayout.parse("Et|t|L", pp=2, num_layers=3)
    assert str(caught.value).splitlines() == [
        "parallel.pipeline = 'Et|t|L': 3 stages cannot be dealt out evenly to pp = 2 ranks; "
        "legal here: 2 or 4 stages, or other multiples",
        "parallel.pipeline = 'Et|t|L': it has 2 layers, and the model has 3; legal here: 3 signs t",
    ]


# The layout that a model gets where none is given.


@pytest.mark.parametrize("mtp_layers", [0, 1, 2])
def test_even_layouts_are_legal_and_even_or_refused(mtp_layers):
    costs = {"t": 1, "m": 2, "L": 1}
    for pp in range(1, 9):
        for vpp in range(1, 4):
            for num_layers in range(1, 41):
                if num_layers < pp * vpp - 1:
                    with pytest.raises(MoeParallelError, match=r"^parallel\.v?pp = .* stages.*legal here: 1 to \d+$"):
                        even_layout(num_layers, mtp_layers, pp=pp, vpp=vpp)
                    continue
                layout = even_layout(num_layers, mtp_layers, pp=pp, vpp=vpp)
                assert layout.problems(num_layers=num_layers, mtp_layers=mtp_layers) == []
                assert layout.vpp == vpp
                assert all(content.strip("E") for content in layout.contents)
                of_stage = stage_costs(layout, costs)
                if mtp_layers == 0:
                    assert max(of_stage) == -(-(num_layers + 1) // (pp * vpp))
                    assert max(of_stage) - min(of_stage) <= 1


def test_even_layouts_of_large_models():
    assert str(even_layout(61, 1, pp=4, vpp=4)) == "Et*4|(t*4|)*14tmL"
    assert str(even_layout(4, 1, pp=4)) == "Ett|tt|m|L"
    assert str(even_layout(94, pp=8, vpp=4)) == "Ett|(t*3|)*30ttL"
    assert even_layout(3, 1, pp=2, vpp=2, placement="v").problems() == []


def test_too_few_layers_name_what_is_legal():
    for numbers, message in [
        (
            {"pp": 4, "vpp": 3},
            "parallel.vpp = 3: pp * vpp = 4 * 3 = 12 stages, of which all but the last need one of 8",
        ),
        ({"pp": 10}, "parallel.pp = 10: pp * vpp = 10 * 1 = 10 stages"),
        ({"pp": 10, "vpp": 2}, "parallel.pp = 10: pp * vpp = 10 * 2 = 20 stages"),
        ({"pp": 0}, "parallel.pp = 0: "),
        ({"pp": 2, "vpp": 0}, "parallel.vpp = 0: "),
    ]:
        with pytest.raises(MoeParallelError, match=f"^{re.escape(message)}"):
            even_layout(8, **numbers)
    for pp, vpp in ((4, 2), (9, 1)):
        assert even_layout(8, pp=pp, vpp=vpp).num_layers == 8


# Balance


def test_the_table_names_the_busiest_rank_and_stage():
    layout = PipelineLayout.parse("Et|tt||tL", pp=2)
    assert stage_costs(layout, {"E": 10, "t": 2, "L": 1.5}) == (12, 4, 0, 3.5)
    assert describe_balance(layout, {"E": 10, "t": 2, "L": 1.5}).splitlines() == [
        "rank  stages         cost",
        "   0  Et / -           12",
        "   1  tt / tL         7.5",
        "busiest rank 12, mean 9.75: 1.231",
        "busiest stage 12, mean 4.875: 2.462",
    ]
    assert describe_balance(layout, {}).endswith("busiest stage 0, mean 0: 1.000")


@pytest.mark.parametrize(("costs", "message"), [({"x": 1}, "the cost of 'x'"), ({"t": -1}, "the cost of t is -1")])
def test_costs_are_checked(costs, message):
    with pytest.raises(MoeParallelError, match=f"^{message}"):
        stage_costs(PipelineLayout.parse("EtL", pp=1), costs)
