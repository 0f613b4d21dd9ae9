"""Loading, validating, explaining and writing configurations."""

import tomllib
from dataclasses import FrozenInstanceError, replace

import pytest

from moe_kernels import PluginError
from moe_train.config.error import ConfigError
from moe_train.config.explain import diff, diff_toml, why
from moe_train.config.load import load_config
from moe_train.config.schema import flatten
from moe_train.config.toml import to_toml
from moe_train.config.tree import CheckpointConfig, DataConfig, LoopConfig, ObserveConfig, TrainConfig
from moe_train.errors import MoeTrainError


@pytest.fixture
def toml(tmp_path):
    """`toml(text)`: a file with that text."""
    count = 0

    def write(text):
        nonlocal count
        count += 1
        path = tmp_path / f"settings{count}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def faults_of(*overrides, files=(), recipe="tiny_moe", world=1):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, files, overrides, world=world)
    return caught.value.faults


def only_fault(*overrides, **options):
    (fault,) = faults_of(*overrides, **options)
    return fault


def test_the_recipe_alone_is_legal_and_frozen():
    config = load_config("tiny_moe").config
    assert (config.model.num_experts, config.model.router.top_k, config.comm.kind) == (8, 2, "auto")
    with pytest.raises(FrozenInstanceError):
        config.train.steps = 1


def test_layers_win_in_order(toml):
    low = toml("[train]\nsteps = 7\nseed = 7\n[optim]\nlr = 7e-3\n")
    high = toml("train.steps = 8\ntrain.seed = 8\n")
    config = load_config("tiny_moe", [low, high], ["train.steps=9", "train.steps=10"]).config
    assert (config.train.steps, config.train.seed, config.optim.lr) == (10, 8, 7e-3)


@pytest.mark.parametrize(
    ("override", "section", "option", "value"),
    [
        ("train.steps=12", "train", "steps", 12),
        ("--train.steps=12", "train", "steps", 12),
        ("train.steps=1_000", "train", "steps", 1000),
        ("optim.lr=1e-4", "optim", "lr", 1e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        ("train.deterministic=false", "train", "deterministic", False),
        ("train.loss_norm=microbatch", "train", "loss_norm", "microbatch"),
        ('train.loss_norm="microbatch"', "train", "loss_norm", "microbatch"),
        ("train.threads=3", "train", "threads", 3),
        ("train.valid_interval_steps=none", "train", "valid_interval_steps", None),
        ("observe.sinks=[]", "observe", "sinks", ()),
        ('observe.sinks=["jsonl"]', "observe", "sinks", ("jsonl",)),
        ("observe.sample_prompt=We the people", "observe", "sample_prompt", "We the people"),
        ("observe.sample_prompt=a=b", "observe", "sample_prompt", "a=b"),
        ("observe.sample_prompt=1901", "observe", "sample_prompt", "1901"),
        ("observe.sample_prompt=1901-12-03", "observe", "sample_prompt", "1901-12-03"),
        ("observe.sample_prompt=none", "observe", "sample_prompt", "none"),
        ("observe.sample_prompt=", "observe", "sample_prompt", ""),
        ("observe.sample_prompt=1\ntrain.steps = 5", "observe", "sample_prompt", "1\ntrain.steps = 5"),
    ],
)
def test_values_of_overrides(override, section, option, value):
    found = getattr(getattr(load_config("tiny_moe", [], [override]).config, section), option)
    assert found == value
    assert type(found) is type(value)


def test_a_table_as_override_sets_its_options_and_leaves_the_others():
    config = load_config("tiny_moe", [], ["train={steps = 3, seed = 4}"]).config
    assert (config.train.steps, config.train.seed, config.train.microbatch_sequences) == (3, 4, 16)


def test_three_mistakes_of_different_kinds_give_three_errors(toml):
    path = toml("[optim]\nlrr = 1.0\n")
    faults = faults_of("train.steps=many", "parallel.ep=3", files=[path])
    assert {fault.problem.key for fault in faults} == {"optim.lrr", "train.steps", "parallel.ep"}
    message = str(ConfigError(faults))
    assert message.startswith("3 errors in the configuration:\n")
    assert f"optim.lrr = 1.0  (file {path})" in message
    assert "did you mean optim.lr?" in message
    assert 'train.steps = "many"  (command line)\n    must be a whole number' in message
    assert "8 experts" in message
    assert "legal here: 1" in message


def test_every_kind_of_mistake_is_reported_once_and_none_follows_from_another(toml):
    broken = toml("[optim]\nlr = = 3\n")
    mistakes = {
        "comm.kind=hybrd": "comm.kind",
        "comm.chunks=4": None,  # an option of a dispatcher that is not known cannot be judged
        "model.num_kv_heads=3": "model.num_kv_heads",
        "model.router.top_k=9": "model.router.top_k",
        "model.balance.aux=-1.0": "model.balance.aux",
        "train.balance_sequences=3": "train.balance_sequences",
        "data.corpus=wikipedia": "data.corpus",
        'observe.sinks=["jsonl", "tensorbord"]': "observe.sinks",
        "kernels.grouped_gemm=trition": "kernels.grouped_gemm",
        "checkpoint.keep=0": "checkpoint.keep",
        "train": "command line",
    }
    keys = [fault.problem.key for fault in faults_of(*mistakes, files=[broken])]
    assert sorted(keys) == sorted([*filter(None, mistakes.values()), f"{broken}, line 2, column 6"])


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.num_experts=true", "must be a whole number"),
        ("model.num_experts=8.0", "must be a whole number"),
        ('model.num_experts="8"', "must be a whole number"),
        ("model.num_experts=2020-01-01", "must be a whole number"),
        ("optim.lr=fast", "must be a number"),
        ("train.deterministic=1", "must be true or false"),
        ("train.deterministic=True", "must be true or false"),
        ("train.threads=many", "must be a whole number or none"),
        ("train.steps=none", "must be a whole number"),
        ("train.threads=null", "must be a whole number or none"),
        ("observe.sinks=jsonl", "must be a list, each text"),
        ("observe.sinks=[1]", "must be a list, each text"),
        ("train.threads=1\ntrain.steps = 5", "must be a whole number or none"),
        ("train.device=gpu", 'must be "auto" or "cpu" or "cuda"'),
    ],
)
def test_types_are_strict(override, rule):
    fault = only_fault(override)
    assert fault.problem.key == override.partition("=")[0]
    assert fault.problem.rule == rule


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("model.lr=1", "optim.lr"),
        ("model.router.topk=1", "model.router.top_k"),
        ("model.top_k=1", "model.router.top_k"),
        ("modle.num_experts=1", "model"),
        ("seed=1", "data.seed or train.seed"),
    ],
)
def test_an_unknown_option_is_an_error_with_a_suggestion(override, suggestion):
    fault = only_fault(override)
    assert "there is no such option" in fault.problem.rule
    assert fault.problem.next_step == f"did you mean {suggestion}?"


