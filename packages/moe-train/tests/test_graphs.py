"""Part of a real layer as a graph: attention and router are replayed, the exchange and the experts run as they are.

The rest of the layer resumes from what the graph returned. Shape legend: B sequences, S slots, T = B*S tokens, D model.
"""

import pytest
import torch

from moe_kernels import MoeKernelsError
from moe_kernels.graphs import GraphPool
from moe_memory.recompute import Replay
from moe_parallel import Step, StepKind
from moe_train.data.batch import Batch
from moe_train.models.moe import MoEState
from moe_train.scale import StepScale
from moe_train.testing import small_config, small_model

VOCABULARY, ROWS, SLOTS, MICROBATCHES = 31, 2, 7, 3
LOSSES = ("model.balance.aux=0.02", "model.balance.seq=0.03", "model.balance.z=0.01")
VARIANTS = {
    "plain": (),
    "all losses": LOSSES,
    "shared expert": (*LOSSES, "model.shared_features=9"),
    "bias": ("model.router.score=sigmoid", "model.balance.bias_rate=0.01"),
}


@pytest.fixture(params=["eager", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


class GraphedBlock:
    """A layer whose first part is a graph, up to and including the step `route`."""

    def __init__(self, pool, name, block):
        self.block = block
        parts = (block.attention_norm, block.attention, block.moe_norm, block.moe.router)
        self.graphed = pool.graphed(name, self.first_part, *parts)
        route, *self.rest = block.moe.steps
        assert route.name == "route"
        self.route = route.run
        block.moe.steps = (Step("resume", StepKind.COMPUTE, self.resume), *self.rest)
        block.forward = self.forward

    def first_part(self, x_TD, info, rope, scale):
        block = self.block
        x_TD = x_TD + block.attention(block.attention_norm(x_TD), info, rope)
        state = MoEState(x_TD=block.moe_norm(x_TD), valid_T=info.valid_BS.flatten(), scale=scale, replay=Replay())
        self.route(state)
        return x_TD, state.x_TD, {"routing": state.routing, "probs_TK": state.probs_TK, "losses": state.losses}

    def resume(self, state):
        for name, value in self.stored.items():
            setattr(state, name, value)
        del self.stored

    def forward(self, replay, x_TD, info, rope, scale):
        x_TD, normed_TD, self.stored = self.graphed(x_TD, info, rope, scale)
        y_TD, statistics = self.block.moe(normed_TD, info.valid_BS.flatten(), scale, replay)
        return x_TD + y_TD, statistics


def build(variant, device, recompute="none"):
    torch.manual_seed(11)
    model = small_model(small_config(*VARIANTS[variant]).model, VOCABULARY, torch.float32, recompute).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return model


def draw(device):
    """Microbatches of one step, the last rows of which end in padding."""
    batches = []
    for _ in range(MICROBATCHES):
        token_BS, target_BS = torch.randint(VOCABULARY, (2, ROWS, SLOTS))
        valid_BS = torch.arange(SLOTS) < torch.tensor([[SLOTS], [SLOTS - 2]])
        batches.append(Batch.from_rows(token_BS, target_BS, valid_BS).each(lambda value: value.to(device)))
    return batches


def run_step(model, batches):
    """Losses, statistics and gradients of a step, and an update of the parameters."""
    scale = StepScale.count(batches, balance_sequences=ROWS, loss_norm="token")
    found = []
    for batch in batches:
        weights = scale.microbatch(batch, torch.float32)
        output = model(batch.token_BS, batch.sequence_info(), weights)
        loss_T = torch.nn.functional.cross_entropy(
            output.logits_BSV.flatten(0, 1), batch.target_BS.flatten(), reduction="none"
        )
        loss = (loss_T * weights.target_weight_T).sum()
        found += [loss.detach(), output.statistics.counts, output.statistics.aux, output.statistics.z]
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            found.append(parameter.grad)
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
        for router in model.routers():
            router.update_bias(output.statistics.counts[router.row])
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_and_router_as_graphs_change_no_bit(variant, backend):
    device = "cuda" if backend == "cuda" else "cpu"
    plain, model = build(variant, device), build(variant, device)
    # Forward and backward of a layer end before the backward of the layer below begins.
    pool = GraphPool(backend=backend, poison=True, read_before={"layers.1": "layers.0"})
    for number, block in enumerate(model.layers):
        GraphedBlock(pool, f"layers.{number}", block)
    for step in range(4):
        batches = draw(device)
        for mine, other in zip(run_step(model, batches), run_step(plain, batches), strict=True):
            assert torch.equal(mine, other)
        if step == 0:
            pool.capture()
    assert pool.num_graphs == 2 * len(model.layers), "one microbatch in flight"
    for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_microbatches_in_flight_have_graphs_of_their_own(backend):
    """As in a pipeline: two forwards before the first backward."""
    device = "cuda" if backend == "cuda" else "cpu"
    plain, model = build("all losses", device), build("all losses", device)
    pool = GraphPool(backend=backend, poison=True)
    GraphedBlock(pool, "layers.0", model.layers[0])

    def step(model, batches):
        logits = [model(batch.token_BS, batch.sequence_info()).logits_BSV for batch in batches[:2]]
        grads = []
        for number in range(MICROBATCHES):
            model.zero_grad()
            logits[number].square().sum().backward()
            grads += [parameter.grad for parameter in model.parameters()]
            if number + 2 < MICROBATCHES:
                batch = batches[number + 2]
                logits.append(model(batch.token_BS, batch.sequence_info()).logits_BSV)
        return grads

    for number in range(3):
        batches = draw(device)
        for mine, other in zip(step(model, batches), step(plain, batches), strict=True):
            assert torch.equal(mine, other)
        if number == 0:
            pool.capture()
    assert pool.num_graphs == 2 * MICROBATCHES


def test_what_a_step_has_in_other_numbers_is_refused():
    """The number of valid tokens of a step is a constant of the graph."""
    model, pool = build("all losses", "cpu"), GraphPool()
    GraphedBlock(pool, "layers.0", model.layers[0])
    batches = draw("cpu")
    run_step(model, batches)
    pool.capture()
    with pytest.raises(MoeKernelsError, match=rf"scale\.num_tokens = {3 * (2 * SLOTS - 2)}, not {2 * (2 * SLOTS - 2)}"):
        run_step(model, batches[:2])


def test_a_batch_of_another_size_is_refused():
    model, pool = build("plain", "cpu"), GraphPool()
    GraphedBlock(pool, "layers.0", model.layers[0])
    batch = draw("cpu")[0]
    model(batch.token_BS, batch.sequence_info()).logits_BSV.sum().backward()
    pool.capture()
    batch = batch.each(lambda value: value[:1])
    with pytest.raises(MoeKernelsError, match=r"'layers\.0' was captured with x_TD: .* not float32 \(7, 24\)"):
        model(batch.token_BS, batch.sequence_info())


def test_recompute_of_a_graph_is_refused():
    model, pool = build("plain", "cpu", recompute="full"), GraphPool()
    GraphedBlock(pool, "layers.0", model.layers[0])
    batch = draw("cpu")[0]
    model(batch.token_BS, batch.sequence_info()).logits_BSV.square().sum().backward()
    with pytest.raises(MoeKernelsError, match=r"the forward of 'layers\.0' in microbatch 1 has no backward"):
        pool.capture()
