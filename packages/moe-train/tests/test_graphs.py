"""Graphs in a training: losses, gradients and weights are those without graphs, bit for bit.

On a CPU graphs run the functions again on their static buffers, whose reuse is that of CUDA graphs. Buffers are
poisoned when their backward has run, so that who reads them too late finds NaN.
"""

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

from moe_kernels import MoeKernelsError
from moe_kernels.graphs import Use
from moe_parallel import ParallelLayout, run_distributed
from moe_train import assemble as assembly
from moe_train.assemble import assemble
from moe_train.config.checks import mesh_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.errors import MoeTrainError
from moe_train.evaluate import validation_loss
from moe_train.graphs import StepGraphs
from moe_train.scale import LoadWindow
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, SMALL, STANDARD, short_corpus, small_config

SCOPES = {"both": '["attn", "moe_router"]', "attention": '["attn"]', "router": '["moe_router"]'}
# Four microbatches a step.
FOUR = (*ALL_LOSSES, "train.microbatch_sequences=2", "memory.compute_dtype=float32")
VARIANTS = {
    "all losses": FOUR,
    "rounded": (*FOUR, "memory.compute_dtype=bfloat16"),
    "one microbatch": (*FOUR, "train.microbatch_sequences=8"),
    # The last microbatch of a step is smaller.
    "uneven": (*FOUR, "train.microbatch_sequences=3"),
    "jitter and bias": (
        *FOUR,
        "model.router.jitter=0.2",
        "model.router.score=sigmoid",
        "model.balance.bias_rate=0.01",
    ),
    "forced": (*FOUR, "model.router.force_balance=true"),
    "sinkhorn": ("train.microbatch_sequences=2", "model.router.sinkhorn_iterations=3", "model.balance.aux=0"),
    "shared and dense": (
        *FOUR,
        "model.shared_features=9",
        "model.dense_layers=[0]",
        "model.dense_features=17",
        "model.num_layers=3",
    ),
    "capacity": (*FOUR, "model.capacity.factor=0.6", "model.capacity.scope=microbatch"),
}


