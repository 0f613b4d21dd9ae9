"""Graphs: values and gradients of replays are those of the plain call, bit for bit, in every order and with any reuse.

Shape legend: T tokens, D features, E experts, K choices, R rows.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from moe_kernels import GroupedExperts, MoeKernelsError, RouterConfig, Routing, route, select_grouped_gemm
from moe_kernels.graphs import GraphedStep, GraphPool, Use, buffer_slots, graph_places
from moe_kernels.graphs.structure import flatten, rebuild
from moe_kernels.permute import permute, permute_probs, row_map, unpermute

T, D = 6, 5


@pytest.fixture(params=["eager", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture
def device(backend):
    return "cuda" if backend == "cuda" else "cpu"


def uses(text):
    """`Fa0 Bb1` is the forward of a in microbatch 0, then the backward of b in microbatch 1."""
    phases = {"F": "forward", "B": "backward"}
    return [Use(word[1], int(word[2:]), phases[word[0]]) for word in text.split()]


class Layers:
    """Two functions, the second of which also returns integers, and a loss over both."""

    def __init__(self, device):
        self.first = nn.Linear(D, D, device=device)
        self.second = nn.Linear(D, D, device=device)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]

    def a(self, x_TD):
        return torch.tanh(self.first(x_TD))

    def b(self, x_TD, factor_T):
        y_TD = self.second(x_TD) * factor_T[:, None]
        return {"y": y_TD.sin(), "best": (y_TD.argmax(-1), "constant")}

    def graphed(self, pool):
        return pool.graphed("a", self.a, self.first), pool.graphed("b", self.b, self.second)

    def loss(self, functions, x_TD, factor_T):
        a, b = functions
        result = b(a(x_TD) * 2, factor_T)
        best_T, constant = result["best"]
        assert constant == "constant"
        return (result["y"] ** 2).sum() + (result["y"].flatten() * best_T.repeat(D)).sum()

    def run(self, functions, microbatches, order):
        """Losses and gradients of a step whose forwards and backwards come in this order, such as `F0 F1 B0 B1`."""
        for parameter in self.parameters:
            parameter.grad = None
        losses, values, inputs = {}, [], {}
        for word in order.split():
            number = int(word[1:])
            if word[0] == "F":
                x_TD, factor_T = microbatches[number]
                inputs[number] = x_TD.detach().clone().requires_grad_()
                losses[number] = self.loss(functions, inputs[number], factor_T)
                values.append(losses[number].detach())
            else:
                losses.pop(number).backward()
        return [*values, *(inputs[number].grad for number in sorted(inputs)), *(p.grad for p in self.parameters)]


def draw(number, device):
    return [
        (torch.randn(T, D, device=device, requires_grad=True), torch.randn(T, device=device)) for _ in range(number)
    ]


def check_steps(layers, graphed, pool, order, device, steps=3):
    """Record, capture, and compare steps with the plain functions."""
    number = order.count("F")
    for step in range(steps):
        microbatches = draw(number, device)
        expected = layers.run((layers.a, layers.b), microbatches, order)
        found = layers.run(graphed, microbatches, order)
        kept = [tensor.clone() for tensor in found]
        if step > 0:
            layers.run(graphed, draw(number, device), order)  # gradients of a step are not those of the next
        for mine, other, now in zip(kept, expected, found, strict=True):
            assert torch.equal(mine, other)
            assert torch.equal(mine, now)
        if step == 0:
            pool.capture()


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    ("order", "graphs"),
    [
        ("F0 B0", 4),
        ("F0 B0 F1 B1 F2 B2", 4),
        ("F0 F1 B0 F2 B1 B2", 12),
        ("F0 F1 B1 B0", 8),
        ("F0 F1 B0 B1 F2 F3 B2 B3", 8),
    ],
)
def test_replays_equal_the_plain_call_bit_for_bit(order, graphs, poison, backend, device):
    layers, pool = Layers(device), GraphPool(backend=backend, poison=poison)
    check_steps(layers, layers.graphed(pool), pool, order, device)
    assert pool.num_graphs == graphs


def test_a_pipeline_has_as_many_buffers_as_microbatches_in_flight(backend, device):
    sizes = {}
    for order in ("F0 B0", "F0 F1 B0 B1", "F0 F1 B0 F2 B1 F3 B2 B3"):
        layers, pool = Layers(device), GraphPool(backend=backend)
        check_steps(layers, layers.graphed(pool), pool, order, device, steps=2)
        sizes[order] = pool.num_bytes
    one, two, four = sizes.values()
    assert one < two < 2 * one, "buffers of gradients are shared"
    assert four == two


@pytest.mark.parametrize(
    ("order", "places"),
    [
        ("Fa0 Ba0 Fa1 Ba1", [0, 1, 0, 1]),
        ("Fa0 Fb0 Bb0 Ba0 Fa1 Fb1 Bb1 Ba1", [0, 1, 2, 3] * 2),
        ("Fa0 Fa1 Ba0 Fa2 Ba1 Ba2", [0, 1, 2, 3, 4, 5]),
        ("Fa0 Ba0 Fb1 Bb1 Fa2 Ba2", [0, 1, 2, 3, 0, 1]),
        ("Fa0 Ba0 Fb0 Bb0", [0, 1, 2, 3]),
        ("Fa3 Fa1 Ba1 Ba3 Fa0 Fa2 Ba2 Ba0", [0, 1, 2, 3] * 2),
    ],
)
def test_uses_share_a_graph_only_where_nothing_else_is_alive(order, places):
    assert graph_places(uses(order)) == places


def test_buffers_of_a_forward_are_its_own_until_its_backward():
    order = uses("Fa0 Fa1 Ba0 Fa2 Ba1 Ba2")
    assert buffer_slots(order) == [0, 1, 0, 0, 0, 0]
    assert buffer_slots(uses("Fa0 Fa1 Ba1 Ba0")) == [0, 1, 0, 0]
    assert buffer_slots(uses("Fa0 Fb0 Bb0 Ba0")) == [0, 0, 0, 0]
    same = {"a": "shape", "b": "shape"}
    assert buffer_slots(uses("Fa0 Fb0 Bb0 Ba0"), same) == [0, 1, 0, 1]
    assert buffer_slots(uses("Fa0 Fb0 Bb0 Ba0"), same, {"b": "a"}) == [0, 1, 0, 0]
    # Two chunks of a pipeline that are never in flight together.
    assert buffer_slots(uses("Fa0 Ba0 Fb0 Bb0"), same) == [0, 0, 0, 1]


def test_no_two_live_uses_have_one_slot():
    """Against random orders: whoever writes a slot finds it dead."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        todo = {(name, m): "forward" for name in "abc" for m in range(4)}
        order = []
        while todo:
            key = sorted(todo)[int(torch.randint(len(todo), (), generator=generator))]
            order.append(Use(*key, todo[key]))
            if todo.pop(key) == "forward":
                todo[key] = "backward"
        slots = buffer_slots(order, dict.fromkeys("abc", "shape"))
        owner = {}
        last = {use.microbatch: place for place, use in enumerate(order)}
        for place, (use, slot) in enumerate(zip(order, slots, strict=True)):
            if use.phase == "forward":
                assert owner.get(("forward", slot)) is None
                owner["forward", slot] = use
            else:
                held = next(
                    s for (kind, s), other in owner.items() if other == Use(use.name, use.microbatch, "forward")
                )
                owner["forward", held] = None
                until = owner.get(("backward", slot), -1)
                assert until < place
                owner["backward", slot] = last[use.microbatch]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("Fa0 Fa0", "the forward of 'a' in microbatch 0 comes twice"),
        ("Ba0", "the backward of 'a' in microbatch 0 comes before its forward"),
        ("Fa0 Fb0 Ba0", "the forward of 'b' in microbatch 0 has no backward"),
    ],
)
def test_an_order_that_is_none_is_refused(order, message):
    with pytest.raises(MoeKernelsError, match=message):
        buffer_slots(uses(order))