def test_an_unknown_option_blames_the_kind_where_options_depend_on_it():
    assert only_fault("optim.muon.step=3").problem.rule == "there is no such option"
    assert only_fault("comm.rank_capacity=2").problem.rule == "there is no such option of comm.kind = 'auto'"


@pytest.mark.parametrize(
    ("override", "next_step"),
    [
        ("memory.recompute=layernorm", 'did you mean ["layernorm"]?'),
        ("memory.recompute=ful", 'did you mean "full"?'),
        ("memory.offload=attn_norm", 'did you mean ["attn_norm"]?'),
        ("memory.offload=3", ""),
        ('optim.groups=[{pattern="*"}, {pattern="*", lr=2.0}]', "look at lr of entry 2"),
        ('optim.groups=[{pattern="*", weight_decay="no"}]', "look at weight_decay of entry 1"),
        ("optim.groups=[{lr_scale=2.0}]", "look at pattern of entry 1"),
        ('optim.groups=["*"]', ""),
    ],
)
def test_a_value_of_another_type_says_what_was_meant_or_where_to_look(override, next_step):
    assert only_fault(override).problem.next_step == next_step


def test_unknown_tables_are_reported_once(toml):
    fault = only_fault(files=[toml("[trian]\nsteps = 1\nseed = 2\n")])
    assert fault.problem.next_step == "did you mean train?"


def test_a_section_is_no_option_and_an_option_no_section():
    assert only_fault("optim=3").problem.rule == "is a section, not an option"
    assert only_fault("optim.lr.base=3").problem.next_step == "did you mean optim.lr?"


@pytest.mark.parametrize("override", ["train.steps", "=3", "train steps=3", "train..steps=3", ".steps=3"])
def test_an_override_that_is_no_setting_says_how_to_write_one(override):
    fault = only_fault(override)
    assert str(fault).startswith(f"command line: {override}\n")
    assert "section.option=value" in fault.problem.next_step


