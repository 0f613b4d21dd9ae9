"""The cut of parameters into parts, and both orders of a bucket."""

from math import prod

import pytest
import torch

from moe_memory.data_parallel.sections import BucketLayout, cut, inside, owned, shard_box, shard_dim
from moe_parallel import Box

SHAPES = [(), (1,), (5,), (0, 4), (4, 0), (8, 3), (9, 5), (1, 5, 7), (2, 8, 3), (3, 1, 2), (64, 2)]


def index_of(box):
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((8, 3), 4, 0), ((9, 5), 4, 0), ((1, 5, 7), 4, 1), ((2, 3, 7), 4, 2), ((3, 1, 2), 4, 0), ((1, 5, 7), 1, 0)],
)
def test_the_cut_dim_has_an_entry_for_every_rank_if_any_has(shape, ranks, dim):
    """One expert on eight replicas must not lie on one of them."""
    assert shard_dim(shape, ranks) == dim


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_tile_the_parameter_and_the_first_is_the_largest(shape, ranks):
    seen = torch.zeros(shape)
    boxes = [owned(shard_box(shape, ranks, rank), rank) for rank in range(ranks)]
    for box in boxes:
        if box is not None:
            seen[index_of(box)] += 1
            assert prod(box.shape) <= prod(boxes[0].shape)
    assert (seen == 1).all()
    assert boxes[0] is not None
    # Rows as torch's own chunks, so that both engines mean the same part.
    if shape:
        chunks = torch.zeros(shape).chunk(ranks, shard_dim(shape, ranks))
        assert [prod(c.shape) for c in chunks if c.numel()] == [prod(b.shape) for b in boxes if b and prod(b.shape)]


def test_a_box_inside_another_is_moved_by_its_offset():
    assert inside(Box((4, 0, 2), (2, 5, 3)), Box((1, 2, 0), (1, 3, 3))) == Box((5, 2, 2), (1, 3, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_both_orders_hold_every_element_once(ranks):
    layout = BucketLayout({str(number): shape for number, shape in enumerate(SHAPES)}, ranks)
    flat = torch.zeros(layout.whole_elements)
    count = 0
    for number, shape in enumerate(SHAPES):
        values = torch.arange(1 + count, 1 + count + prod(shape), dtype=torch.float32)
        layout.whole(flat, str(number)).copy_(values.view(shape))
        count += prod(shape)
    sections_RS = torch.zeros(ranks, layout.section_elements)
    for whole, section in layout.pairs(flat, sections_RS):
        assert whole.shape == section.shape
        section.copy_(whole)
    assert sorted(sections_RS[sections_RS > 0].tolist()) == list(range(1, count + 1))
    for number, shape in enumerate(SHAPES):
        for rank in range(ranks):
            box = owned(shard_box(shape, ranks, rank), rank)
            if box is not None:
                part = layout.part(sections_RS[rank], str(number), rank)
                assert torch.equal(part, layout.whole(flat, str(number))[index_of(box)])
    if ranks == 1:
        assert torch.equal(sections_RS[0], flat)


def test_parts_begin_and_sections_end_at_whole_vectors():
    layout = BucketLayout({"a": (5, 3), "b": (17,), "c": ()}, 2)
    section_S = torch.zeros(layout.section_elements)
    starts = [layout.part(section_S, name, 0).storage_offset() for name in ("a", "b", "c")]
    assert starts == [0, 16, 32]
    assert layout.section_elements == 48


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, [["a", "b", "c", "d", "e", "f"]]),
        (100, [["a", "b", "d", "e", "f"], ["c"]]),
        (18, [["a", "b", "d", "e"], ["c"], ["f"]]),
        (8, [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
    ],
)
def test_small_parameters_share_buckets_and_large_ones_are_alone(limit, expected):
    sizes = {"a": 3, "b": 4, "c": 50, "d": 4, "e": 4, "f": 4}
    assert cut(list(sizes), sizes, limit) == expected


@pytest.mark.parametrize(
    ("shapes", "ranks", "same", "padded"),
    [
        ([(64, 2)], 4, True, False),
        ([(1, 64, 2)], 4, True, False),
        ([(2, 64)], 4, False, False),  # cut inside rows
        ([(64, 2), (64, 2)], 4, False, False),
        ([(9, 32)], 4, False, True),
        ([(8, 2)], 4, False, True),  # a part fills no vector
        ([(9, 5), ()], 1, True, True),
    ],
)
def test_one_parameter_in_equal_slices_needs_no_copy(shapes, ranks, same, padded):
    layout = BucketLayout({str(number): shape for number, shape in enumerate(shapes)}, ranks)
    assert (layout.same, layout.padded) == (same, padded)
    if same:
        flat = torch.randn(layout.whole_elements)
        for whole, section in layout.pairs(flat, flat.view(ranks, -1)):
            assert whole.data_ptr() == section.data_ptr()
            assert torch.equal(whole, section)
