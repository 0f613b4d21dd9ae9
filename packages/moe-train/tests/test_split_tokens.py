"""Losses and gradients where ranks share rows, on batches made for a published fault."""

from dataclasses import replace

import pytest
import torch

from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble
from moe_train.config.load import load_config
from moe_train.data.batch import Batch
from moe_train.step import run_step
from moe_train.testing import SMALL, microbatches, short_corpus

pytestmark = pytest.mark.dist

LAYOUTS = {
    "dp4": {},
    "dp2 cp2": {"cp": 2},
    "cp4": {"cp": 4, "cp_kind": "gather"},
    "tp2 dp2": {"tp": 2},
    "tp4": {"tp": 4, "ep": 2},
    "tp2 cp2 whole": {"tp": 2, "cp": 2, "sequence_parallel": False, "etp": 2},
}


def configured(world, parallel, *overrides):
    settings = [
        *SMALL,
        "model.num_experts=8",
        "model.expert_features=12",
        "memory.compute_dtype=float64",
        "kernels.grouped_gemm=loop",
        *(f"parallel.{key}={str(value).lower()}" for key, value in parallel.items()),
        *overrides,
    ]
    return load_config("tiny_moe", [], settings, world=world).config


def first_step(world, parallel, batch, *settings):
    """Loss and whole gradients of one step on a batch, for each of several settings."""
    layout = ParallelLayout(world=world, **{k: v for k, v in parallel.items() if k in ("tp", "cp", "ep", "etp")})

    def on_rank(mesh):
        found = []
        for overrides in settings:
            training = assemble(configured(world, parallel, *overrides), mesh)
            rows = training.share.rows(batch.num_sequences)
            share = batch.rows(rows[0], rows[-1] + 1)
            assert (rows >= 0).all()
            parts = []

            def keep(training=training, parts=parts):
                owned = (part for part in training.engine.gradient_tensors() if part.owned)
                parts.extend((p.name, p.global_shape, p.box, p.tensor.numpy(force=True).copy()) for p in owned)

            found.append(
                (run_step(training, microbatches(training, share), updates=0, window=None, inspect=keep).loss, parts)
            )
        return found

    with short_corpus():
        by_rank = run_distributed(layout, on_rank, timeout_s=20)
    return [
        (ranks[0][0], joined([part for _, parts in ranks for part in parts])) for ranks in zip(*by_rank, strict=True)
    ]


def joined(parts):
    whole = {}
    for name, shape, box, values in parts:
        place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))[place] = torch.from_numpy(values)
    return whole


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert float((found[name] - want).norm()) <= 1e-10 * float(want.norm()) + 1e-18, name


def batch_of(lengths, slots=13, documents=None):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 257, (len(lengths), slots + 1), generator=generator)
    valid_BS = torch.arange(slots) < torch.tensor(lengths)[:, None]
    return Batch.from_rows(tokens[:, :-1].clone(), tokens[:, 1:].clone(), valid_BS, document_BS=documents)


@pytest.mark.parametrize("loss_norm", ["token", "microbatch"])
def test_r007_each_balance_loss_alone_pushes_the_router_alike(loss_norm):
    """The gradient of a coefficient is what the router gets with it, less what it gets without."""
    batch = batch_of([13, 5, 9, 1])
    settings = [
        (f"train.loss_norm={loss_norm}", "train.global_batch_sequences=4", "train.microbatch_sequences=1", *loss)
        for loss in ((), *((f"model.balance.{name}=1.0",) for name in ("aux", "seq", "z")))
    ]

    def pushes(world, parallel):
        (_, without), *others = first_step(world, parallel, batch, *settings)
        name = "layers.1.moe.router.weight"
        return [gradients[name] - without[name] for _, gradients in others]

    expected = pushes(1, {})
    for layout in ("dp2 cp2", "tp2 dp2", "tp2 cp2 whole"):
        for found, want in zip(pushes(4, LAYOUTS[layout]), expected, strict=True):
            assert float(want.norm()) > 1e-3
            assert float((found - want).norm()) <= 1e-10 * float(want.norm()), layout


@pytest.mark.parametrize("lengths", [(13, 13, 13, 13), (13, 1, 0, 6)])
def test_r089_r120_r123_loss_and_gradients_do_not_depend_on_cp(lengths):
    """Of the row with one token every rank but one has nothing; of the empty row all have nothing."""
    batch = batch_of(lengths)
    settings = ("train.global_batch_sequences=4", "train.microbatch_sequences=2", "model.balance.seq=0.1")
    ((loss, expected),) = first_step(1, {}, batch, settings)
    for name in ("dp4", "dp2 cp2", "cp4", "tp4"):
        settings = (*settings[:1], "train.microbatch_sequences=1", *settings[2:])
        ((found, gradients),) = first_step(4, LAYOUTS[name], batch, settings)
        assert found == pytest.approx(loss, rel=1e-10), name
        assert_same(gradients, expected)


def test_r090_r092_documents_of_any_length_in_a_row_equal_rows_of_their_own():
    """[3, 1, 9] in one row, padded to 16 slots, against three rows; the loss per sequence is one per document."""
    numbers = torch.tensor([[0] * 3 + [1] + [2] * 9 + [3] * 3])
    packed = batch_of([13], slots=16, documents=numbers)
    packed = replace(packed, target_mask_BS=packed.target_mask_BS & (torch.arange(16) != 12))
    alone = batch_of([3, 1, 9], slots=16)
    alone = replace(alone, target_mask_BS=torch.zeros_like(alone.valid_BS))
    for row, (start, length) in enumerate(((0, 3), (3, 1), (4, 9))):
        here = slice(start, start + length)
        alone.token_BS[row, :length] = packed.token_BS[0, here]
        alone.target_BS[row, :length] = packed.target_BS[0, here]
        alone.target_mask_BS[row, :length] = packed.target_mask_BS[0, here]
    losses = (
        "model.balance.aux=0",
        "model.balance.seq=0.5",
        "model.balance.z=0.1",
        "train.loss_norm=token",
        "data.sequence_length=16",
    )
    sizes = ("train.global_batch_sequences=3", "train.microbatch_sequences=3")
    ((loss, expected),) = first_step(1, {}, alone, (*losses, *sizes))
    sizes = ("train.global_batch_sequences=1", "train.microbatch_sequences=1")
    for parallel in ({"cp": 4}, {"cp": 4, "cp_kind": "all_to_all"}, {"cp": 2, "tp": 2, "cp_kind": "gather"}):
        ((found, gradients),) = first_step(4, parallel, packed, (*losses, *sizes))
        assert found == pytest.approx(loss, rel=1e-10)
        assert_same(gradients, expected)
