"""Dynamic context parallelism: groups of ranks made anew for each microbatch, and the loss is that of one process."""

from collections import Counter
from copy import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from moe_kernels import expert_capacity
from moe_parallel import run_distributed
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import layout_of, mesh_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.data.batch import Batch
from moe_train.data.cuts import cut
from moe_train.data.microbatches import next_step
from moe_train.data.tokenizer import ByteTokenizer
from moe_train.step import run_step
from moe_train.testing import SMALL, STANDARD, short_corpus
from moe_train.verify import Case, verify

END = ByteTokenizer.end_of_document

# Sentences of the text, of very different lengths; every loss that is legal here.
SENTENCES = (
    "data.sequences=sentences",
    "data.sequence_length=64",
    "model.balance.aux=0",
    "model.balance.seq=0.02",
    "model.balance.glob=0.03",
    "model.balance.z=0.01",
    "model.num_experts=8",
    "model.expert_features=12",
)


def settings(world, *overrides, model="tiny_moe"):
    return load_config(model, [], [*STANDARD.get(model, SMALL), *SENTENCES, *overrides], world=world).config


def test_a_text_is_cut_at_its_sentences_and_nothing_is_lost():
    tokens = ByteTokenizer().encode_documents(["One. Two, three? Four", "x.y", "", "Really long sentence!"])
    sentences = cut(tokens, "sentences", longest=9, end_of_document=END)
    text = "One. Two, three? Four\nx.y\n\nReally long sentence!\n"
    pieces = [text[a:b] for a, b in pairwise(sentences)]
    assert pieces == ["One. ", "Two, thre", "e? ", "Four\n", "x.y\n", "\n", "Really lo", "ng senten", "ce!"]
    documents = cut(tokens, "documents", longest=100, end_of_document=END)
    assert [text[a:b] for a, b in pairwise(documents)] == [
        "One. Two, three? Four\n",
        "x.y\n",
        "\n",
        "Really long sentence!",
    ]
    windows = cut(tokens, "windows", longest=20, end_of_document=END)
    assert windows.tolist() == [0, 20, 40, len(text) - 1]


