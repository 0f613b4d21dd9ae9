"""Loading: any layout from any other, exactly; and damage is named and changes nothing."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_memory import OptimConfig, Zero1
from moe_memory.data_parallel import StateTensor
from moe_parallel import AxisGroups, Box, ParameterKind, ShardSpec
from moe_train.checkpoint.format import INDEX, CheckpointError, Index, StoredTensor, read_index
from moe_train.checkpoint.load import load_tensors, verify
from moe_train.checkpoint.save import describe_file, save_checkpoint, write_index, write_shards


def part(name, tensor, offset=None, global_shape=None):
    shape = tuple(tensor.shape)
    return StateTensor(
        name=name, global_shape=global_shape or shape, box=Box(offset or (0,) * len(shape), shape), tensor=tensor
    )


def rows(name, whole, sizes):
    """The tensor cut along dim 0 into parts of these sizes, one per rank."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        part(name, whole[start : start + size], (start, *[0] * (whole.dim() - 1)), tuple(whole.shape))
        for start, size in zip(starts, sizes, strict=True)
    ]


def save_ranks(folder, ranks, *, shard_bytes=2**30):
    """A checkpoint as several ranks write it: the files of each, and one index over all."""
    folder.mkdir()
    tensors, files = {}, {}
    for rank, parts in enumerate(ranks):
        table, written = write_shards(folder, parts, rank=rank, shard_bytes=shard_bytes)
        files |= written
        for name, stored in table.items():
            boxes = tensors[name].boxes if name in tensors else ()
            tensors[name] = StoredTensor(shape=stored.shape, dtype=stored.dtype, boxes=boxes + stored.boxes)
    write_index(folder, Index(tensors=tensors, files=files, state={}))
    return folder


def blank(parts):
    """Targets of the same boxes, full of a number that no test saves."""
    return [
        StateTensor(
            name=p.name, global_shape=p.global_shape, box=p.box, tensor=torch.full_like(p.tensor, 77).contiguous()
        )
        for p in parts
    ]