def test_a_file_that_is_no_toml_names_file_and_line(toml):
    path = toml("[train]\nsteps = 3\nseed = [1\nx = 2\n")
    fault = only_fault(files=[path])
    assert str(fault).startswith(f"{path}, line 4, column 1: x = 2\n    is no TOML")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(MoeTrainError, match=r"absent\.toml cannot be read"):
        load_config("tiny_moe", [tmp_path / "absent.toml"])


def test_an_unknown_recipe_names_the_installed_ones():
    with pytest.raises(
        PluginError, match=r"unknown recipe 'tiny_mo'; installed here: .*tiny_moe.*; did you mean 'tiny_moe'"
    ):
        load_config("tiny_mo")


def test_an_unknown_dispatcher_names_the_installed_ones(install):
    install("acme-comm", "[moe_comm.dispatchers]\nacme = acme_comm:PLUGIN\n", "")
    fault = only_fault("comm.kind=acne")
    assert fault.problem.key == "comm.kind"
    assert "unknown dispatcher 'acne'; installed here: acme, " in fault.problem.rule
    assert "local; did you mean 'acme'?" in fault.problem.rule


ACME = """
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moe_comm.dispatcher import DISPATCHER_INTERFACE_VERSION, DispatcherPlugin


@dataclass(frozen=True, kw_only=True)
class AcmeConfig:
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    kind: Literal["acme"] = "acme"
    chunks: int = 4


PLUGIN = DispatcherPlugin(
    name="acme",
    interface_version=DISPATCHER_INTERFACE_VERSION,
    config=AcmeConfig,
    available=lambda: None,
    build=lambda config, groups, num_experts: None,
)
"""


@pytest.fixture
def acme(install):
    install("acme-comm", "[moe_comm.dispatchers]\nacme = acme_comm:PLUGIN\n", ACME)


@pytest.mark.usefixtures("acme")
def test_a_dispatcher_of_a_third_party_brings_its_options():
    config = load_config("tiny_moe", [], ["comm.kind=acme", "comm.chunks=6"]).config
    assert (type(config.comm).__name__, config.comm.chunks) == ("AcmeConfig", 6)
    assert only_fault("comm.chunks=6").problem.rule == "there is no such option of comm.kind = 'auto'"
    assert only_fault("comm.kind=acme", "comm.chunks=six").problem.rule == "must be a whole number"


@pytest.mark.usefixtures("acme")
def test_another_kind_drops_inherited_options_of_the_first(toml):
    path = toml('[comm]\nkind = "acme"\nchunks = 6\n')
    assert load_config("tiny_moe", [path]).config.comm.chunks == 6
    loaded = load_config("tiny_moe", [path], ["comm.kind=local"])
    assert loaded.config.comm.kind == "local"
    assert "6  file" in why(loaded, "comm.chunks")
    assert 'dropped: comm.kind became "local" (command line)' in why(loaded, "comm.chunks")


def test_a_wrong_value_that_a_higher_layer_replaces_does_no_harm(toml):
    path = toml('[train]\nsteps = "many"\n')
    assert load_config("tiny_moe", [path], ["train.steps=5"]).config.train.steps == 5
    assert only_fault(files=[path]).problem.value == "many"


def test_both_wrong_values_of_one_option_are_reported(toml):
    path = toml('[train]\nsteps = "many"\n')
    assert [f.problem.value for f in faults_of("train.steps=few", files=[path])] == ["few", "many"]


@pytest.mark.parametrize(
    ("override", "key", "legal"),
    [
        ("train.microbatch_sequences=32", "train.microbatch_sequences", "1 to 16"),
        ("train.balance_sequences=3", "train.balance_sequences", "1, 2, 4, 8, 16"),
        ("data.valid_fraction=0", "data.valid_fraction", ""),
        ("data.corpus=wikipedia", "data.corpus", "state_of_the_union"),
    ],
)
def test_rules_between_sections(override, key, legal):
    problem = only_fault(override).problem
    assert (problem.key, problem.legal) == (key, legal)


def test_a_global_batch_need_not_be_a_multiple_of_the_microbatch():
    assert load_config("tiny_moe", [], ["train.microbatch_sequences=6"]).config.train.microbatch_sequences == 6


def test_the_layout_must_fit_the_world():
    assert load_config("tiny_moe", [], ["parallel.ep=4"], world=8).config.parallel.ep == 4
    problem = only_fault("parallel.ep=3", world=8).problem
    assert (problem.key, problem.legal) == ("parallel.ep", "1, 2, 4, 8")


