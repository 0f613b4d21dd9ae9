"""Every core of context parallelism against LocalAttention on whole rows: output, and gradients of q, k and v."""

import pytest
import torch

from moe_parallel import (
    AllToAllAttention,
    ContextSplit,
    GatherAttention,
    HierarchicalAttention,
    LocalAttention,
    MoeParallelError,
    ParallelLayout,
    RingAttention,
    SequenceInfo,
    context_attention,
    document_numbers,
    join_slots,
    run_distributed,
    select_slots,
    split_context,
)

pytestmark = pytest.mark.dist

KINDS = ["ring", "gather", "all_to_all", "hierarchical"]
RANKS_OF = [(kind, ranks) for kind in KINDS for ranks in (2, 3, 4) if kind in ("ring", "gather") or ranks == 4] + [
    ("all_to_all", 2)
]


def on_ranks(ranks, fn, *, inner=2, **limits):
    """Run `fn(mesh)`; four ranks are two neighbourhoods of two."""
    layout = ParallelLayout(world=ranks, cp=ranks)
    return run_distributed(layout, fn, cp_inner=inner if ranks % inner == 0 else 1, **limits)


def core_of(kind, mesh):
    if kind == "hierarchical":
        return context_attention(kind, inner=mesh.group("cp_inner"), outer=mesh.group("cp_outer"))
    return context_attention(kind)


def info_of(shape, document=None, context=None):
    """Attention reads no more than documents and the split."""
    nothing = torch.zeros(shape, dtype=torch.int64)
    return SequenceInfo(
        position_BS=nothing, token_index_BS=nothing, valid_BS=nothing == 0, document_BS=document, context=context
    )