def gathered(name, parts):
    mine = sorted((p for p in parts if p.name == name), key=lambda p: p.box.offset)
    return torch.cat([p.tensor for p in mine])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_r095_experts_of_two_ranks_load_on_any_number(ranks, tmp_path):
    """Expert e holds e; two files of two experts each; e stays e on 1, 2 and 4 ranks, moments too."""
    experts = torch.arange(4.0).view(4, 1, 1).expand(4, 3, 2).contiguous()
    names = ("master/w1", "exp_avg/w1", "exp_avg_sq/w1")
    wholes = {name: experts + 10 * number for number, name in enumerate(names)}
    saved = [[rows(name, whole, (2, 2))[rank] for name, whole in wholes.items()] for rank in range(2)]
    path = save_ranks(tmp_path / "two", saved)
    assert read_index(path).tensors["master/w1"].shape == (4, 3, 2)
    found = []
    for rank in range(ranks):
        targets = blank([rows(name, whole, (4 // ranks,) * ranks)[rank] for name, whole in wholes.items()])
        load_tensors(path, targets)
        for target in targets:
            first = target.box.offset[0]
            for expert, values in enumerate(target.tensor):
                assert (values == first + expert + 10 * names.index(target.name)).all()
        found += targets
    for name, whole in wholes.items():
        assert torch.equal(gathered(name, found), whole)


@pytest.mark.parametrize("shard_bytes", [1, 2**30])
def test_r098_very_uneven_boxes_2_3_1(shard_bytes, tmp_path):
    """One tensor of 4096 and 20 scalars: saved by 2, loaded by 3, saved by those, loaded by 1."""
    big, scalars = torch.randn(4096, 1), {f"scalar/{i}": torch.randn(()) for i in range(20)}

    def on(sizes, owners):
        ranks = [[piece] for piece in rows("big", big, sizes)]
        for number, (name, value) in enumerate(scalars.items()):
            ranks[owners[number % len(owners)]].append(part(name, value))
        return ranks

    two = save_ranks(tmp_path / "two", on((4090, 6), (1,)), shard_bytes=shard_bytes)
    three = on((0, 1, 4095), (2, 0))
    loaded = []
    for rank in three:
        # Every process names all tensors; those of which it holds nothing are empty boxes, or scalars it holds too.
        others = [part(name, torch.zeros(())) for name in scalars if name not in {p.name for p in rank}]
        targets = blank(rank)
        load_tensors(two, targets + others)
        loaded.append(targets)
    path = save_ranks(tmp_path / "three", loaded, shard_bytes=shard_bytes)
    one = blank([part("big", big), *(part(name, value) for name, value in scalars.items())])
    load_tensors(path, one)
    for target in one:
        assert torch.equal(target.tensor, big if target.name == "big" else scalars[target.name])


def test_boxes_of_several_dims(tmp_path):
    whole = torch.randn(6, 7, 3)
    cuts = [((0, 0, 0), (2, 7, 3)), ((2, 0, 0), (4, 3, 3)), ((2, 3, 0), (4, 4, 1)), ((2, 3, 1), (4, 4, 2))]

    def piece(offset, shape):
        index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        return part("w", whole[index], offset, (6, 7, 3))

    path = save_ranks(tmp_path / "four", [[piece(*cut)] for cut in cuts])
    for wanted in [((1, 2, 0), (4, 3, 2)), ((0, 0, 0), (6, 7, 3)), ((5, 6, 2), (1, 1, 1)), ((3, 3, 3), (2, 2, 0))]:
        (target,) = blank([piece(*wanted)])
        load_tensors(path, [target])
        assert torch.equal(target.tensor, piece(*wanted).tensor)


def test_a_target_may_be_any_view(tmp_path):
    weight = torch.randn(4, 3)
    path = save_checkpoint(tmp_path, 1, [part("w", weight)], {})
    around = torch.full((3, 6), 5.0)
    load_tensors(path, [part("w", around.t()[1:5])])
    assert torch.equal(around.t()[1:5], weight)
    assert (around.t()[0] == 5).all()
    assert (around.t()[5] == 5).all()


@dataclass
class Saved:
    path: Path
    targets: list[StateTensor]

    def refuses(self, match):
        """Loading names this, and every target is as it was, bit for bit. Returns the message."""
        before = [target.tensor.clone() for target in self.targets]
        with pytest.raises(CheckpointError, match=match) as caught:
            load_tensors(self.path, self.targets)
        for target, tensor in zip(self.targets, before, strict=True):
            assert torch.equal(target.tensor, tensor)
        return str(caught.value)

    def shard(self, number=0):
        return self.path / f"rank-00000-{number:05d}.safetensors"

    def rewrite(self, change):
        """Another index with a correct hash: what a wrong program would write, not what a broken disk would."""
        index = change(read_index(self.path))
        (self.path / INDEX).write_text(index.to_json())


@pytest.fixture
def saved(tmp_path):
    tensors = {"master/a": torch.randn(5, 3), "master/b": torch.randn(4), "exp_avg/a": torch.randn(5, 3)}
    parts = [part(name, tensor) for name, tensor in tensors.items()]
    path = save_checkpoint(tmp_path, 1, parts, {"step": 1}, shard_bytes=64)
    assert len(list(path.iterdir())) == 3
    return Saved(path, blank(parts))


def test_an_undamaged_one_loads(saved):
    load_tensors(saved.path, saved.targets)
    assert not any((target.tensor == 77).any() for target in saved.targets)


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_shard(number, saved):
    saved.shard(number).unlink()
    message = saved.refuses(rf"rank-00000-0000{number}\.safetensors is missing")
    assert ("exp_avg/a" in message) == (number == 1)
    assert ("master/a, master/b" in message) == (number == 0)
    with pytest.raises(CheckpointError, match=saved.shard(number).name):
        verify(saved.path)


def test_a_flipped_byte_anywhere_in_a_shard(saved):
    content = saved.shard(1).read_bytes()
    for position in range(len(content)):
        saved.shard(1).write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        saved.refuses(r"rank-00000-00001\.safetensors was changed: its hash is wrong; it holds exp_avg/a")


@pytest.mark.parametrize("length", [0, 1, 9, 60, -1])
def test_a_truncated_shard(length, saved):
    content = saved.shard().read_bytes()
    saved.shard().write_bytes(content[:length])
    saved.refuses(rf"rank-00000-00000\.safetensors has {len(content[:length])} bytes, not {len(content)}; it holds mas")


def test_a_shard_that_grew(saved):
    with saved.shard().open("ab") as file:
        file.write(b"x")
    saved.refuses(r"rank-00000-00000\.safetensors has .* bytes")


def test_a_shard_that_is_a_folder_or_dangling_link(saved):
    saved.shard().unlink()
    saved.shard().symlink_to(saved.path / "nowhere")
    saved.refuses(r"rank-00000-00000\.safetensors is missing")
    saved.shard().unlink()
    saved.shard().mkdir()
    saved.refuses(r"rank-00000-00000\.safetensors")


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04K\x01.", b"{}"])
def test_a_damaged_index(content, saved):
    (saved.path / INDEX).write_bytes(content)
    saved.refuses(r"index\.json")


def test_a_changed_number_in_the_state_of_the_index(saved):
    text = (saved.path / INDEX).read_text()
    (saved.path / INDEX).write_text(text.replace('"step": 1', '"step": 9'))
    saved.refuses(r"index\.json was changed after it was written: its hash is wrong")


def test_another_version(saved):
    content = json.loads((saved.path / INDEX).read_text())
    (saved.path / INDEX).write_text(json.dumps(content | {"version": 99}))
    saved.refuses(r"index\.json has format version 99, this release reads 1")


def replaced(name, **changes):
    def change(index):
        stored = index.tensors[name]
        fields = {"shape": stored.shape, "dtype": stored.dtype, "boxes": stored.boxes} | changes
        return Index(tensors=index.tensors | {name: StoredTensor(**fields)}, files=index.files, state=index.state)

    return change


def test_overlapping_boxes(saved):
    boxes = read_index(saved.path).tensors["master/a"].boxes
    saved.rewrite(replaced("master/a", boxes=boxes * 2))
    saved.refuses(r"index\.json: two boxes of the tensor master/a overlap at \(0, 0\)")


def test_a_gap(saved):
    saved.rewrite(replaced("master/a", shape=(6, 3)))
    saved.refuses(r"index\.json: the boxes of the tensor master/a hold 15 of 18 elements")


def with_file(path, number, content):
    """Replace a shard, and let the index agree."""

    def change(index):
        name = f"rank-00000-{number:05d}.safetensors"
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            save_file(content, path / name)
        return Index(tensors=index.tensors, files=index.files | {name: describe_file(path / name)}, state=index.state)

    return change


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"exp_avg/a": torch.zeros(3, 5)}, r"exp_avg/a is \(3, 5\) torch.float32, the index says \(5, 3\)"),
        ({"exp_avg/a": torch.zeros(5, 3).half()}, "exp_avg/a is .* torch.float16, the index says .* torch.float32"),
        ({"other": torch.zeros(5, 3)}, "exp_avg/a"),
        ({}, "exp_avg/a"),
        (b"not a safetensors file", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_a_shard_that_contradicts_the_index(content, message, saved):
    """Its hash is right, so only the header can tell. The other shard is good, and still nothing is changed."""
    saved.rewrite(with_file(saved.path, 1, content))
    saved.refuses(rf"rank-00000-00001\.safetensors.*{message}")


@pytest.mark.parametrize(("saved_dtype", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_r075_another_dtype_is_refused_and_never_cast(saved_dtype, wanted, tmp_path):
    path = save_checkpoint(tmp_path, 1, [part("exp_avg/w", torch.randn(3, dtype=saved_dtype))], {})
    names = [str(dtype).removeprefix("torch.") for dtype in (saved_dtype, wanted)]
    Saved(path, [part("exp_avg/w", torch.randn(3, dtype=wanted))]).refuses(
        f"exp_avg/w has dtype {names[0]}, this run needs {names[1]}"
    )


def test_r075_moments_in_other_bits_are_named_before_the_scales_that_they_lack(saved):
    scales = part("exp_avg_scale/a", torch.ones(5, 1))
    saved.targets = [*saved.targets[:2], part("exp_avg/a", torch.ones(5, 3, dtype=torch.uint8)), scales]
    saved.refuses(
        "exp_avg/a has dtype float32, this run needs uint8; nothing is converted: .* the dtypes of optim must"
    )


def test_r097_missing_moments_are_named_with_what_may_have_been_meant(saved):
    saved.targets += [part("exp_avg/b", torch.ones(4)), part("exp_avg_sq/a", torch.ones(5, 3))]
    assert "exp_avg_sq/a" in saved.refuses("does not fit this model: it lacks exp_avg/b, exp_avg_sq/a")


def test_a_renamed_tensor_is_named_on_both_sides(saved):
    saved.targets[0] = part("master/aa", torch.ones(5, 3))
    saved.refuses(r"it lacks master/aa \(did you mean master/a\?\); this model lacks master/a")


def test_a_tensor_too_many_is_named(saved):
    saved.targets.pop(1)
    saved.refuses("this model lacks master/b")


def test_another_model_is_described_in_few_words(tmp_path):
    path = save_checkpoint(tmp_path, 1, [part(f"layers.{i}.weight", torch.zeros(1)) for i in range(300)], {})
    targets = [part(f"blocks.{i}.weight", torch.zeros(1)) for i in range(300)]
    assert len(Saved(path, targets).refuses("and 295 more.*and 295 more")) < 900


def test_another_shape_is_refused(saved):
    saved.targets[1] = part("master/b", torch.ones(3))
    saved.refuses(r"master/b has shape \(4,\), this model needs \(3,\)")


def test_a_target_that_is_not_its_box_is_refused(saved):
    saved.targets[1] = StateTensor(name="master/b", global_shape=(4,), box=Box((0,), (4,)), tensor=torch.ones(1))
    saved.refuses(r"the target master/b has shape \(1,\), its box \(4,\)")
    saved.targets[1] = part("master/b", torch.ones(4), (2,), (4,))
    saved.refuses(r"the target master/b at \(2,\) leaves its shape \(4,\)")


def test_files_that_a_rank_does_not_need_are_not_read(tmp_path):
    """At a thousand ranks each reads its own part."""
    whole = torch.randn(4, 2)
    path = save_ranks(tmp_path / "two", [[piece] for piece in rows("w", whole, (2, 2))])
    (path / "rank-00001-00000.safetensors").unlink()
    first, second = blank(rows("w", whole, (2, 2)))
    load_tensors(path, [first])
    assert torch.equal(first.tensor, whole[:2])
    Saved(path, [second]).refuses(r"rank-00001-00000\.safetensors is missing")


def engine_and_model():
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.randn(4, 6, 3))
    model.bias = torch.nn.Parameter(torch.randn(5))
    model.scale = torch.nn.Parameter(torch.randn(()))
    specs = {
        name: ShardSpec(
            name=name, shape=tuple(p.shape), kind=ParameterKind.EXPERT if p.dim() == 3 else ParameterKind.DENSE
        )
        for name, p in model.named_parameters()
    }
    engine = Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.bfloat16)
    engine.wrap(model, specs)
    return engine, model


def train(engine, model, steps):
    for number in range(steps):
        loss = sum((parameter * (number + 1)).square().sum() for parameter in model.parameters())
        loss.backward()
        engine.grads_ready(["w", "bias", "scale"], last=True)
        engine.finish()
        engine.step(0.01, 0.5)


def test_r097_an_engine_continues_bit_for_bit(tmp_path):
    engine, model = engine_and_model()
    train(engine, model, 3)
    path = save_checkpoint(tmp_path, 3, engine.state_tensors(), {"engine": engine.state_values()}, shard_bytes=100)
    train(engine, model, 3)
    other, copy = engine_and_model()
    load_tensors(path, other.state_tensors())
    other.load_finished(read_index(path).state["engine"])
    train(other, copy, 3)
    assert other.state_values() == engine.state_values()
    for mine, theirs in zip(other.state_tensors(), engine.state_tensors(), strict=True):
        assert mine.name == theirs.name
        assert torch.equal(mine.tensor, theirs.tensor)
        assert mine.tensor.any()
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