@pytest.mark.parametrize(
    ("overrides", "key", "value", "legal", "words"),
    [
        (["parallel.tp=8"], "parallel.tp", 8, "1, 2, 4", "must divide model.num_heads = 4"),
        (
            ["parallel.tp=2", "model.num_heads=6", "model.num_kv_heads=3"],
            "parallel.tp",
            2,
            "1, 3, 6",
            "must divide model.num_kv_heads = 3 or be a multiple of it",
        ),
        (
            ["parallel.tp=2", "model.dense_layers=[0]", "model.dense_features=33"],
            "parallel.tp",
            2,
            "1, 3, 11, 33",
            "must divide model.dense_features = 33",
        ),
        (["parallel.tp=2", "model.shared_features=7"], "parallel.tp", 2, "1, 7", "model.shared_features = 7"),
        (["parallel.etp=2", "model.expert_features=9"], "parallel.etp", 2, "1, 3, 9", "model.expert_features = 9"),
        (["parallel.cp=8", "parallel.cp_kind=all_to_all"], "parallel.cp", 8, "1, 2, 4", "exchange heads"),
        (
            ["parallel.cp=4", "parallel.cp_inner=2"],
            "parallel.cp_inner",
            2,
            "1",
            "no effect with parallel.cp_kind = ring",
        ),
        (["parallel.cp=8", "parallel.cp_kind=hierarchical"], "parallel.cp_inner", 1, "2, 4", "several groups"),
        (["parallel.pp=8"], "parallel.pp", 8, "1 to 5", "8 stages, of which all but the last need one of 4 layers"),
        (["parallel.pp=2", "parallel.vpp=4"], "parallel.vpp", 4, "1 to 2", "need one of 4 layers"),
        (
            ["parallel.pp=2", "parallel.pipeline=Ett|tt|L"],
            "parallel.pipeline",
            "Ett|tt|L",
            "2 or 4 stages, or other multiples",
            "cannot be dealt out evenly",
        ),
        (
            ["parallel.pp=4", "parallel.pipeline=Ett|tt||L"],
            "parallel.pipeline",
            "Ett|tt||L",
            "stages may be empty, all stages of a rank may not",
            "nothing to train on rank 2",
        ),
        (
            ["parallel.pp=2", "parallel.vpp=2", "parallel.schedule=one_f_one_b"],
            "parallel.vpp",
            2,
            "1",
            "does not work with so many chunks",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=zero_bubble", "memory.data_parallel=fsdp"],
            "memory.data_parallel",
            "fsdp",
            "zero1, or another parallel.schedule",
            "reduces gradients in every backward",
        ),
        (["train.global_batch_sequences=4", "train.microbatch_sequences=4"], None, 4, "at least 8", "dp = 8 ranks"),
    ],
)
def test_what_must_divide_what_names_key_value_rule_and_legal_values(overrides, key, value, legal, words):
    problem = only_fault(*overrides, world=8).problem
    assert (problem.key, problem.value, problem.legal) == (key or "train.global_batch_sequences", value, legal)
    assert words in problem.rule


def test_one_value_that_breaks_two_rules_is_one_error_with_both():
    problem = only_fault("parallel.ep=3").problem
    assert "does not divide the world of 1 ranks" in problem.rule
    assert "8 experts cannot be spread evenly" in problem.rule
    assert problem.legal == "1"


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (DataConfig(sequence_length=0, valid_fraction=1.0, seed=-1), ["sequence_length", "seed", "valid_fraction"]),
        (CheckpointConfig(interval_steps=0, keep=0), ["interval_steps", "keep"]),
        (CheckpointConfig(interval_steps=None), []),
        (ObserveConfig(log_interval_steps=0, sample_tokens=-1), ["log_interval_steps", "sample_tokens"]),
        (ObserveConfig(sinks=("a", "a")), ["sinks"]),
        (LoopConfig(steps=0, threads=0, seed=-1), ["steps", "threads", "seed"]),
        (LoopConfig(valid_interval_steps=None, threads=None), []),
    ],
)
def test_rules_of_sections(section, keys):
    assert [problem.key.partition(".")[2] for problem in section.problems()] == keys


ODD_OVERRIDES = [
    "train.threads=none",
    "checkpoint.interval_steps=none",
    "optim.lr=0.1234567890123456789",
    "model.norm_eps=1e-12",
    'observe.sample_prompt="line one\\n\\ttab \\"quoted\\" \\\\ ünï 中 none"',
    "observe.sinks=[]",
    "model.tied_embeddings=true",
    "train.seed=9007199254740993",
]


