"""Recorded choices: forced with another cut, with the weights of now, and errors that name what is missing."""

import pytest
import torch
from torch import Tensor

from moe_kernels import MoeKernelsError, ReplaySlot, RouterConfig, RouterReplay, Routing, route

EXPERTS, TOP_K, TOKENS, MICROBATCHES = 6, 2, 5, 4
CONFIG = RouterConfig(top_k=TOP_K)
LAYERS = ("layers.0", "layers.1")


def logits_of_a_step(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (MICROBATCHES * TOKENS, EXPERTS)
    return {layer: torch.randn(shape, dtype=torch.float64, generator=generator) for layer in LAYERS}


def run(
    replay: RouterReplay, mode: str, cut: int, logits: dict[str, Tensor], valid_T: Tensor | None = None
) -> dict[str, Routing]:
    """A step in execution microbatches of `cut` balance microbatches each; the routings of all tokens, put together."""
    routings: dict[str, list[Routing]] = {layer: [] for layer in LAYERS}
    for first in range(0, MICROBATCHES, cut):
        slot = ReplaySlot(replay=replay, step=7, microbatches=range(first, first + cut), mode=mode)  # type: ignore[arg-type]
        rows = slice(first * TOKENS, (first + cut) * TOKENS)
        for layer in LAYERS:
            valid = None if valid_T is None else valid_T[rows]
            forced_TK = slot.recall(layer, shape=(cut * TOKENS, TOP_K))
            routing = route(logits[layer][rows], CONFIG, ids_TK=forced_TK, valid_T=valid)
            slot.remember(layer, routing.ids_TK)
            routings[layer].append(routing)
    return {
        layer: Routing(
            ids_TK=torch.cat([part.ids_TK for part in parts]),
            probs_TK=torch.cat([part.probs_TK for part in parts]),
            num_experts=EXPERTS,
        )
        for layer, parts in routings.items()
    }


@pytest.mark.parametrize("recorded_in", [1, 2, 4])
@pytest.mark.parametrize("forced_in", [1, 2, 4])
def test_one_cut_is_recorded_and_another_forced(recorded_in: int, forced_in: int) -> None:
    replay = RouterReplay()
    recorded = run(replay, "record", recorded_in, logits_of_a_step(0))
    assert len(replay) == MICROBATCHES * len(LAYERS)
    logits = logits_of_a_step(1)
    free, forced = run(RouterReplay(), "record", 1, logits), run(replay, "force", forced_in, logits)
    for layer in LAYERS:
        assert torch.equal(forced[layer].ids_TK, recorded[layer].ids_TK)
        assert not torch.equal(free[layer].ids_TK, recorded[layer].ids_TK), "another run would choose otherwise"
        assert forced[layer].ids_TK.dtype == torch.int64


def test_weights_and_gradients_are_those_of_now() -> None:
    replay = RouterReplay()
    ids_TK = run(replay, "record", 2, logits_of_a_step(2))["layers.1"].ids_TK
    logits = {layer: tensor.requires_grad_() for layer, tensor in logits_of_a_step(3).items()}
    forced = run(replay, "force", 4, logits)["layers.1"]
    # Normalised weights are a softmax over the chosen logits.
    plain_TK = torch.softmax(logits["layers.1"].gather(1, ids_TK), 1)
    torch.testing.assert_close(forced.probs_TK, plain_TK, rtol=0, atol=1e-12)
    weight_TK = torch.randn_like(plain_TK)
    (got,) = torch.autograd.grad((forced.probs_TK * weight_TK).sum(), logits["layers.1"])
    (want,) = torch.autograd.grad((plain_TK * weight_TK).sum(), logits["layers.1"])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert got.abs().max() > 1e-2


def test_r077_a_near_tie_that_flips_is_repeated() -> None:
    """Logits of two runs differ by rounding, the choices between two equal experts by everything."""
    logits = logits_of_a_step(4)
    for tensor in logits.values():
        tensor[:, 0] = tensor[:, 1] = tensor.amax(1) + 1.0
        tensor[:, 2] = tensor[:, 0]
    nudged = {layer: tensor + torch.tensor([0, 0, 1e-13, 0, 0, 0]) for layer, tensor in logits.items()}
    replay = RouterReplay()
    recorded = run(replay, "record", 1, logits)
    free, forced = run(RouterReplay(), "record", 1, nudged), run(replay, "force", 2, nudged)
    for layer in LAYERS:
        assert recorded[layer].ids_TK.tolist() == [[0, 1]] * (MICROBATCHES * TOKENS)
        assert free[layer].ids_TK.tolist() == [[2, 0]] * (MICROBATCHES * TOKENS)
        assert torch.equal(forced[layer].ids_TK, recorded[layer].ids_TK)


def test_padding_tokens_stay_without_an_expert() -> None:
    valid_T = torch.arange(MICROBATCHES * TOKENS) % 3 > 0
    replay = RouterReplay()
    recorded = run(replay, "record", 1, logits_of_a_step(5), valid_T)
    forced = run(replay, "force", 2, logits_of_a_step(6))  # without the mask: the recording knows
    for layer in LAYERS:
        assert (recorded[layer].ids_TK[~valid_T] == -1).all()
        assert torch.equal(forced[layer].ids_TK, recorded[layer].ids_TK)
        assert not forced[layer].probs_TK[~valid_T].any()


def test_a_forward_pass_may_be_repeated_but_not_changed() -> None:
    replay = RouterReplay()
    ids_TK = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 0]])
    for _ in range(2):
        replay.record(0, range(2), "layers.0", ids_TK)
    replay.record(0, range(1, 2), "layers.0", ids_TK[2:].int())
    changed_TK = ids_TK.clone()
    changed_TK[3, 0] = 2
    with pytest.raises(
        MoeKernelsError, match=r"for step 0, microbatch 1, layer 'layers\.0' already, 1 of 2 tokens differ"
    ):
        replay.record(0, range(2), "layers.0", changed_TK)
    with pytest.raises(MoeKernelsError, match=r"microbatch 0, .* already, 2 tokens with 2 choices; now 4 .* came"):
        replay.record(0, range(1), "layers.0", ids_TK)
    assert torch.equal(replay.choices(0, range(2), "layers.0", device="cpu"), ids_TK)