def two_readers(pool, device):
    """f and g read one tensor, whose gradient waits for both."""
    f, g = nn.Linear(D, D, device=device), nn.Linear(D, D, device=device)
    graphed = [pool.graphed(name, module.forward, module) for name, module in (("f", f), ("g", g))]

    def gradient(functions, x_TD):
        x_TD = x_TD.clone().requires_grad_()
        y_TD = x_TD * 2
        (functions[0](y_TD) + functions[1](y_TD)).square().sum().backward()
        return x_TD.grad

    return gradient, (f, g), graphed


def test_a_gradient_is_kept_while_a_sum_waits_for_its_other_term(backend, device):
    for read_before, is_right in (({}, True), ({"f": "g", "g": "f"}, False)):
        pool = GraphPool(backend=backend, read_before=read_before)
        gradient, plain, graphed = two_readers(pool, device)
        gradient(graphed, torch.randn(T, D, device=device))
        pool.capture()
        x_TD = torch.randn(T, D, device=device)
        # Who promises what is not so gets what he asked for: the buffers are really shared.
        assert torch.equal(gradient(graphed, x_TD), gradient(plain, x_TD)) == is_right


def test_gradients_of_a_chain_share_buffers_where_the_pool_is_told(backend, device):
    sizes = []
    for read_before in ({}, {"2": "1", "1": "0"}):
        pool = GraphPool(backend=backend, read_before=read_before)
        modules = [nn.Linear(D, D, device=device) for _ in range(3)]
        graphed = [pool.graphed(str(i), module.forward, module) for i, module in enumerate(modules)]
        for step in range(3):
            x_TD, grads = torch.randn(T, D, device=device), []
            for functions in (modules, graphed):
                for module in modules:
                    module.zero_grad()
                y_TD = x_TD.clone().requires_grad_()
                leaf = y_TD
                for function in functions:
                    y_TD = function(y_TD).sin()
                y_TD.sum().backward()
                grads.append([leaf.grad, *(p.grad for module in modules for p in module.parameters())])
            assert all(map(torch.equal, *grads))
            if step == 0:
                pool.capture()
        sizes.append(pool.num_bytes)
    # Two of three buffers with the gradients of x, weight and bias fall away.
    assert sizes[0] - sizes[1] == 2 * 4 * (T * D + D * D + D)