def test_the_resolved_file_loads_back_to_the_identical_configuration(tmp_path):
    config = load_config("tiny_moe", [], ODD_OVERRIDES).config
    assert config != load_config("tiny_moe").config
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    again = load_config(str(path))
    assert again.config == config
    assert list(map(repr, dict(flatten(again.config)).values())) == list(map(repr, dict(flatten(config)).values()))
    assert again.provenance["optim.lr"].layer == "file"
    assert to_toml(again.config) == to_toml(config)
    assert diff_toml(path, config) == []


def test_the_resolved_file_has_the_sections_in_their_order():
    sections = ["model", "parallel", "comm", "kernels", "memory", "data", "optim", "checkpoint", "observe", "train"]
    assert list(tomllib.loads(to_toml(load_config("tiny_moe").config))) == sections


def test_a_file_in_the_place_of_a_recipe_must_set_everything(toml):
    complete = to_toml(load_config("tiny_moe").config)
    path = toml("\n".join(line for line in complete.splitlines() if not line.startswith("lr = ")))
    fault = only_fault(recipe=str(path))
    assert fault.problem.rule.endswith("missing: optim.lr")
    assert load_config(str(path), [], ["optim.lr=0.5"]).config.optim.lr == 0.5


def test_why_shows_every_layer_and_marks_the_winner(toml):
    path = toml("[optim]\nlr = 0.5\n")
    loaded = load_config("tiny_moe", [path], ["optim.lr=0.25"])
    lines = why(loaded, "optim.lr").splitlines()
    assert lines[0] == "optim.lr"
    assert [line.split("  ")[-1] for line in lines[1:]] == [
        "default",
        "recipe tiny_moe",
        f"file {path}",
        "command line",
    ]
    assert [line for line in lines if line.startswith(" -> ")] == [" -> 0.25  command line"]
    assert str(loaded.provenance["optim.lr"]) == "command line"


def test_why_of_a_section_tells_all_its_options():
    keys = [line for line in why(load_config("tiny_moe"), "model.router").splitlines() if not line.startswith(" ")]
    assert "model.router.top_k" in keys
    assert all(key.startswith("model.router.") for key in keys)


def test_why_of_an_unknown_option_suggests():
    with pytest.raises(MoeTrainError, match=r"there is no option 'model.lr'; did you mean optim\.lr\?"):
        why(load_config("tiny_moe"), "model.lr")


def test_diff_lists_what_differs():
    config = load_config("tiny_moe").config
    other = replace(config, train=replace(config.train, threads=2, device="cpu"))
    assert list(map(str, diff(config, other))) == ["train.threads: none -> 2", 'train.device: "auto" -> "cpu"']
    assert diff(config, config) == []


@pytest.mark.usefixtures("acme")
def test_diff_of_options_that_one_side_has_only():
    left = load_config("tiny_moe").config
    right = load_config("tiny_moe", [], ["comm.kind=acme"]).config
    found = list(map(str, diff(left, right)))
    assert 'comm.kind: "auto" -> "acme"' in found
    assert "comm.chunks: (no such option) -> 4" in found
    assert "comm.rank_capacity_factor: none -> (no such option)" in found


def test_defaults_of_a_nested_section_given_by_its_parent_are_kept(install):
    source = """
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from moe_comm.dispatcher import DISPATCHER_INTERFACE_VERSION, DispatcherPlugin


@dataclass(frozen=True, kw_only=True)
class Link:
    width: int = 1
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class AcmeConfig:
    kind: Literal["acme"] = "acme"
    link: Link = field(default_factory=lambda: Link(width=7))


PLUGIN = DispatcherPlugin(
    name="acme",
    interface_version=DISPATCHER_INTERFACE_VERSION,
    config=AcmeConfig,
    available=lambda: None,
    build=lambda config, groups, num_experts: None,
)
"""
    install("acme-comm", "[moe_comm.dispatchers]\nacme = acme_comm:PLUGIN\n", source)
    link = load_config("tiny_moe", [], ["comm.kind=acme", "comm.link.depth=3"]).config.comm.link
    assert (link.width, link.depth) == (7, 3)


def test_train_config_has_defaults_for_every_section():
    assert TrainConfig().model.kind == "decoder"
    assert TrainConfig().comm.kind == "auto"