def test_the_recording_is_a_copy() -> None:
    replay, ids_TK = RouterReplay(), torch.zeros(4, 2, dtype=torch.int16)
    replay.record(0, range(2), "a", ids_TK)
    ids_TK += 1
    assert not replay.choices(0, range(2), "a", device="cpu").any()


@pytest.mark.parametrize(
    ("step", "microbatches", "layer", "message"),
    [
        (1, range(2, 4), "layers.0", r"step 1, microbatch 3, layer 'layers\.0'; .* there are microbatches 0, 1, 2$"),
        (1, range(1), "layers.9", r"step 1, microbatch 0, layer 'layers\.9'; of this step there are layers layers\.0$"),
        (5, range(1), "layers.0", r"step 5, .*; there are steps 1, 2, 3, 4, \.\., 41$"),
    ],
)
def test_what_is_missing_is_named(step: int, microbatches: range, layer: str, message: str) -> None:
    replay = RouterReplay()
    for recorded in (1, 2, 3, 4, 40, 41, 39):
        replay.record(recorded, range(3), "layers.0", torch.zeros(6, 2, dtype=torch.int64))
    with pytest.raises(MoeKernelsError, match="no choices are recorded for " + message):
        replay.choices(step, microbatches, layer, device="cpu")
    with pytest.raises(MoeKernelsError, match="nothing is recorded"):
        RouterReplay().choices(step, microbatches, layer, device="cpu")