def test_a_parameter_of_two_callables_gets_both_gradients(backend, device):
    tied = nn.Linear(D, D, device=device)
    pool = GraphPool(backend=backend)
    functions = [pool.graphed(name, tied.forward, tied) for name in "ab"]
    for step in range(3):
        x_TD, grads = torch.randn(T, D, device=device), []
        for f, g in ((tied, tied), functions):
            tied.zero_grad()
            g(f(x_TD).sin()).square().sum().backward()
            grads.append(tied.weight.grad)
        assert torch.equal(*grads)
        if step == 0:
            pool.capture()


def captured(backend, device, **options):
    layers, pool = Layers(device), GraphPool(backend=backend, **options)
    graphed = layers.graphed(pool)
    layers.run(graphed, draw(1, device), "F0 B0")
    pool.capture()
    return layers, pool, graphed


def test_autograd_refuses_a_backward_that_would_read_the_values_of_a_later_replay(backend, device):
    layers, _, (a, b) = captured(backend, device)
    [(x_TD, factor_T)] = draw(1, device)
    y_TD = a(x_TD)
    late = y_TD.square().sum()  # keeps y
    b(y_TD * 2, factor_T)["y"].sum().backward()
    layers.run((a, b), draw(1, device), "F0 B0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_poison_shows_who_reads_an_output_too_late(backend, device):
    for poison in (False, True):
        _, _, (a, b) = captured(backend, device, poison=poison)
        [(x_TD, factor_T)] = draw(1, device)
        y_TD = a(x_TD)
        view_TD, before_TD = y_TD.detach().view(-1), y_TD.detach().clone().view(-1)
        result = b(y_TD * 2, factor_T)
        result["y"].sum().backward()
        assert torch.equal(view_TD, before_TD) != poison
        assert bool(view_TD.isnan().all()) == poison
        assert bool((result["best"][0] == torch.iinfo(torch.int64).max).all()) == poison


def test_another_order_is_refused(backend, device):
    layers, pool, (a, b) = captured(backend, device)
    x_TD, factor_T = draw(1, device)[0]
    with pytest.raises(
        MoeKernelsError, match=r"the forward of 'a' in microbatch 0 comes next .* not the forward of 'b'"
    ):
        b(x_TD, factor_T)
    y_TD = a(x_TD)
    with pytest.raises(MoeKernelsError, match=r"the forward of 'b' .* not the backward of 'a' in microbatch 0"):
        y_TD.sum().backward()
    pool.reset()
    check_steps(layers, (a, b), pool, "F0 F1 B0 B1", device)


def test_what_differs_from_the_capture_is_refused_by_name(backend, device):
    layers, _, (a, b) = captured(backend, device)
    x_TD, factor_T = draw(1, device)[0]
    a(x_TD)
    for arguments, message in (
        ((x_TD[:4], factor_T), rf"x_TD: float32 \({T}, {D}\) on {device}.* with gradient, not float32 \(4, {D}\)"),
        ((x_TD, factor_T.double()), r"factor_T: float32 .*, not float64"),
        ((x_TD.detach(), factor_T), "with gradient, not .* without gradient"),
        ((x_TD.to("meta"), factor_T), "x_TD: .* on meta"),
        ((x_TD, 2.0), r"factor_T = tensor 1, not 2\.0"),
        ((x_TD, x_TD), "factor_T = tensor 1, not tensor 0"),
    ):
        with pytest.raises(MoeKernelsError, match=message):
            b(*arguments)
    with pytest.raises(MoeKernelsError, match="gradients are off"), torch.no_grad():
        b(x_TD, factor_T)
    layers.second.eval()
    with pytest.raises(MoeKernelsError, match="training mode of module 0"):
        b(x_TD, factor_T)
    layers.second.train()
    layers.second.weight.requires_grad_(False)
    with pytest.raises(MoeKernelsError, match=r"requires_grad of weight of module 0"):
        b(x_TD, factor_T)
    layers.second.weight.requires_grad_()
    layers.second.bias.data = layers.second.bias.data.clone()
    with pytest.raises(MoeKernelsError, match=r"memory of bias of module 0"):
        b(x_TD, factor_T)


def test_every_form_of_the_recorded_step_has_graphs(backend, device):
    linear, pool = nn.Linear(D, D, device=device), GraphPool(backend=backend)
    graphed = pool.graphed("f", linear.forward, linear)
    for step in range(3):
        for rows in (T, 2, T):
            x_TD = torch.randn(rows, D, device=device)
            y_TD = graphed(x_TD)
            assert torch.equal(y_TD, linear(x_TD))
            y_TD.sum().backward()
        if step == 0:
            pool.capture()
            assert pool.num_graphs == 4


def test_a_parameter_that_was_not_named_is_refused(backend, device):
    layers, pool = Layers(device), GraphPool(backend=backend)
    forgetful = pool.graphed("a", layers.a)
    with pytest.raises(MoeKernelsError, match=rf"reads a tensor of shape \({D},\)|shape \({D}, {D}\)"):
        forgetful(torch.randn(T, D, device=device))


def test_a_step_without_backward_or_record_is_refused(backend, device):
    layers, pool = Layers(device), GraphPool(backend=backend)
    a, _ = layers.graphed(pool)
    with pytest.raises(MoeKernelsError, match="no recorded step"):
        pool.capture()
    a(draw(1, device)[0][0])
    with pytest.raises(MoeKernelsError, match="'a' in microbatch 0 has no backward"):
        pool.capture()
    with pytest.raises(MoeKernelsError, match="another callable of the name 'a'"):
        layers.graphed(pool)


def test_cuda_graphs_are_for_cuda_tensors():
    layers, pool = Layers("cpu"), GraphPool(backend="cuda")
    layers.run(layers.graphed(pool), draw(1, "cpu"), "F0 B0")
    with pytest.raises(MoeKernelsError, match="not on cpu; choose the backend eager"):
        pool.capture()


READS = {
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "bool": (lambda x: x * (1 if x.sum() > 0 else 2), "_local_scalar_dense"),
    "tolist": (lambda x: x * x.sum(0).tolist()[0], "Tensor.tolist"),
    "numpy": (lambda x: x * x.detach().numpy().max(), "Tensor.numpy"),
    "nonzero": (lambda x: x[(x > 0).nonzero()[:, 0]], "nonzero"),
    "mask": (lambda x: x[x > 0], "aten.index.Tensor"),
    "put": (lambda x: x.index_put((x > 0,), x.new_ones(())), "index_put"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: x.sum() * x.unique().shape[0], "unique"),
    "repeat": (lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0), "repeat_interleave"),
    "equal": (lambda x: x * torch.equal(x, x), "equal"),
}


