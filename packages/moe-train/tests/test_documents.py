"""Documents in a row: what the data say of them, and that a packed row equals the same documents alone."""

import numpy as np
import pytest
import torch

from moe_kernels.cross_entropy import cross_entropy
from moe_train.data.batch import Batch
from moe_train.data.cuts import cut
from moe_train.data.share import Share
from moe_train.data.source import SequenceSource
from moe_train.scale import LoadWindow, StepScale
from moe_train.testing import ALL_LOSSES, small_config, small_model

END = 9


def source(tokens, length=6, **options):
    array = np.array(tokens, dtype=np.int32)
    cuts = cut(array, "windows", longest=length, end_of_document=END)
    return SequenceSource(array, cuts, row_slots=length, batch_sequences=2, seed=None, **options)


def test_windows_with_their_documents_apart():
    tokens = [1, 2, END, 3, 4, 5, 6, END, END, 7, 8, END, 1]
    batch = source(tokens, end_of_document=END, separate_documents=True).next_batch()
    assert batch.token_BS.tolist() == [[1, 2, END, 3, 4, 5], [6, END, END, 7, 8, END]]
    assert batch.document_BS.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 2]]
    assert batch.position_BS.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 0, 1, 2]]
    # R116: the token that ends a document is a target, and has none itself.
    assert batch.target_mask_BS.tolist() == [[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 0]]
    assert batch.target_BS.tolist() == [[2, END, 0, 4, 5, 6], [END, 0, 0, 8, END, 0]]
    joined = source(tokens).next_batch()
    assert joined.document_BS is None
    assert bool(joined.target_mask_BS.all())
    assert joined.sequence_info().document_BS is None


def test_r115_shares_microbatches_and_devices_keep_documents_and_share_nothing():
    tokens = [1, 2, END, 3, 4, 5, 6, END, END, 7, 8, END, 1]
    whole = source(tokens, end_of_document=END, separate_documents=True).next_batch()
    shares = [
        source(tokens, end_of_document=END, separate_documents=True).next_batch(Share(rank=rank, ranks=3).rows(2))
        for rank in range(3)
    ]
    for part, share in zip(whole.microbatches(1), shares, strict=False):
        for name, value in vars(part.to(torch.device("cpu"))).items():
            assert torch.equal(value, getattr(share, name)), name
    assert not shares[2].valid_BS.any()
    shares[0].target_mask_BS.fill_(False)
    assert source(tokens, end_of_document=END, separate_documents=True).next_batch().target_mask_BS.any()


def test_what_is_predicted_ahead_stays_in_its_document():
    token_BS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    target_BS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 0]])
    document_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    valid_BS = torch.arange(8)[None] < 7
    mask_BS = torch.tensor([[1, 1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    batch = Batch.from_rows(token_BS, target_BS, valid_BS, mask_BS, document_BS=document_BS)
    assert batch.target_mask_BS.tolist() == [[1, 1, 1, 0, 1, 0, 1, 0]]
    one, two, eleven = batch.ahead(1), batch.ahead(2), batch.ahead(11)
    assert one.token_BS.tolist() == [[2, 3, 4, 0, 6, 7, 0, 0]]
    assert (one.target_BS * one.target_mask_BS).tolist() == [[3, 4, 0, 0, 0, 8, 0, 0]]
    assert two.token_BS.tolist() == [[3, 4, 0, 0, 7, 0, 0, 0]]
    assert (two.target_BS * two.target_mask_BS).tolist() == [[4, 0, 0, 0, 8, 0, 0, 0]]
    assert not eleven.target_mask_BS.any()
    assert not eleven.token_BS.any()


def test_r086_targets_ahead_have_counts_of_their_own():
    token_BS = torch.ones(2, 4, dtype=torch.int64)
    mask_BS = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    valid_BS = torch.ones(2, 4, dtype=torch.bool)
    batch = Batch.from_rows(token_BS, token_BS, valid_BS, mask_BS)
    scale = StepScale.count([batch], balance_sequences=1, loss_norm="token", depths=1)
    assert (scale.targets.targets, scale.ahead[0].targets) == (4, 3)
    parts = [scale.microbatch(part, torch.float64) for part in batch.microbatches(1)]
    assert [part.ahead[0].target_weight_T.tolist() for part in parts] == [
        pytest.approx([1 / 3, 1 / 3, 0, 0]),
        pytest.approx([1 / 3, 0, 0, 0]),
    ]
    nothing = Batch.from_rows(token_BS, token_BS, valid_BS, torch.zeros_like(mask_BS))
    for norm in ("token", "microbatch"):
        empty = StepScale.count([nothing], balance_sequences=1, loss_norm=norm, depths=2)
        for depth in empty.microbatch(nothing, torch.float64).ahead:
            assert depth.target_weight_T.tolist() == [0] * 8


@pytest.mark.parametrize("norm", ["token", "microbatch"])
def test_segments_are_documents_with_a_valid_token(norm):
    document_BS = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 1]])
    valid_BS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    tokens = torch.ones(2, 4, dtype=torch.int64)
    batch = Batch.from_rows(tokens, tokens, valid_BS, document_BS=document_BS)
    scale = StepScale.count([batch], balance_sequences=1, loss_norm=norm)
    assert scale.num_segments == 4
    parts = [scale.microbatch(part, torch.float64).routing for part in batch.microbatches(1)]
    first, second = (1 / 4, 1 / 4) if norm == "token" else (1 / 6, 1 / 2)
    assert parts[0].segment_weight_G.tolist() == pytest.approx([first] * 3)
    assert parts[1].segment_weight_G.tolist() == pytest.approx([second, 0])
    assert parts[0].segment_T.tolist() == [0, 0, 1, 2]


