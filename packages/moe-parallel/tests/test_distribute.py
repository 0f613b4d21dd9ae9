"""A plan is applied to a model: which values a rank keeps, where, under which names, and what is refused."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from moe_parallel import (
    AxisGroups,
    Boundary,
    Box,
    ModuleRule,
    MoeParallelError,
    ParallelLayout,
    ParallelPlan,
    ParameterKind,
    PlanRule,
    ShardSpec,
    SplitVocabulary,
    apply_plan,
    local_box,
    shard_specs,
    without_storage,
)
from moe_parallel.testing import legal_layouts

PLAN = ParallelPlan(
    parameters=(
        PlanRule(pattern="embedding.weight", placements=(("tp", 0),), uneven=True),
        PlanRule(pattern="layers.*.up.*", placements=(("tp", 0),)),
        PlanRule(pattern="layers.*.down.weight", placements=(("tp", 1),)),
        PlanRule(pattern="*.experts", kind=ParameterKind.EXPERT, placements=(("ep", 0), ("etp", 2))),
    ),
    modules=(ModuleRule(pattern="embedding", style=SplitVocabulary()),),
)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(8, 3, 4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 13, bias=False)
        self.head.weight = self.embedding.weight


class Places:
    """Groups without communication: where a rank of a layout stands, and an object for each group."""

    def __init__(self, layout, rank):
        self.size, self._coordinates = layout.size, layout.coordinates(rank)

    def rank(self, axis):
        return self._coordinates[axis]

    def group(self, axis):
        return None if self.size(axis) == 1 else object()


def part(whole, box):
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@pytest.mark.parametrize(
    ("degrees", "rule"),
    [
        ({"tp": 8}, "a vocabulary of 13 leaves some of 8 ranks without an entry"),  # two for each of seven
        ({"etp": 8}, r"dim 2 of layers\.0\.experts has 4 entries, not a multiple of etp = 8"),
    ],
)
def test_what_cannot_be_split(degrees, rule):
    with pytest.raises(MoeParallelError, match=rule):
        apply_plan(Model(), PLAN, Places(ParallelLayout(world=8, **degrees), 0))


@pytest.mark.parametrize("layout", [layout for layout in legal_layouts(4) if layout.pp == 1], ids=str)
def test_every_rank_keeps_its_part_of_the_values(layout):
    whole = Model()
    before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    for rank in range(4):
        model, groups = copy.deepcopy(whole), Places(layout, rank)
        specs = apply_plan(model, PLAN, groups)
        assert specs == shard_specs(whole, PLAN.parameters), "specs are those of the whole"
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter, part(before[name], local_box(specs[name], groups)))
            # A view would keep the whole alive.
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            assert parameter.is_contiguous()


def test_what_is_tied_stays_tied_and_counts_once():
    model = Model()
    specs = apply_plan(model, PLAN, Places(ParallelLayout(world=2, tp=2), 1))
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.shape == (6, 4)
    assert "head.weight" not in specs
    assert type(model.embedding).__name__ == "VocabularyEmbedding"


def test_a_module_with_two_names_is_changed_under_both():
    model = nn.ModuleDict({"input": nn.Embedding(6, 2), "block": nn.ModuleDict({"norm": nn.LayerNorm(2)})})
    model["again"] = model["input"]
    model["block"]["inner"] = model["input"]
    plan = ParallelPlan(
        parameters=(PlanRule(pattern="input.weight", placements=(("tp", 0),), uneven=True),),
        modules=(ModuleRule(pattern="block.inner", style=SplitVocabulary()),),
    )
    apply_plan(model, plan, Places(ParallelLayout(world=2, tp=2), 1))
    assert model["input"] is model["again"] is model["block"]["inner"]
    assert model["input"].first == 3
    assert model["input"].weight.shape == (3, 2)


def test_a_style_sees_a_module_of_two_names_once():
    seen = []
    model = nn.ModuleDict({"a": nn.Linear(1, 1)})
    model["b"] = model["a"]

    def style(module, groups):
        seen.append(module)
        return module

    apply_plan(model, ParallelPlan(modules=(ModuleRule(pattern="*", style=style),)), AxisGroups())
    assert seen == [model["a"]]


@pytest.mark.parametrize("layout", [ParallelLayout(world=1), ParallelLayout(world=2, tp=2)], ids=str)
def test_without_storage_only_the_part_comes_into_being(layout):
    with without_storage():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    groups = Places(layout, 0)
    specs = apply_plan(model, PLAN, groups, device=torch.device("cpu"))
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu"
        assert tuple(parameter.shape) == local_box(specs[name], groups).shape
        assert parameter.isnan().all(), "the memory is fresh, which this suite fills with NaN"
    assert model.head.weight is model.embedding.weight


def drop(model, *names):
    """What a rank of a pipeline does with the modules of other stages."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_modules_that_are_not_kept_get_no_storage(rank):
    layout = ParallelLayout(world=2, tp=2)
    with without_storage():
        model = Model()
    dropped = [model.embedding.weight, model.layers[0].experts]
    whole = shard_specs(Model(), PLAN.parameters)

    def keep():
        assert all(parameter.is_meta for parameter in model.parameters()), "before anything gets storage"
        assert not isinstance(model.embedding, nn.Embedding), "after the modules were matched"
        drop(model, "embedding", "head")
        model.layers[0] = nn.Identity()

    specs = apply_plan(model, PLAN, Places(layout, rank), keep=keep)
    assert specs == whole, "what the parameters of the whole model are, on every rank"
    left = dict(model.named_parameters())
    assert left.keys() == {name for name in specs if name.startswith("layers.1.")}
    for name, parameter in left.items():
        assert (parameter.device.type, tuple(parameter.shape)) == (
            "cpu",
            local_box(specs[name], Places(layout, rank)).shape,
        )
    assert all(parameter.is_meta for parameter in dropped)