@pytest.mark.parametrize("name", READS)
def test_r082_host_reads_in_what_is_captured_are_refused_by_name(name):
    function, operation = READS[name]
    x_TD = torch.randn(T, D)
    function(x_TD)
    with pytest.raises(MoeKernelsError, match=f"'f' cannot be captured: .*{operation}.* reads values on the host"):
        GraphPool().graphed("f", function)(x_TD)
    with pytest.raises(MoeKernelsError, match=f"the step cannot be captured: .*{operation}"):
        GraphedStep(function)(x_TD)


def test_r082_a_host_read_in_a_backward_is_refused():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    y_TD = GraphPool().graphed("f", Reads.apply)(torch.randn(T, D, requires_grad=True))
    with pytest.raises(MoeKernelsError, match="the backward of 'f' cannot be captured"):
        y_TD.sum().backward()


def test_what_does_not_read_values_is_allowed():
    def function(x_TD):
        y_TD = x_TD[torch.arange(x_TD.shape[0] - 1)].view(-1, D) * len(x_TD)
        repeats_T = torch.arange(T - 1)
        return y_TD.repeat_interleave(2, 0), y_TD.repeat_interleave(repeats_T, 0, output_size=10)

    x_TD = torch.randn(T, D)
    assert all(map(torch.equal, GraphPool().graphed("f", function)(x_TD), function(x_TD)))


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: object