def loss_and_gradients(model, batch, balance_sequences, choices=0):
    scale = StepScale.count([batch], balance_sequences=balance_sequences, loss_norm="token", depths=model.depths)
    counts_LE = torch.arange(len(model.routers()) * 8).view(-1, 8) + 1
    window = LoadWindow(counts_LE=counts_LE, num_tokens=50)
    weights = scale.microbatch(batch, torch.float64, window)
    output = model(batch.token_BS, batch.sequence_info(), weights)
    loss_T = cross_entropy(
        output.logits_BSV.flatten(0, 1), batch.target_BS.flatten(), valid_T=batch.target_mask_BS.flatten()
    )
    model.zero_grad()
    loss = (loss_T * weights.target_weight_T).sum()
    loss.backward()
    logits_TV = output.logits_BSV[batch.valid_BS]
    return loss.detach(), logits_TV.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["tiny_qwen3_moe", "tiny_deepseek_v3"])
@pytest.mark.parametrize("window", ["none", "3"])
def test_r092_a_packed_row_equals_the_same_documents_alone(recipe, window):
    """Every loss and every gradient, balance losses and multi-token prediction included, in float64."""
    config = small_config(f"model.sliding_window={window}", *ALL_LOSSES, recipe=recipe).model
    model = small_model(config, 61, torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 1 or "embedding" in name else parameter.shape[-1] ** -0.5)
    lengths = (5, 3, 1, 7)
    documents = [(torch.randint(0, 61, (n,)), torch.randint(0, 61, (n,))) for n in lengths]
    # The last token of a document has no target, in a row of its own neither.
    alone_BS = [
        torch.stack([torch.nn.functional.pad(part[side], (0, 7 - len(part[side]))) for part in documents])
        for side in (0, 1)
    ]
    slot_BS = torch.arange(7)[None]
    length_B1 = torch.tensor(lengths)[:, None]
    alone = Batch.from_rows(*alone_BS, slot_BS < length_B1, slot_BS < length_B1 - 1)
    # Two slots of padding behind them.
    token_BS, target_BS = (
        torch.cat([*(part[side] for part in documents), torch.zeros(2, dtype=torch.int64)])[None] for side in (0, 1)
    )
    document_BS = torch.cat([torch.full((n,), i) for i, n in enumerate((*lengths, 2))])[None]
    packed = Batch.from_rows(token_BS, target_BS, torch.arange(18)[None] < 16, document_BS=document_BS)
    one, two = loss_and_gradients(model, packed, 1), loss_and_gradients(model, alone, 4)
    assert float(one[0]) == pytest.approx(float(two[0]), rel=1e-10)
    assert float((one[1] - two[1]).norm()) <= 1e-10 * float(two[1].norm())
    for name, grad in two[2].items():
        assert float((one[2][name] - grad).norm()) <= 1e-10 * float(grad.norm()), name
        assert float(grad.norm()) > 0, name