def test_a_tied_parameter_keeps_its_first_name():
    """A stage without the embedding has the head alone, under another name than the whole model's."""
    model = Model()
    with pytest.raises(MoeParallelError, match=r"has the names of the whole, but these are new: head\.weight; of a"):
        apply_plan(model, PLAN, Places(ParallelLayout(world=2, tp=2), 0), keep=lambda: drop(model, "embedding"))


def test_devices():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    buffers = dict(model.named_buffers())
    kept = dict(model.named_parameters())
    apply_plan(model, ParallelPlan(), AxisGroups())
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    # The meta device stands for another one than the CPU.
    apply_plan(model, ParallelPlan(), AxisGroups(), device=torch.device("meta"))
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert model.state_dict().keys() == {*kept, *buffers}


def test_buffers_stay_what_they_are():
    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    shared = torch.arange(3)
    model["a"].register_buffer("x", shared, persistent=False)
    model["b"].register_buffer("y", shared)
    apply_plan(model, ParallelPlan(), AxisGroups(), device=torch.device("meta"))
    assert model["a"].x is model["b"].y
    assert model["a"].x.is_meta
    assert list(model.state_dict()) == ["b.y"]


def test_a_buffer_without_storage_is_refused():
    with without_storage():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(
        MoeParallelError, match=r"the buffer 1\.running_mean has no storage, so its value is lost; make"
    ):
        apply_plan(model, ParallelPlan(), AxisGroups())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("meta", [True, False])
def test_dtype_and_requires_grad_are_kept(meta, dtype):
    model = nn.Linear(4, 4, dtype=dtype, device="meta" if meta else "cpu")
    model.weight.requires_grad_(False)
    plan = ParallelPlan(parameters=(PlanRule(pattern="*", placements=(("tp", 0),)),))
    apply_plan(model, plan, Places(ParallelLayout(world=2, tp=2), 1))
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)
    assert model.weight.dtype == model.bias.dtype == dtype
    assert model.weight.shape == (2, 4)


def test_a_module_in_the_place_of_another_keeps_the_mode():
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2)}).eval()
    plan = ParallelPlan(parameters=PLAN.parameters[:1], modules=PLAN.modules)
    apply_plan(model, plan, Places(ParallelLayout(world=2, tp=2), 0))
    assert not model["embedding"].training


@pytest.mark.parametrize("pattern", ["head", "layers.*.attention", "Embedding", ""])
def test_r050_a_module_pattern_that_matches_nothing(pattern):
    plan = ParallelPlan(modules=(ModuleRule(pattern=pattern, style=Boundary()),))
    with pytest.raises(
        MoeParallelError, match=rf"module pattern '{pattern.replace('*', '.')}', which matches no module"
    ):
        apply_plan(nn.ModuleDict({"embedding": nn.Embedding(2, 2)}), plan, AxisGroups())