def inputs(batch, slots, heads=4, kv_heads=4, features=6, value_features=6, dtype=torch.float64):
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(batch * slots + heads + kv_heads + value_features)
    shapes = ((heads, features), (kv_heads, features), (kv_heads, value_features), (heads, value_features))
    return [torch.randn(batch, slots, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def with_gradients(core, q, k, v, grad, info, **options):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = core(q, k, v, info, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def whole_and_split(kind, mesh, whole, document=None, split=None, **options):
    """The same by LocalAttention over whole rows, cut to what this rank holds, and by a core."""
    group, (batch, slots) = mesh.group("cp"), whole[0].shape[:2]
    split = split or split_context(group, batch, slots, document)
    wanted = with_gradients(LocalAttention(), *whole, info_of((batch, slots), document), **options)
    here = [select_slots(x, split, group.rank()) for x in whole]
    document_here = None if document is None else select_slots(document, split, group.rank())
    info = info_of(here[0].shape[:2], document_here, split)
    got = with_gradients(core_of(kind, mesh), *here, info, **options)
    return got, [select_slots(x, split, group.rank()) for x in wanted]


def check(*args, **options):
    got, wanted = whole_and_split(*args, **options)
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


def packed(num_slots, *rows):
    """Rows of documents of these lengths, and one more up to the end of the row, which may be padding."""
    return torch.stack([document_numbers(torch.tensor([0, *lengths]).cumsum(0), num_slots) for lengths in rows])


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_one_document_a_row(kind, ranks):
    def on_rank(mesh):
        check(kind, mesh, inputs(2, ranks * 8))
        check(kind, mesh, inputs(1, ranks * 8), scale=0.7)
        check(kind, mesh, inputs(2, ranks * 2))

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_r090_r092_documents_of_any_length_share_a_row(kind, ranks):
    def on_rank(mesh):
        group = mesh.group("cp")
        slots = ranks * 12
        document = packed(slots, [5, 1, 1, 0, 7, 3], [1, ranks * 9, 2])
        check(kind, mesh, inputs(2, slots), document)
        check(kind, mesh, inputs(2, slots), document, window=3)
        by_row = ContextSplit(group=group, slot_CBS=split_context(group, 2, slots).slot_CBS, document_BR=document)
        check(kind, mesh, inputs(2, slots), document, split=by_row)
        single = torch.arange(slots).expand(1, -1)
        check(kind, mesh, inputs(1, slots), single)  # nobody sees anything but itself
        # Rows this long are cut into tiles.
        check(kind, mesh, inputs(2, ranks * 80, heads=4, kv_heads=2), packed(ranks * 80, [100, 1, 30], [ranks * 79]))

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_windows(kind, ranks):
    def on_rank(mesh):
        for window in (1, 4, 20, 1000):
            check(kind, mesh, inputs(2, ranks * 10), window=window)

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_shared_key_value_heads_and_values_of_another_width(kind, ranks):
    def on_rank(mesh):
        slots = ranks * 6
        for kv_heads in (1, 2):
            check(kind, mesh, inputs(2, slots, heads=8, kv_heads=kv_heads))
        for value_features in (3, 9):
            check(kind, mesh, inputs(1, slots, kv_heads=2, value_features=value_features), packed(slots, [4, 2]))

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_any_split(kind, ranks):
    """One slot on each rank; consecutive slots; slots thrown by chance, other ones in each row."""

    def on_rank(mesh):
        group = mesh.group("cp")
        check(kind, mesh, inputs(2, ranks), split=split_by(group, torch.arange(ranks).expand(2, -1)))
        check(kind, mesh, inputs(2, ranks * 5), split=split_by(group, torch.arange(ranks * 5).expand(2, -1)))
        generator = torch.Generator().manual_seed(3)
        chance = torch.stack([torch.randperm(ranks * 7, generator=generator) for _ in range(3)])
        check(kind, mesh, inputs(3, ranks * 7), split=split_by(group, chance))
        document = packed(ranks * 7, [3, 4, 1], [], [ranks * 7 - 1])
        check(kind, mesh, inputs(3, ranks * 7), document, split=split_by(group, chance, document))

    def split_by(group, order_BR, document=None):
        slot_CBS = order_BR.view(len(order_BR), group.size(), -1).transpose(0, 1).sort(dim=2).values
        return ContextSplit(group=group, slot_CBS=slot_CBS, document_BR=document)

    on_ranks(ranks, on_rank)


@pytest.mark.parametrize(("kind", "ranks"), RANKS_OF)
def test_r089_one_row_over_many_ranks_adds_up_to_the_same_loss_and_gradients(kind, ranks):
    """The sums over ranks, as data parallelism takes them; one rank holds no valid token at all."""

    def on_rank(mesh):
        group = mesh.group("cp")
        slots, real = ranks * 8, 7
        whole = inputs(2, slots)
        split = split_by_place(group, slots)
        weight = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        valid = torch.arange(slots).expand(2, -1) < real
        results = []
        for core, cut in (
            (LocalAttention(), lambda x: x),
            (core_of(kind, mesh), lambda x: select_slots(x, split, group.rank())),
        ):
            q, k, v, target = (cut(x) for x in whole)
            w = weight.clone().requires_grad_()
            context = None if core.__class__ is LocalAttention else split
            out = core(q @ w, k @ w, v @ w, info_of(q.shape[:2], context=context))
            loss = ((out - target) ** 2)[cut(valid)].sum() / (2 * real)
            loss.backward()
            results.append((loss.detach(), w.grad))
        return results, int(select_slots(valid, split, group.rank()).sum())

    def split_by_place(group, slots):
        slot_CBS = torch.arange(slots).view(group.size(), 1, -1).expand(-1, 2, -1)
        return ContextSplit(group=group, slot_CBS=slot_CBS)

    answers = on_ranks(ranks, on_rank)
    (loss, grad), _ = answers[0][0]
    assert [valid for _, valid in answers] == [14] + [0] * (ranks - 1)
    torch.testing.assert_close(sum(split[0] for (_, split), _ in answers), loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(split[1] for (_, split), _ in answers), grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_real_token(kind):
    """Padding at the end of the row; of consecutive slots whole ranks are padding."""

    def on_rank(mesh):
        group = mesh.group("cp")
        whole = inputs(1, 16)
        garbage = [x.clone() for x in whole]
        for x in garbage[:3]:
            x[:, 5:] = 1e3
        garbage[3][:, 5:] = 0
        whole[3][:, 5:] = 0
        slot_CBS = torch.arange(16).view(4, 1, 4)
        for split in (split_context(group, 1, 16), ContextSplit(group=group, slot_CBS=slot_CBS)):
            real = select_slots(torch.arange(16).unsqueeze(0), split, group.rank()) < 5
            got, _ = whole_and_split(kind, mesh, garbage, split=split)
            _, wanted = whole_and_split(kind, mesh, whole, split=split)
            for g, w in zip(got, wanted, strict=True):
                assert g.isfinite().all()
                torch.testing.assert_close(g[real], w[real], rtol=0, atol=1e-12)

    on_ranks(4, on_rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_about_as_good_as_local(kind, dtype):
    def on_rank(mesh):
        group = mesh.group("cp")
        slots = 4 * 16
        document = packed(slots, [20, 1, 13])
        whole = inputs(1, slots, heads=4, kv_heads=2, features=16, value_features=16, dtype=dtype)
        exact = with_gradients(LocalAttention(), *(x.double() for x in whole), info_of((1, slots), document))
        got, local = whole_and_split(kind, mesh, whole, document)
        split = split_context(group, 1, slots, document)
        errors = []
        for g, w, whole_e in zip(got, local, exact, strict=True):
            assert g.dtype == dtype
            e = select_slots(whole_e, split, group.rank())
            errors.append(((g.double() - e).abs().max(), (w.double() - e).abs().max(), e.abs().max()))
        return errors

    for of_rank in zip(*on_ranks(4, on_rank), strict=True):
        error, of_local, size = (torch.stack(part).max() for part in zip(*of_rank, strict=True))
        assert error <= 2 * of_local + 2 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_split_are_attended_to_locally(kind):
    whole = inputs(2, 7)
    group = object()
    core = context_attention(kind, **({"inner": group, "outer": group} if kind == "hierarchical" else {}))
    got, wanted = (with_gradients(c, *whole, info_of((2, 7))) for c in (core, LocalAttention()))
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_a_row_and_tensors_that_need_no_gradient(kind):
    """Twice on one split, so that what was computed once serves both; and k and v from elsewhere, frozen."""

    def on_rank(mesh):
        group = mesh.group("cp")
        whole = inputs(2, 16)
        split = split_context(group, 2, 16)
        core, results = core_of(kind, mesh), []
        for attention, cut, context in (
            (LocalAttention(), lambda x: x, None),
            (core, lambda x: select_slots(x, split, group.rank()), split),
        ):
            q, k, v, grad = (cut(x) for x in whole)
            q.requires_grad_()
            info = info_of(q.shape[:2], context=context)
            out = attention(attention(q, k, v, info), k, v, info)
            results.append([out.detach(), *torch.autograd.grad(out, q, grad)])
        for g, w in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(g, select_slots(w, split, group.rank()), rtol=0, atol=1e-12)

    on_ranks(4, on_rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_peer_is_named_with_the_group(kind):
    def on_rank(mesh):
        group = mesh.group("cp")
        core = core_of(kind, mesh)
        if group.rank() == 2:
            return
        whole = inputs(1, 16)
        split = split_context(group, 1, 16)
        here = [select_slots(x, split, group.rank()) for x in whole[:3]]
        core(*here, info_of(here[0].shape[:2], context=split))

    name = "cp_inner|cp_outer" if kind == "hierarchical" else r"cp = tp \* cp"
    what = {"gather": "all_gather", "all_to_all": "all_to_all", "ring": "shift"}.get(kind, "all_to_all|shift")
    with pytest.raises(MoeParallelError, match=rf"({what}) in group ({name}) of ranks .* failed after"):
        on_ranks(4, on_rank, timeout_s=20)


def test_heads_that_cannot_be_shared_out_are_refused_with_what_could():
    def on_rank(mesh):
        group = mesh.group("cp")
        split = split_context(group, 1, 8)
        q, k, v, _ = inputs(1, 2, heads=6, kv_heads=3)
        with pytest.raises(
            MoeParallelError, match=r"over 4 ranks: .* 6 query heads, .* 3 key/value heads; legal here: 1, 3, 6 ranks"
        ):
            AllToAllAttention()(q, k, v, info_of((1, 2), context=split))
        for core in (RingAttention(), GatherAttention()):
            with pytest.raises(MoeParallelError, match="6 query heads cannot be shared evenly by 4"):
                core(q, torch.cat([k, k[:, :, :1]], 2), v, info_of((1, 2), context=split))
            with pytest.raises(MoeParallelError, match="window of 0"):
                core(q, k, v, info_of((1, 2), context=split), window=0)

    on_ranks(4, on_rank)


def test_groups_of_hierarchical_attention_are_checked():
    def on_rank(mesh):
        split = split_context(mesh.group("cp"), 1, 8)
        q, k, v, _ = inputs(1, 2)
        swapped = HierarchicalAttention(mesh.group("cp_outer"), mesh.group("cp_inner"))
        with pytest.raises(MoeParallelError, match=r"cp_outer of ranks .* are not consecutive ranks of group cp"):
            swapped(q, k, v, info_of((1, 2), context=split))

    on_ranks(4, on_rank)


def test_shards_joined_over_ranks_are_the_whole_output():
    def on_rank(mesh):
        group = mesh.group("cp")
        whole = inputs(2, 8)
        split = split_context(group, 2, 8)
        here = [select_slots(x, split, group.rank()) for x in whole[:3]]
        return split.slot_CBS, RingAttention()(*here, info_of((2, 4), context=split))

    answers = on_ranks(2, on_rank)
    split = ContextSplit(group=None, slot_CBS=answers[0][0])
    wanted = LocalAttention()(*inputs(2, 8)[:3], info_of((2, 8)))
    torch.testing.assert_close(join_slots([out for _, out in answers], split), wanted, rtol=0, atol=1e-12)


def test_names_of_kinds():
    with pytest.raises(MoeParallelError, match="called 'ulysses'; legal here: ring, all_to_all, gather, hierarchical"):
        context_attention("ulysses")
    with pytest.raises(MoeParallelError, match="needs an inner and an outer group"):
        context_attention("hierarchical")
    with pytest.raises(MoeParallelError, match="ring context parallelism has no inner"):
        context_attention("ring", inner=object())