def test_structures_come_together_as_they_were_taken_apart():
    x, y = torch.randn(2), torch.randn(3)
    ids = torch.tensor([[0, 1]])
    routing = Routing(ids_TK=ids, probs_TK=x, num_experts=4, counted=(ids, y))
    value = {"pair": Pair(x, [y, None, ("text", 3)]), "routing": routing}
    flat = flatten({"value": value})
    assert flat.names[:3] == ("value['pair'].left", "value['pair'].right[0]", "value['routing'].ids_TK")
    assert [id(tensor) for tensor in flat.tensors[:3]] == [id(x), id(y), id(ids)]
    again = rebuild(flat.structure, [tensor.clone() for tensor in flat.tensors])["value"]
    assert again["pair"].right[1:] == [None, ("text", 3)]
    assert torch.equal(again["pair"].left, x)
    # By identity: counts that were made of these ids stay theirs.
    assert again["routing"].counts_E() is again["routing"].counted[1]
    assert again["routing"].num_experts == 4


class StaticModel(nn.Module):
    """A router and experts whose rows do not depend on the choices: all fit, the rest are padding."""

    def __init__(self, device):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, D, device=device))
        self.experts = GroupedExperts(4, D, 3, backend=select_grouped_gemm("auto", torch.get_default_dtype(), device))
        self.experts.to(device)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)
        self.register_buffer("load_E", torch.zeros(4, dtype=torch.int64, device=device))

    def forward(self, x_TD):
        routing = route(x_TD @ self.gate.t(), RouterConfig(top_k=2))
        rows = row_map(routing.ids_TK, 4, num_rows=2 * T)
        self.load_E += rows.counts_E
        out_RD = self.experts(permute(x_TD, rows), permute_probs(routing.probs_TK, rows), rows.offsets_E)
        return unpermute(out_RD, rows)


def test_r082_a_whole_step_is_one_graph_where_shapes_are_static(backend, device):
    """Several steps with gradients added up, an update between them, and a counter that the step writes."""
    torch.manual_seed(3)
    plain = StaticModel(device)
    model = StaticModel(device)
    model.load_state_dict(plain.state_dict())

    def step_of(model):
        def step(x_TD, target_TD):
            loss = (model(x_TD) - target_TD).square().mean()
            loss.backward()
            return {"loss": loss, "scale": 2}

        return step

    graphed, addresses = GraphedStep(step_of(model), model, backend=backend), set()
    for _ in range(3):
        for _ in range(2):
            batch = torch.randn(2, T, D, device=device)
            expected, found = step_of(plain)(*batch), graphed(*batch)
            assert torch.equal(found["loss"], expected["loss"])
            assert found["scale"] == 2
            assert not found["loss"].requires_grad
            addresses.add(found["loss"].data_ptr())
        assert torch.equal(model.load_E, plain.load_E)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
            assert other.grad.any()
        with torch.no_grad():
            for parameter in (*plain.parameters(), *model.parameters()):
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad.zero_()
    assert len(addresses) == 1
    with pytest.raises(MoeKernelsError, match=r"argument 1: .*, not float32 \(3, "):
        graphed(batch[0], batch[1, :3])
    model.zero_grad()
    with pytest.raises(MoeKernelsError, match=r"the gradient of module 0\.gate .*set_to_none=False"):
        graphed(*batch)


def test_a_step_that_fails_as_it_warms_up_has_written_nothing():
    linear = nn.Linear(D, D)

    def step(x_TD):
        linear(x_TD).sum().backward()
        return x_TD.sum().item()

    with pytest.raises(MoeKernelsError, match="the step cannot be captured"):
        GraphedStep(step, linear)(torch.randn(T, D))
    assert not linear.weight.grad.any()


def test_the_random_state_after_a_capture_is_that_before():
    torch.manual_seed(5)
    step = GraphedStep(lambda x_TD: torch.dropout(x_TD, 0.5, True))
    x_TD = torch.randn(T, D)
    torch.manual_seed(5)
    expected = [torch.dropout(x_TD, 0.5, True) for _ in range(2)]
    torch.manual_seed(5)
    assert all(torch.equal(step(x_TD), other) for other in expected)