@pytest.fixture(params=["eager", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return {"eager": "cpu", "cuda": "cuda"}[request.param]


@contextmanager
def poisoned():
    with patch.object(assembly, "StepGraphs", partial(StepGraphs, poison=True)), short_corpus():
        yield


def train(config, groups=None, steps=4, evaluates=False, odd=None):
    """Losses, gradients of every step and the weights at the end; the step `odd` lacks its last microbatch."""
    run = assemble(config, groups)
    found, window = [], None
    if config.model.balance.glob > 0:
        router = len(run.router_names), config.model.num_experts
        window = LoadWindow(counts_LE=torch.ones(router, dtype=torch.int64), num_tokens=config.model.num_experts)

    def keep_gradients():
        found.extend(part.tensor.clone() for part in run.engine.gradient_tensors())

    for step in range(steps):
        microbatches = next_step(run.data.train, run.cut).microbatches
        microbatches = microbatches[:-1] if step == odd else microbatches
        result = run_step(run, microbatches, updates=step, window=window, inspect=keep_gradients)
        found += [
            torch.tensor([result.loss, result.gradient_norm], dtype=torch.float64),
            *vars(result.statistics).values(),
        ]
        if window is not None:
            window = LoadWindow(counts_LE=result.statistics.counts, num_tokens=result.scale.num_tokens)
        if evaluates:
            found.append(torch.tensor(validation_loss(run, 4)))
    return run, [*found, *(part.tensor for part in run.engine.state_tensors())]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scopes", SCOPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_with_graphs_has_the_bits_of_one_without(variant, scopes, device):
    options = (*VARIANTS[variant], f"train.device={device}")
    with poisoned():
        _, expected = train(small_config(*options))
        run, found = train(small_config(*options, "kernels.graphs=partial", f"kernels.graph_scopes={SCOPES[scopes]}"))
    assert_equal(found, expected)
    layers = run.config.model.num_layers - (scopes == "router" and "dense" in variant)
    # Microbatches that look alike share graphs.
    assert run.graphs.pool.num_graphs == 2 * layers * (4 if variant == "uneven" else 1) // (
        2 if variant == "uneven" else 1
    )


def test_evaluation_and_a_step_of_other_shapes_run_between_without_graphs():
    with poisoned():
        _, expected = train(small_config(*FOUR), evaluates=True, odd=2)
        run, found = train(small_config(*FOUR, "kernels.graphs=partial"), evaluates=True, odd=2)
    assert_equal(found, expected)
    assert run.graphs.pool.num_graphs == 2 * run.config.model.num_layers


@pytest.mark.parametrize(
    "options",
    [("model.balance.seq=0", "data.separate_documents=true", "data.sequence_length=40"), ("model.sliding_window=5",)],
    ids=["documents", "window"],
)
def test_where_attention_reads_the_host_routers_alone_are_graphs(options):
    options = (*FOUR, *options)
    with poisoned():
        _, expected = train(small_config(*options))
        _, found = train(small_config(*options, "kernels.graphs=partial", 'kernels.graph_scopes=["moe_router"]'))
    assert_equal(found, expected)


# Three or more microbatches are in flight on the first rank of a pipeline, with chunks that take turns more.
SPREAD = {
    "gpipe": (2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    "one_f_one_b": (2, ("parallel.pp=2", "parallel.schedule=one_f_one_b")),
    "interleaved": (2, ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=2", "model.num_layers=4")),
    "dp2 ep2": (2, ("parallel.ep=2",)),
}


@pytest.mark.dist
@pytest.mark.parametrize("recipe", ["tiny_qwen3_moe", "tiny_deepseek_v3"])
@pytest.mark.parametrize("name", SPREAD)
def test_microbatches_in_flight_have_buffers_of_their_own(name, recipe):
    """All losses, expert bias, a dense layer, a shared expert and two tokens ahead, over the ranks of a pipeline."""
    world, options = SPREAD[name]
    options = (*STANDARD[recipe], "data.separate_documents=false", "train.microbatch_sequences=1", *options)
    plain, graphed = (
        load_config(recipe, [], [*options, f"kernels.graphs={graphs}"], world=world).config
        for graphs in ("none", "partial")
    )
    degrees = plain.parallel
    layout = ParallelLayout(world=world, tp=1, cp=1, pp=degrees.pp, ep=degrees.ep, etp=1)

    def on_rank(mesh):
        _, expected = train(plain, mesh, steps=2)
        run, found = train(graphed, mesh, steps=2)
        assert_equal(found, expected)
        return run.graphs.pool.order

    with poisoned():
        orders = run_distributed(layout, on_rank, timeout_s=30, **mesh_of(plain, layout))
    in_flight = [most_in_flight(order) for order in orders]
    assert all(order for order in orders)
    if "pp" in " ".join(options):
        assert max(in_flight) > 1, in_flight


def most_in_flight(order):
    waiting, most = set(), 0
    for use in order:
        key = (use.name, use.microbatch)
        waiting ^= {key}
        most = max(most, sum(name == use.name for name, _ in waiting))
    return most


def test_the_order_of_a_pipeline_is_what_is_captured():
    order = [Use("a", number, phase) for phase in ("forward", "backward") for number in range(3)]
    assert most_in_flight(order) == 3


def test_what_is_reported_of_a_microbatch_is_not_what_a_later_one_left():
    """Statistics are read when a step is over: without copies they are those of other microbatches, or poison."""
    _, expected = train_with("_lasting", lambda routed: routed)
    assert any(bool(value.isnan().any()) for value in expected if value.is_floating_point())


def test_numbers_that_change_from_step_to_step_are_no_constants_of_a_graph():
    with pytest.raises(MoeKernelsError, match=r"scale\.window\.num_tokens = 5, not 104"):
        train_with("readable", lambda scale: scale)


def train_with(name, function):
    with poisoned(), patch(f"moe_train.{'step' if name == 'readable' else 'graphs'}.{name}", function):
        return train(small_config(*FOUR, "kernels.graphs=partial"))


@pytest.mark.parametrize(
    ("world", "overrides", "key", "says"),
    [
        (1, ("kernels.graphs=full",), "kernels.graphs", "a whole step, which is not built here"),
        (
            1,
            ('kernels.graph_scopes=["moe_preprocess"]',),
            "kernels.graph_scopes",
            "reads exact ones on the host",
        ),
        (1, ("kernels.graph_scopes=[]",), "kernels.graph_scopes", "at least one part"),
        (1, ("memory.recompute=full",), "kernels.graphs", "does not run its forward again"),
        (2, ("memory.data_parallel=fsdp",), "kernels.graphs", "fsdp gathers them anew"),
        (2, ("parallel.tp=2",), "kernels.graphs", "contain no communication"),
        (2, ("parallel.cp=2",), "kernels.graphs", "contain no communication"),
        (2, ("parallel.pp=2", "parallel.schedule=zero_bubble"), "kernels.graphs", "puts them off"),
        (1, ("data.sequences=sentences",), "kernels.graphs", "one shape"),
        (1, ("data.separate_documents=true",), "kernels.graphs", "where documents begin"),
        (1, ("model.sliding_window=5",), "kernels.graphs", "parts of a window"),
        (
            1,
            ("data.separate_documents=true", 'kernels.graph_scopes=["moe_router"]', "model.balance.seq=0.1"),
            "kernels.graphs",
            "as many sequence losses as documents",
        ),
        (1, ("observe.record_choices=true",), "kernels.graphs", "recorded and repeated on the host"),
    ],
)
def test_what_graphs_cannot_be_combined_with_is_said(world, overrides, key, says):
    with pytest.raises(ConfigError, match=says) as error:
        load_config("tiny_moe", [], [*SMALL, "model.num_experts=8", "kernels.graphs=partial", *overrides], world=world)
    assert key in str(error.value)


def test_a_model_of_other_layers_is_refused():
    with short_corpus():
        run = assemble(small_config())
    with pytest.raises(MoeTrainError, match=r"no layer of this ModuleList is a Block.*kernels\.graphs = 'none'"):
        StepGraphs(torch.nn.ModuleList([run.model.layers[0].moe.router]), ("attn",))