def test_r050_a_parameter_pattern_that_matches_nothing_leaves_the_model_alone():
    model = Model()
    plan = ParallelPlan(parameters=(*PLAN.parameters, PlanRule(pattern="head.weight")), modules=PLAN.modules)
    with pytest.raises(MoeParallelError, match=r"match no parameter.*: head\.weight; parameters are embedding\.weight"):
        apply_plan(model, plan, Places(ParallelLayout(world=2, tp=2), 0))  # tied: it has the name embedding.weight
    assert isinstance(model.embedding, nn.Embedding)
    assert model.embedding.weight.shape == (13, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_r050_a_boundary_that_would_be_lost_is_refused_on_any_number_of_ranks(ranks):
    """A module takes the place of one that has an edge already."""

    def replace(module, groups):
        other = nn.Linear(2, 2)
        other.weight, other.bias = module.weight, module.bias
        return other

    edge, change = Boundary(inputs=("gather_rows",)), "linear"
    plan = ParallelPlan(modules=(ModuleRule(pattern="*", style=edge), ModuleRule(pattern=change, style=replace)))
    groups = Places(ParallelLayout(world=ranks, tp=ranks), 0)
    with pytest.raises(
        MoeParallelError, match=r"place of linear, whose boundary would be lost; move the rule 'linear'"
    ):
        apply_plan(nn.ModuleDict({"linear": nn.Linear(2, 2)}), plan, groups)
    right = ParallelPlan(modules=plan.modules[::-1])
    apply_plan(nn.ModuleDict({"linear": nn.Linear(2, 2)}), right, groups)


def test_a_style_that_renames_parameters_is_refused():
    plan = ParallelPlan(modules=(ModuleRule(pattern="0", style=lambda module, groups: nn.Sequential(module)),))
    with pytest.raises(
        MoeParallelError, match=r"names of parameters, .*: 0\.0\.bias, 0\.0\.weight, 0\.bias, 0\.weight$"
    ):
        apply_plan(nn.Sequential(nn.Linear(2, 2)), plan, AxisGroups())


def test_a_split_embedding_whose_weight_is_not_split_is_found_when_it_is_used():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 2)})
    for rank in range(2):
        mine = copy.deepcopy(model)
        apply_plan(mine, ParallelPlan(modules=PLAN.modules), Places(ParallelLayout(world=2, tp=2), rank))
        with pytest.raises(MoeParallelError, match="the weight has 5 rows, but this rank's part of the vocabulary"):
            mine["embedding"](torch.tensor([0]))


def test_experts_are_split_over_ranks_of_their_view():
    """Experts by `ep`, their features by `etp`, and neither by `tp`."""
    layout = ParallelLayout(world=8, tp=2, ep=2, etp=4)
    spec = ShardSpec(
        name="layers.0.experts", shape=(8, 3, 4), kind=ParameterKind.EXPERT, placements=(("ep", 0), ("etp", 2))
    )
    boxes = set()
    for rank in range(8):
        model, groups = Model(), Places(layout, rank)
        assert apply_plan(model, PLAN, groups)["layers.0.experts"] == spec
        assert model.layers[0].experts.shape == (4, 3, 1)
        boxes.add(local_box(spec, groups))
    assert boxes == {Box((ep, 0, etp), (4, 3, 1)) for ep in (0, 4) for etp in range(4)}


def test_modules_without_storage_take_milliseconds_and_import_no_compiler():
    """In a process of its own. torch initialises meta tensors by its compiler's decompositions: 2 s of imports."""
    code = """
import sys, time
import torch
from torch import nn
from moe_parallel import without_storage
began = time.process_time()
with without_storage():
    modules = [nn.Linear(8, 8), nn.Embedding(8, 8), nn.Embedding(8, 8, padding_idx=0), nn.LayerNorm(8), nn.RMSNorm(8)]
    modules += [nn.Conv1d(2, 2, 2), nn.MultiheadAttention(8, 2), nn.GRU(2, 2)]
    made = nn.Parameter(torch.empty(3, 3))
    for distribution in ("uniform", "normal", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"):
        assert getattr(nn.init, f"{distribution}_")(made) is made
    for fill in (nn.init.zeros_, nn.init.ones_, nn.init.trunc_normal_, nn.init.orthogonal_):
        assert fill(made).is_meta
    assert nn.init.constant_(tensor=made, val=1.0) is made
    assert made.data.normal_(0, 0.1).is_meta
assert all(parameter.is_meta for module in modules for parameter in module.parameters())
seconds = time.process_time() - began
heavy = sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
assert not heavy and seconds < 0.5, (heavy, seconds)
outside = nn.Linear(2, 2)
assert not outside.weight.is_meta and outside.weight.any(), "initialised as ever"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