@pytest.mark.parametrize("kind", ["documents", "sentences"])
def test_sequences_of_any_kind_have_every_token_but_the_first_as_a_target_unless_it_follows_an_end(kind):
    with short_corpus():
        data = load_data(settings(1, f"data.sequences={kind}", "train.global_batch_sequences=9"))
    source = data.train
    targets = tokens = 0
    for _ in range(-(-source.num_sequences // 9)):
        lengths = source.next_lengths()
        batch = source.next_batch()
        assert batch.valid_BS.sum(1).tolist() == lengths.tolist()
        assert batch.token_BS.shape[1] == lengths.max()
        assert batch.document_BS is None
        assert not batch.target_mask_BS[batch.token_BS == END].any()
        targets += int(batch.target_mask_BS.sum())
        tokens += int(lengths.sum())
    assert source.state()["epoch"] == 0
    assert tokens == source.state()["num_tokens"] - 1
    ends = tokens - targets
    assert ends == 3  # three of four documents end before the last token of the training text


def test_rows_are_packed_with_their_documents_apart():
    token_BS = torch.arange(1, 19).view(3, 6)
    valid_BS = torch.arange(6) < torch.tensor([2, 0, 5])[:, None]
    rows = Batch.from_rows(token_BS, token_BS + 1, valid_BS, sequence_B=torch.tensor([4, -1, 7]))
    packed = rows.packed([2, 0, 5])
    assert packed.token_BS.tolist() == [[1, 2, 13, 14, 15, 16, 17]]
    assert packed.document_BS.tolist() == [[0, 0, 1, 1, 1, 1, 1]]
    assert packed.position_BS.tolist() == [[0, 1, 0, 1, 2, 3, 4]]
    assert packed.token_index_BS.tolist() == [[24, 25, 42, 43, 44, 45, 46]]
    # What is predicted ahead stays in its row, as it did before.
    for depth in (1, 2):
        alone, together = rows.ahead(depth), packed.ahead(depth)
        for name in ("token_BS", "target_BS", "target_mask_BS"):
            expected = [getattr(alone, name)[row, :length] for row, length in ((0, 2), (2, 5))]
            mask = torch.cat([alone.target_mask_BS[row, :length] for row, length in ((0, 2), (2, 5))])
            found = getattr(together, name)[0]
            assert torch.equal(found[mask], torch.cat(expected)[mask]), name
    assert rows.packed([0, 0, 6]).document_BS is None
    nothing = rows.packed([0, 0, 0])
    assert nothing.token_index_BS.tolist() == [[-1]]
    assert not nothing.valid_BS.any()
    inner = replace(rows, document_BS=torch.tensor([[0, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 1, 2, 2, 2]]))
    assert inner.packed([2, 0, 5]).document_BS.tolist() == [[0, 0, 1, 1, 2, 3, 3]]


def dynamic(world, model="tiny_moe", *overrides, **parallel):
    return settings(
        world,
        f"parallel.dynamic_cp_tokens={64 if world == 1 else 48}",
        *(f"parallel.{key}={value}" for key, value in parallel.items()),
        *overrides,
        model=model,
    )


CASES = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "cp2 fsdp": (2, {"cp": 2}),
    "dp2 ep2": (2, {"ep": 2}),
    "dp4 all-to-all": (4, {"cp_kind": "all_to_all", "ep": 4}),
    "dp2 cp2 gather": (4, {"cp": 2, "cp_kind": "gather", "ep": 2}),
    "tp2 dp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "pp2 dp2": (4, {"pp": 2, "ep": 2, "schedule": "zero_bubble"}),
}


@pytest.mark.parametrize("name", CASES)
def test_r093_the_loss_is_that_of_one_process(name):
    world, parallel = CASES[name]
    model = "tiny_deepseek_v3" if "pp" in name or "gather" in name else "tiny_moe"
    config = dynamic(world, model, **parallel)
    case = Case(
        world=world,
        parallel=config.parallel,
        engine="fsdp" if "fsdp" in name else "zero1",
        microbatch_sequences=1,
    )
    with short_corpus():
        (found,) = verify(config, [case], steps=3, timeout_s=30)
    assert found.holds, found


def test_r093_ranks_make_equally_many_collectives_and_groups_change_between_microbatches():
    config = dynamic(4, "tiny_moe", "parallel.ep=4")
    layout = layout_of(config, 4)

    def on_rank(mesh):
        training = assemble(config, mesh)
        dispatcher = training.model.layers[0].moe.dispatcher
        exchange, calls, sizes = dispatcher.exchange, [], []

        def counted(*arguments):
            calls.append(len(sizes))
            return exchange(*arguments)

        dispatcher.exchange = counted
        for _ in range(4):
            tokens = next_step(training.data.train, training.cut)
            sizes.append([mesh.size(part.axis) for part in tokens.microbatches])
            run_step(training, tokens.microbatches, updates=0, window=None)
        return sizes, Counter(calls)

    with short_corpus():
        ranks = run_distributed(layout, on_rank, timeout_s=30, **mesh_of(config, layout))
    sizes = [rank[0] for rank in ranks]
    assert all([len(step) for step in rank] == [len(step) for step in sizes[0]] for rank in sizes)
    assert len({size for rank in sizes for step in rank for size in step}) > 1
    assert all(rank[1] == ranks[0][1] for rank in ranks)
    # In one microbatch ranks may be in groups of several sizes.
    assert any(len(set(column)) > 1 for step in zip(*sizes, strict=True) for column in zip(*step, strict=True))


def test_r093_the_tokens_of_the_ranks_that_share_rows_compete_for_the_places_of_an_expert():
    config = dynamic(4, "tiny_moe", "model.capacity.factor=0.5", "model.capacity.scope=microbatch")
    layout = layout_of(config, 4)

    def on_rank(mesh):
        training = assemble(config, mesh)
        layer = training.model.layers[0].moe
        plan, route, kept, chosen = layer.dispatcher.plan, layer.router.forward, [], []

        def planned(routing, sizing):
            kept.append(routing.counts_E())
            return plan(routing, sizing)

        def routed(*arguments):
            found = route(*arguments)
            chosen.append(found[0].counts_E())
            return found

        layer.dispatcher = copy(layer.dispatcher)
        layer.dispatcher.plan, layer.router.forward = planned, routed
        tokens = next_step(training.data.train, training.cut)
        run_step(training, tokens.microbatches, updates=0, window=None)
        found = []
        for part, *counts in zip(tokens.microbatches, kept, chosen, strict=True):
            group = mesh.group(part.axis)
            ranks = (mesh.rank("world"),) if group is None else tuple(torch.distributed.get_process_group_ranks(group))
            found.append((ranks, part.batch.token_BS.numel(), *(count.numpy() for count in counts)))
        return found

    with short_corpus():
        ranks = run_distributed(layout, on_rank, timeout_s=30, **mesh_of(config, layout))
    sizes, is_limited = set(), False
    for microbatch in zip(*ranks, strict=True):
        for members, slots, _, _ in microbatch:
            kept, chosen = (sum(microbatch[member][place] for member in members) for place in (2, 3))
            model = config.model
            most = expert_capacity(slots, model.router.top_k, model.num_experts, model.capacity)
            assert (kept == np.minimum(chosen, most)).all()
            sizes.add(len(members))
            is_limited |= (chosen > most).any()
    assert len(sizes) > 1
    assert is_limited


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.balance.aux=0.1", "model.balance.aux = 0.1"),
        ("train.loss_norm=microbatch", 'train.loss_norm = "microbatch"'),
        ("observe.record_choices=true", "observe.record_choices"),
        ("parallel.cp_kind=hierarchical", "parallel.cp_kind"),
        ("data.sequence_length=200", "at most 192"),
        ("parallel.dynamic_cp_tokens=0", "at least one token"),
    ],
)
def test_what_dynamic_context_parallelism_cannot_do_is_said(override, message):
    with pytest.raises(ConfigError, match=message):
        dynamic(4, "tiny_moe", override)
