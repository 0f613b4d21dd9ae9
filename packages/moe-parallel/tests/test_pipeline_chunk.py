"""SegmentedChunk: the gradients of one backward over the whole, cut into pieces that free what they kept."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_parallel import MoeParallelError
from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.weight_work import WeightWork

# Shape suffixes: B rows, S tokens of a row, D features, V vocabulary.
VOCABULARY, FEATURES = 11, 6


class Tied(nn.Module):
    """Embedding, layers and a head that is the embedding again; a microbatch brings targets and a weight."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, FEATURES, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(num_layers))

    def embed(self, token_BS, context):
        return F.embedding(token_BS, self.embedding)

    def head(self, x_BSD, context):
        return x_BSD @ self.embedding.t()

    @staticmethod
    def loss(logits_BSV, context):
        target_BS, weight = context
        return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten(), reduction="sum") * weight

    def segments(self):
        def layer(module):
            return lambda x_BSD, context: x_BSD + torch.tanh(module(x_BSD))

        return [
            Segment("embedding", ("embedding",), self.embed),
            *(
                Segment(f"layer {n}", (f"layers.{n}.weight", f"layers.{n}.bias"), layer(module))
                for n, module in enumerate(self.layers)
            ),
            Segment("head", (), self.head),
            Segment("loss", (), self.loss),
        ]

    def whole(self, token_BS, context):
        x = token_BS
        for segment in self.segments():
            x = segment.run(x, context)
        return x


