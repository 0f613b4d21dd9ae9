import hashlib
import math

import numpy as np
import pytest
import torch

from moe_train.data import corpus
from moe_train.data.corpus import CORPORA, load_documents
from moe_train.data.cuts import cut
from moe_train.data.entropy import text_entropy
from moe_train.data.source import SequenceSource
from moe_train.data.tokenizer import ByteTokenizer
from moe_train.errors import MoeTrainError


def source(num_tokens=41, length=8, batch=3, seed=0):
    tokens = np.arange(num_tokens, dtype=np.int32)
    return windows(tokens, length=length, batch_sequences=batch, seed=seed)


def windows(tokens, *, length, batch_sequences, seed):
    cuts = cut(tokens, "windows", longest=length, end_of_document=ByteTokenizer.end_of_document)
    return SequenceSource(tokens, cuts, row_slots=length, batch_sequences=batch_sequences, seed=seed)


def sequence_ids(batch):
    return (batch.token_BS[:, 0] // batch.token_BS.shape[1]).tolist()


def test_the_corpus_is_the_stated_one_and_large_enough():
    documents = load_documents("state_of_the_union")
    text = "".join(document + "\n" for document in documents).encode()
    assert hashlib.sha256(text).hexdigest() == CORPORA["state_of_the_union"].sha256
    assert len(text) == CORPORA["state_of_the_union"].size_bytes > 4_000_000
    assert len(documents) == 233
    assert sum("Congress" in document for document in documents) > 200


def test_a_damaged_corpus_is_refused(monkeypatch):
    info = CORPORA["state_of_the_union"]
    changed = {"state_of_the_union": corpus.CorpusInfo(**{**vars(info), "sha256": "0" * 64})}
    monkeypatch.setattr(corpus, "CORPORA", changed)
    with pytest.raises(MoeTrainError, match="not the one that was shipped"):
        load_documents("state_of_the_union")
    with pytest.raises(MoeTrainError, match="unknown corpus 'wiki'; shipped here: state_of_the_union"):
        load_documents("wiki")


def test_r118_every_document_ends_with_exactly_one_end_token():
    tokenizer = ByteTokenizer()
    documents = ["ab", "", "cé"]
    tokens = tokenizer.encode_documents(documents)
    assert tokens.tolist() == [97, 98, 256, 256, 99, 0xC3, 0xA9, 256]
    assert tokens.size == sum(len(document.encode()) + 1 for document in documents)
    assert tokenizer.decode(tokens.tolist()) == "ab\n\ncé\n"
    assert tokenizer.decode([0xC3]) == "�"
    assert tokens.max() < tokenizer.vocab_size


def test_entropies_by_hand():
    # a b a b ...: one bit per token alone, nothing left given the previous token.
    entropy = text_entropy(np.array([0, 1] * 500, dtype=np.int32), 2)
    assert entropy.unigram_nats == pytest.approx(math.log(2))
    assert entropy.bigram_nats == pytest.approx(0, abs=1e-9)
    # Independent uniform tokens: the previous one tells nothing.
    tokens = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.int32)
    assert text_entropy(tokens, 4).bigram_nats == pytest.approx(math.log(4), abs=1e-3)


def test_every_token_but_the_first_is_a_target_once_per_epoch_and_orders_differ():
    reader = source()
    orders = []
    for _ in range(3):
        targets, order = [], []
        for _ in range(2):
            batch = reader.next_batch()
            targets += batch.target_BS[batch.target_mask_BS].tolist()
            order += sequence_ids(batch)
            assert torch.equal(batch.target_BS[batch.valid_BS], batch.token_BS[batch.valid_BS] + 1)
        assert sorted(targets) == list(range(1, 41))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


def test_ragged_ends_lose_nothing():
    reader = source(num_tokens=30, length=8, batch=3, seed=None)  # 29 targets: 3 full windows and one of 5 slots
    first, last = reader.next_batch(), reader.next_batch()
    assert [first.num_sequences, last.num_sequences] == [3, 1]
    assert last.valid_BS.tolist() == [[True] * 5 + [False] * 3]
    assert int(first.target_mask_BS.sum() + last.target_mask_BS.sum()) == 29
    assert int(last.token_BS.max()) < 30


def test_r101_r110_resume_continues_exactly_and_later_epochs_are_whole():
    straight = source(seed=3)
    expected = [sequence_ids(straight.next_batch()) for _ in range(8)]
    for stop in range(8):
        first = source(seed=3)
        found = [sequence_ids(first.next_batch()) for _ in range(stop)]
        second = source(seed=3)
        second.load_state(first.state())
        found += [sequence_ids(second.next_batch()) for _ in range(8 - stop)]
        assert found == expected


def test_a_state_of_other_data_is_refused():
    with pytest.raises(MoeTrainError, match="belongs to other data"):
        source().load_state(source(num_tokens=42).state())
    with pytest.raises(MoeTrainError, match="belongs to other data"):
        source().load_state({"epoch": 0, "position": 0})
    with pytest.raises(MoeTrainError, match="at least 2 tokens"):
        source(num_tokens=1)


def test_r115_masks_of_batches_share_no_storage():
    reader = source(num_tokens=30, length=8, batch=3, seed=None)
    first = reader.next_batch()
    first.target_mask_BS.zero_()
    reader.rewind()
    assert bool(reader.next_batch().target_mask_BS.all())


def test_the_order_is_pinned():
    # Written down so that no change of a library or of this code can move the data of a running training.
    assert sequence_ids(source(num_tokens=129, length=8, batch=16, seed=7).next_batch()) == [
        14,
        11,
        3,
        12,
        0,
        6,
        7,
        9,
        13,
        2,
        10,
        15,
        1,
        4,
        8,
        5,
    ]


def test_r116_the_end_of_a_document_is_a_target_and_only_padding_is_masked():
    end = ByteTokenizer.end_of_document
    tokens = np.array([1, 5, end, 7, end], dtype=np.int32)
    batch = windows(tokens, length=6, batch_sequences=1, seed=None).next_batch()
    assert batch.target_BS[batch.target_mask_BS].tolist() == [5, end, 7, end]
    assert batch.target_mask_BS.tolist() == [[True] * 4 + [False] * 2]