def test_other_shapes_are_refused() -> None:
    replay = RouterReplay()
    replay.record(0, range(2), "a", torch.zeros(6, 2, dtype=torch.int64))
    replay.record(0, range(2, 3), "a", torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(MoeKernelsError, match=r"step 0, microbatch 2, layer 'a' are 4 tokens .* but 9 tokens"):
        replay.choices(0, range(3), "a", device="cpu")
    for shape in ((8, 2), (6, 3), (7, 2)):
        with pytest.raises(
            MoeKernelsError, match=rf"microbatch 0, .* 3 tokens with 2 choices, but {shape[0]} tokens with {shape[1]}"
        ):
            replay.choices(0, range(2), "a", device="cpu", shape=shape)
    assert replay.choices(0, range(2), "a", device="cpu", shape=(6, 2)).shape == (6, 2)


@pytest.mark.parametrize(
    ("ids_TK", "microbatches", "message"),
    [
        (torch.zeros(5, 2, dtype=torch.int64), range(2), r"microbatch 0, layer 'a' to microbatch 1 .* not \(5, 2\)"),
        (torch.zeros(4, dtype=torch.int64), range(1), r"not \(4,\)"),
        (torch.zeros(4, 2), range(1), "are integers .* not torch.float32"),
        (torch.zeros(4, 2, dtype=torch.bool), range(1), "are integers .* not torch.bool"),
        (torch.tensor([[0, -2]]), range(1), "-2 among the choices of step 0, microbatch 0, layer 'a'"),
        (torch.tensor([[0, 2**31]]), range(1), "2147483648 among the choices"),
        (torch.zeros(4, 2, dtype=torch.int64), range(0), r"at least one microbatch, .* range\(0, 0\)"),
        (torch.zeros(4, 2, dtype=torch.int64), range(-1, 1), r"counted from 0, .* range\(-1, 1\)"),
    ],
)
def test_what_is_no_recording_is_refused(ids_TK: Tensor, microbatches: range, message: str) -> None:
    with pytest.raises(MoeKernelsError, match=message):
        RouterReplay().record(0, microbatches, "a", ids_TK)


@pytest.mark.parametrize(("largest", "dtype"), [(0, torch.int16), (32767, torch.int16), (32768, torch.int32)])
def test_tensors_are_small_and_stand_alone(largest: int, dtype: torch.dtype) -> None:
    """Each has memory of its own, because safetensors refuses tensors that share it."""
    replay = RouterReplay()
    ids_TK = torch.tensor([[-1, largest], [largest, -1]] * 2)
    replay.record(3, range(12, 14), "blocks/4.router", ids_TK)
    tensors = replay.tensors()
    assert list(tensors) == [f"step-00000003/microbatch-000{place}/blocks/4.router" for place in (12, 13)]
    for tensor in tensors.values():
        assert tensor.dtype == dtype
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    assert torch.equal(replay.choices(3, range(12, 14), "blocks/4.router", device="cpu"), ids_TK)


def test_round_trip_through_tensors() -> None:
    replay = RouterReplay()
    recorded = run(replay, "record", 2, logits_of_a_step(8))
    replay.record(123456789, range(1), "a", torch.empty(0, 2, dtype=torch.int64))
    again = RouterReplay.from_tensors(dict(reversed(replay.tensors().items())))
    assert list(again.tensors()) == list(replay.tensors())
    assert list(again.tensors())[-1] == "step-123456789/microbatch-00000/a"
    assert again.choices(123456789, range(1), "a", device="cpu").shape == (0, 2)
    forced = run(again, "force", 4, logits_of_a_step(9))
    assert all(torch.equal(forced[layer].ids_TK, recorded[layer].ids_TK) for layer in LAYERS)
    for name in ("layers.0", "step-1/layers.0", "step-1/microbatch-x/a", "step-1/microbatch-1/"):
        with pytest.raises(MoeKernelsError, match="is not the name of recorded choices"):
            RouterReplay.from_tensors({name: torch.zeros(1, 1, dtype=torch.int64)})


def test_recordings_of_ranks_are_merged() -> None:
    """Two ranks that share the microbatches and two that share the layers make the recording of one."""
    logits, whole = logits_of_a_step(10), RouterReplay()
    ids = {layer: routing.ids_TK for layer, routing in run(whole, "record", 4, logits).items()}
    merged = RouterReplay()
    for layer in LAYERS:
        for microbatches in (range(2), range(2, 4)):
            rank = RouterReplay()
            rank.record(7, microbatches, layer, ids[layer][microbatches.start * TOKENS : microbatches.stop * TOKENS])
            merged.merge(rank)
    merged.merge(whole)
    got, want = merged.tensors(), whole.tensors()
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    other = RouterReplay()
    other.record(7, range(3, 4), "layers.1", ids["layers.1"][-TOKENS:] ^ 1)
    with pytest.raises(MoeKernelsError, match=r"step 7, microbatch 3, layer 'layers\.1' already, 5 of 5 tokens differ"):
        merged.merge(other)