@pytest.fixture
def microbatches():
    """Of different lengths: nothing may depend on the shape of the one before."""

    def tokens(rows, length):
        return torch.randint(VOCABULARY, (rows, length))

    return [(tokens(2, n), (tokens(2, n), torch.rand((), dtype=torch.float64))) for n in (5, 1, 7, 3)]


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def expected(model, microbatches):
    model.zero_grad()
    for token_BS, context in microbatches:
        model.whole(token_BS, context).backward()
    found = {name: None if gradient is None else gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return found


ignore = lambda names: None  # noqa: E731


def test_gradients_are_those_of_one_backward(microbatches):
    """Integer input, a parameter in the first and the last segment, several microbatches in flight."""
    model = Tied()
    want = expected(model, microbatches)
    chunk = SegmentedChunk(model.segments(), lambda number: microbatches[number])
    for number in (0, 1, 2):
        chunk.forward(number, None)
    for number in (1, 0, 2):
        chunk.backward(number, None, ignore)
    chunk.forward(3, None)
    chunk.backward(3, None, ignore)
    for name, gradient in gradients(model).items():
        # The two uses of the embedding, and the microbatches, are added up in another order.
        torch.testing.assert_close(gradient, want[name], rtol=1e-13, atol=1e-14)


def test_without_a_shared_parameter_one_microbatch_is_equal_bit_for_bit(microbatches):
    model = Tied()
    model.head = lambda x_BSD, context: x_BSD @ torch.ones(FEATURES, VOCABULARY, dtype=torch.float64).cumsum(0)
    want = expected(model, microbatches[:1])
    chunk = SegmentedChunk(model.segments(), lambda number: microbatches[number])
    chunk.forward(0, None)
    chunk.backward(0, None, ignore)
    assert all(torch.equal(gradient, want[name]) for name, gradient in gradients(model).items())


def test_reports_come_layer_by_layer_from_the_back_when_gradients_are_complete(microbatches):
    model = Tied()
    want = expected(model, microbatches[:1])
    chunk = SegmentedChunk(model.segments(), lambda number: microbatches[number])
    chunk.forward(0, None)
    reports = []

    def report(names):
        reports.append(tuple(names))
        complete = {name for names in reports for name in names}
        for name, gradient in gradients(model).items():
            if name in complete:
                torch.testing.assert_close(gradient, want[name], rtol=1e-13, atol=1e-14)
            elif name != "embedding":  # the head has added its part by now
                assert gradient is None, f"{name} is not reported before its backward"

    chunk.backward(0, None, report)
    assert [names for names in reports if names] == [
        ("layers.2.weight", "layers.2.bias"),
        ("layers.1.weight", "layers.1.bias"),
        ("layers.0.weight", "layers.0.bias"),
        ("embedding",),
    ]


class Kept(torch.autograd.Function):
    """The identity, which keeps one object until its backward is over."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Ballast:
    """What a graph holds on to."""


def test_what_was_kept_is_freed_as_backward_proceeds():
    held = {}

    def segment(number):
        def run(x, context):
            ballast = Ballast()
            held[context, number] = weakref.ref(ballast)
            return Kept.apply(x, ballast).sum() if number == 3 else Kept.apply(x, ballast)

        return Segment(f"segment {number}", (str(number),), run)

    def alive():
        return [key for key, reference in held.items() if reference() is not None]

    chunk = SegmentedChunk([segment(n) for n in range(4)], lambda number: (torch.randn(2), number))
    chunk.forward(0, None)
    chunk.forward(1, None)
    assert len(alive()) == 8
    seen = []
    chunk.backward(0, None, lambda names: seen.append((*names, [n for microbatch, n in alive() if microbatch == 0])))
    assert seen == [("3", [0, 1, 2]), ("2", [0, 1]), ("1", [0]), ("0", [])]
    assert alive() == [(1, n) for n in range(4)], "the other microbatch is in flight"
    chunk.backward(1, None, ignore)
    assert alive() == []


def test_activations_are_freed_as_backward_proceeds():
    """The same for storage: inputs and outputs of segments, which the chunk itself holds."""
    storages = []

    def run(x, context):
        y = x * 2.0
        storages.append(weakref.ref(y.untyped_storage()))
        return y

    segments = [Segment(str(n), (), run) for n in range(3)]
    chunk = SegmentedChunk(
        [*segments, Segment("end", (), lambda x, context: x.sum())], lambda n: (torch.randn(8), None)
    )
    chunk.forward(0, None)
    assert all(reference() is not None for reference in storages)
    seen = []
    chunk.backward(0, None, lambda names: seen.append([reference() is not None for reference in storages]))
    # A segment's output is also what the next one starts from, so it goes with the earlier of the two.
    assert seen == [[True, True, True], [True, True, False], [True, False, False], [False, False, False]]


@pytest.mark.parametrize("frozen", ["embedding", "layers.0", "layers", ""])
def test_parameters_that_are_not_trained(frozen, microbatches):
    model = Tied()
    model.head = lambda x_BSD, context: x_BSD @ torch.ones(FEATURES, VOCABULARY, dtype=torch.float64).cumsum(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    want = expected(model, microbatches)
    chunk = SegmentedChunk(model.segments(), lambda number: microbatches[number])
    reported = []
    for number in range(len(microbatches)):
        chunk.forward(number, None)
        chunk.backward(number, None, reported.extend)
    for name, gradient in gradients(model).items():
        if frozen and name.startswith(frozen):
            assert gradient is None
            assert want[name] is None
        else:
            torch.testing.assert_close(gradient, want[name], rtol=1e-13, atol=1e-14)
    assert len(reported) == len(microbatches) * 7, "whoever reduces gradients hears of every parameter"


def test_behind_a_detached_value_there_is_no_gradient(microbatches):
    model = Tied()
    segments = model.segments()
    segments.insert(2, Segment("stop", (), lambda x_BSD, context: x_BSD.detach()))
    chunk = SegmentedChunk(segments, lambda number: microbatches[number])
    chunk.forward(0, None)
    chunk.backward(0, None, ignore)
    assert [name for name, gradient in gradients(model).items() if gradient is None] == [
        "layers.0.weight",
        "layers.0.bias",
    ], "the embedding has its gradient from the head"


def test_a_chunk_that_does_not_end_in_a_scalar_says_so():
    chunk = SegmentedChunk([Segment("double", (), lambda x, context: x * 2)], lambda number: (torch.randn(3), None))
    with pytest.raises(
        MoeParallelError, match=r"the last segment, double, returns the scalar .* not a tensor of shape \[3\]"
    ):
        chunk.forward(0, None)


def test_a_chunk_in_the_middle_takes_and_gives(microbatches):
    """Cut in three: what one gives is what the next takes, and gradients come back the same way."""
    model = Tied()
    model.head = lambda x_BSD, context: x_BSD @ torch.ones(FEATURES, VOCABULARY, dtype=torch.float64).cumsum(0)
    want = expected(model, microbatches[:1])
    segments = model.segments()
    like = torch.empty(2, 5, FEATURES, dtype=torch.float64)
    first = SegmentedChunk(segments[:2], lambda number: microbatches[number], ends=False)
    middle = SegmentedChunk(segments[2:4], lambda number: (like, microbatches[number][1]), ends=False)
    last = SegmentedChunk(segments[4:], lambda number: (like, microbatches[number][1]))
    x = first.forward(0, None)
    y = middle.forward(0, x)
    assert [x.requires_grad, y.requires_grad] == [False, False], "a stage behind has a graph of its own"
    last.forward(0, y)
    assert last.blank(0, gradient=True).shape == ()
    assert middle.blank(0, gradient=True).shape == y.shape
    gradient = middle.backward(0, last.backward(0, None, ignore), ignore)
    assert gradient.shape == x.shape
    assert first.backward(0, gradient, ignore) is None, "tokens have no gradient"
    assert all(torch.equal(gradient, want[name]) for name, gradient in gradients(model).items())


def test_blanks_tell_shape_and_dtype_and_begin_a_microbatch_once(microbatches):
    begun = []

    def begin(number):
        begun.append(number)
        return torch.empty(2, number + 1, dtype=torch.bfloat16), None

    chunk = SegmentedChunk([Segment("double", (), lambda x, context: x.double() * 2)], begin, ends=False)
    for number in (1, 0, 1):
        blank = chunk.blank(number, gradient=False)
        assert (blank.shape, blank.dtype) == ((2, number + 1), torch.bfloat16)
        assert chunk.blank(number, gradient=True) is None, "not known before the forward"
    chunk.forward(1, torch.ones(2, 2, dtype=torch.bfloat16))
    assert begun == [1, 0]
    assert chunk.blank(1, gradient=True).dtype == torch.float64
    assert chunk.backward(1, torch.ones(2, 2, dtype=torch.float64), ignore).dtype == torch.bfloat16
    assert chunk.blank(1, gradient=True) is None


@pytest.mark.parametrize("split", [True, False])
def test_a_chunk_without_segments_passes_on(split):
    like = torch.empty(3)
    chunk = SegmentedChunk([], lambda number: (like, None), ends=False, weight_work=WeightWork({}))
    x, gradient = torch.randn(3), torch.randn(3)
    assert torch.equal(chunk.forward(0, x), x)
    if split:
        assert torch.equal(chunk.backward_input(0, gradient, ignore), gradient)
        chunk.backward_weight(0, ignore)
    else:
        assert torch.equal(chunk.backward(0, gradient, ignore), gradient)
    with pytest.raises(MoeParallelError, match=r"of which there is none, returns the scalar .* not a .* shape \[3\]"):
        SegmentedChunk([], lambda number: (like, None)).forward(0, x)


def test_without_gradients_nothing_is_kept(microbatches):
    model = Tied()
    chunk = SegmentedChunk(model.segments()[:-1], lambda number: microbatches[number])
    with torch.no_grad():
        logits_BSV = chunk.forward(0, None)
    assert logits_BSV.shape == (2, 5, VOCABULARY), "and a model may end in something else than a scalar"
    assert chunk.blank(0, gradient=True) is None
    with pytest.raises(KeyError):
        chunk.backward(0, None, ignore)


@pytest.mark.parametrize("split", [False, True])
def test_every_part_of_a_pass_is_entered_once(microbatches, split):
    entered = []

    @contextmanager
    def around(kind, name):
        entered.append((kind, name))
        yield
        entered.append(None)

    model = Tied()
    weight_work = WeightWork(dict(model.named_parameters())) if split else None
    chunk = SegmentedChunk(model.segments(), lambda n: microbatches[n], weight_work=weight_work, around=around)
    chunk.forward(0, None)
    if split:
        chunk.backward_input(0, None, lambda names: None)
        chunk.backward_weight(0, lambda names: None)
    else:
        chunk.backward(0, None, lambda names: None)
    names = [segment.name for segment in model.segments()]
    expected = [("forward", name) for name in ("inputs", *names)] + [("backward", name) for name in reversed(names)]
    expected += [("weights", "all layers")] if split else []
    assert entered == [part for place in expected for part in (place, None)]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_fails_says_where(microbatches, kind):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if kind == "forward":
                raise ZeroDivisionError("as it is")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("as it is")

    segments = Tied().segments()
    segments[2] = Segment("broken", segments[2].parameters, lambda x, context: Failing.apply(x))
    chunk = SegmentedChunk(segments, lambda n: microbatches[n])

    def there_and_back():
        chunk.forward(1, None)
        chunk.backward(1, None, lambda names: None)

    with pytest.raises(ZeroDivisionError, match="as it is") as caught:
        there_and_back()
    assert caught.value.__notes__ == [f"in the pass {kind!r} of broken, microbatch 1"]


@pytest.mark.parametrize("first", ["forward", "blank"])
def test_a_microbatch_that_cannot_begin_says_so(first):
    chunk = SegmentedChunk(Tied().segments(), lambda number: 1 // number)
    begin = chunk.forward if first == "forward" else chunk.blank
    with pytest.raises(ZeroDivisionError) as caught:
        begin(0, None)
    assert caught.value.__notes__ == ["in the pass 'forward' of inputs, microbatch 0"]
