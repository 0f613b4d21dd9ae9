"""A run over several ranks: its files, its checkpoints on other layouts, and how it ends when a rank fails."""

import json
import os
import signal
from contextlib import redirect_stdout

import pytest
import torch

from moe_parallel import CollectiveError, MoeParallelError, ParallelLayout, all_gather, run_distributed
from moe_train import loop
from moe_train.assemble import assemble, load_data
from moe_train.checkpoint.load import CheckpointError, latest_checkpoint, read_index, verify
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.data.microbatches import next_step
from moe_train.evaluate import validation_loss
from moe_train.observe.record import WALL_CLOCK_FIELDS
from moe_train.progress import restore
from moe_train.run_directory import RunDirectory
from moe_train.testing import ALL_LOSSES, SMALL, short_corpus

pytestmark = pytest.mark.dist

BASE = (
    "model.num_experts=8",
    "model.expert_features=12",
    *ALL_LOSSES,
    "train.steps=6",
    "train.valid_interval_steps=3",
    "checkpoint.interval_steps=2",
    "checkpoint.keep=9",
    "optim.schedule=constant",  # so that four steps begin as six do
)


def layout_of(world, **degrees):
    return ParallelLayout(world=world, **degrees)


def config_for(layout, *overrides, engine="zero1"):
    degrees = [f"parallel.{axis}={layout.size(axis)}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    settings = [*SMALL, *BASE, *degrees, f"memory.data_parallel={engine}", *overrides]
    return load_config("tiny_moe", [], settings, world=layout.world).config


def directory(path, config):
    return RunDirectory.create(path, config_toml=to_toml(config), command="", environment={})


def train(run, layout, *overrides, engine="zero1", resume=False, before=lambda rank: None):
    """Run to the end in forked ranks; `before(rank)` comes first in each."""
    config = config_for(layout, *overrides, engine=engine)

    def on_rank(mesh):
        before(mesh.rank("world"))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            loop.train(config, run, resume=resume, groups=mesh)

    with short_corpus():
        run_distributed(layout, on_rank, timeout_s=20, limit_s=90, **mesh_of(config, layout))


def metrics(run):
    """Of the training alone: not what is measured, and not how the layout shares out the work and the tokens."""
    left_out = WALL_CLOCK_FIELDS | {"work_balance"}
    lines = map(json.loads, run.metrics.read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in left_out and not k.startswith("comm/")} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same training in one process, without interruption."""
    layout = layout_of(1)
    run = directory(tmp_path_factory.mktemp("alone") / "run", config_for(layout, "memory.compute_dtype=float64"))
    train(run, layout, "memory.compute_dtype=float64")
    return run


def whole_state(path):
    """Every tensor of a checkpoint, joined from its boxes."""
    from safetensors.torch import load_file

    index = verify(path)
    files = {name: load_file(path / name) for name in index.files}
    found = {}
    for name, tensor in index.tensors.items():
        whole = found[name] = torch.full(tensor.shape, torch.nan, dtype=getattr(torch, tensor.dtype))
        for stored in tensor.boxes:
            place = tuple(slice(o, o + n) for o, n in zip(stored.box.offset, stored.box.shape, strict=True))
            whole[place] = files[stored.file][stored.key]
    return found


def assert_close(found, expected, limit):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = (found[name] - want).norm() / want.norm().clamp(min=1e-30)
        assert error <= limit, (name, float(error))


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "cp": 2, "etp": 2, "ep": 2}, {"pp": 2, "ep": 2}])
def test_a_run_over_four_ranks_writes_what_one_process_writes(degrees, tmp_path, alone):
    layout = layout_of(4, **degrees)
    run = directory(tmp_path / "run", config_for(layout, "memory.compute_dtype=float64"))
    train(run, layout, "memory.compute_dtype=float64")
    found, expected = metrics(run), metrics(alone)
    assert len(found) == len(expected) == 8
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == (pytest.approx(value, rel=1e-8) if isinstance(value, float) else value), key
    loads = [json.loads(line)["counts"] for line in run.expert_load.read_text().splitlines()]
    assert loads == [json.loads(line)["counts"] for line in alone.expert_load.read_text().splitlines()]
    path = latest_checkpoint(run.checkpoints)
    assert sorted(read_index(path).files) == [f"rank-{rank:05d}-00000.safetensors" for rank in range(4)]
    assert_close(whole_state(path), whole_state(latest_checkpoint(alone.checkpoints)), 1e-8)
    assert run.report.exists()
    mine, theirs = (json.loads(found.summary.read_text()) for found in (run, alone))
    assert mine["steps"] == 6
    assert mine["sample"] == theirs["sample"]  # the text, of which every rank computes a part


MOVES = {
    "dp4 to ep4": (layout_of(4), "zero1", layout_of(4, ep=4), "zero1"),
    "dp4 to ep2 edp2 with fsdp": (layout_of(4), "zero1", layout_of(4, ep=2), "fsdp"),
    "fsdp on ep2 edp2 to one rank": (layout_of(4, ep=2), "fsdp", layout_of(1), "zero1"),
    "one rank to three": (layout_of(1), "zero1", layout_of(3), "zero1"),
    "ep2 to fsdp on dp4": (layout_of(2, ep=2), "zero1", layout_of(4), "fsdp"),
    "tp2 cp2 with etp2 to ep4 over tp4": (layout_of(4, tp=2, cp=2, etp=2), "zero1", layout_of(4, tp=4, ep=4), "zero1"),
    "fsdp on tp2 to cp4 with etp4": (layout_of(4, tp=2), "fsdp", layout_of(4, cp=4, etp=4), "fsdp"),
    "pp2 to tp2 with fsdp": (layout_of(4, pp=2, ep=2), "zero1", layout_of(2, tp=2), "fsdp"),
    "cp2 to pp2": (layout_of(2, cp=2), "fsdp", layout_of(4, pp=2, tp=2), "zero1"),
    "one rank to tp2": (layout_of(1), "zero1", layout_of(2, tp=2, ep=2), "fsdp"),
}


@pytest.mark.parametrize("move", MOVES)
def test_r095_r097_r098_r101_a_checkpoint_continues_on_another_layout(move, tmp_path, alone):
    """State arrives bit for bit, and six steps end as six steps in one process do."""
    first, first_engine, second, second_engine = MOVES[move]
    double = "memory.compute_dtype=float64"
    run = directory(tmp_path / "run", config_for(first, double, engine=first_engine))
    train(run, first, double, "train.steps=4", engine=first_engine)
    before = whole_state(latest_checkpoint(run.checkpoints))

    def on_rank(mesh):
        training = assemble(config_for(second, double, engine=second_engine), mesh)
        assert restore(training, run).step == 4
        return [(part.name, part.box, part.tensor.numpy(force=True)) for part in training.engine.state_tensors()]

    with short_corpus():
        for parts in run_distributed(second, on_rank, timeout_s=20, **mesh_of(config_for(second), second)):
            for name, box, values in parts:
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                assert torch.equal(torch.from_numpy(values), before[name][place]), name
    train(run, second, double, "train.steps=6", engine=second_engine, resume=True)
    assert_close(
        whole_state(latest_checkpoint(run.checkpoints)), whole_state(latest_checkpoint(alone.checkpoints)), 1e-8
    )


def test_state_moves_between_pipelines_bit_for_bit(tmp_path):
    """Four stages, one process, two ranks with two stages each, and uneven stages; embeddings are tied."""
    model = ("model.num_layers=4", "model.tied_embeddings=true", "train.valid_interval_steps=none")
    moves = [
        (layout_of(4, pp=4), ()),
        (layout_of(1), ()),
        (layout_of(2, pp=2), ("parallel.vpp=2", "parallel.schedule=zero_bubble_v")),
        (layout_of(2, pp=2), ("parallel.vpp=2", "parallel.pipeline=Et|tt||tL")),
        (layout_of(4, pp=4), ("parallel.pipeline=Et*2|t|t|L",)),
    ]
    (first, how), *others = moves
    run = directory(tmp_path / "run", config_for(first, *model, *how))
    train(run, first, *model, *how, "train.steps=2")
    for layout, how in others:
        config = config_for(layout, *model, *how)
        before = whole_state(latest_checkpoint(run.checkpoints))

        def on_rank(mesh, config=config):
            training = assemble(config, mesh)
            restore(training, run)
            return [(part.name, part.box, part.tensor.numpy(force=True)) for part in training.engine.state_tensors()]

        with short_corpus():
            seen = set()
            for parts in run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout)):
                for name, box, values in parts:
                    place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                    assert torch.equal(torch.from_numpy(values), before[name][place]), name
                    seen.add(name)
        assert seen == set(before)
        steps = read_index(latest_checkpoint(run.checkpoints)).state["step"]
        train(run, layout, *model, *how, f"train.steps={steps + 2}", resume=True)


@pytest.mark.parametrize(("engine", "mtp_layers"), [("zero1", 1), ("fsdp", 1), ("fsdp", 0)])
def test_the_weights_that_are_validated_are_those_of_the_last_update(engine, mtp_layers):
    """Also a tied table that is looked up in training alone; what the last update sends may still be on its way."""
    layout = layout_of(4, pp=2)
    model = ("model.tied_embeddings=true", f"model.mtp_layers={mtp_layers}")
    config = config_for(layout, *model, "memory.bucket_mib=0.001", engine=engine)

    def on_rank(mesh):
        training = assemble(config, mesh)
        tokens = next_step(training.data.train, training.cut)
        assert not loop.run_step(training, tokens.microbatches, updates=0, window=None).skipped
        at_once = validation_loss(training, 4)
        training.engine.synchronize()
        return at_once, validation_loss(training, 4)

    with short_corpus():
        losses = run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout))
    assert [at_once for at_once, _ in losses] == [later for _, later in losses]


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
def test_r097_kill_a_rank_and_resume_bit_for_bit(engine, tmp_path):
    layout = layout_of(4, ep=2)
    whole = directory(tmp_path / "whole", config_for(layout, engine=engine))
    train(whole, layout, engine=engine)
    run = directory(tmp_path / "run", config_for(layout, engine=engine))

    def die_in_step_5(rank):
        inner, calls = loop.run_step, []

        def run_step(training, *args, **kwargs):
            calls.append(1)
            if rank == 2 and len(calls) == 5:
                training.engine.finish = lambda: os.kill(os.getpid(), signal.SIGKILL)
            return inner(training, *args, **kwargs)

        loop.run_step = run_step

    with pytest.raises(MoeParallelError, match=r"rank 2 died with exit code -9"):
        train(run, layout, engine=engine, before=die_in_step_5)
    assert latest_checkpoint(run.checkpoints).name == "step-00000004"
    train(run, layout, engine=engine, resume=True)
    assert metrics(run) == metrics(whole)
    mine, theirs = latest_checkpoint(run.checkpoints), latest_checkpoint(whole.checkpoints)
    assert read_index(mine).files == read_index(theirs).files


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    layout = layout_of(2)
    run = directory(tmp_path / "run", config_for(layout))

    def no_space(rank):
        if rank == 1:
            import moe_train.checkpoint.save as save

            def save_file(content, file):
                raise OSError(28, "No space left on device")

            save.save_file = save_file

    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written: .*No space left") as caught:
        train(run, layout, before=no_space)
    assert caught.value.__notes__[0] == "while step 2 was saved"
    assert "raised on rank 1 of 2 (dp=1" in caught.value.__notes__[1]
    assert list(run.checkpoints.iterdir()) == []


def test_a_damaged_file_that_one_rank_needs_stops_all(tmp_path):
    layout = layout_of(2)
    run = directory(tmp_path / "run", config_for(layout))
    train(run, layout)
    file = latest_checkpoint(run.checkpoints) / "rank-00001-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00001-00000.safetensors was changed"):
        train(run, layout, "train.steps=8", resume=True)


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "ep": 4}])
def test_r034_r060_r102_copies_are_the_same_after_steps_and_after_loading(degrees, tmp_path):
    """Bit for bit, over the ranks that hold the same: of data, and of tp for what is not split over it."""
    layout = layout_of(4, **degrees)
    run = directory(tmp_path / "run", config_for(layout))
    train(run, layout)
    split = ("embedding", "head", "_proj.", ".experts.")

    def on_rank(mesh):
        training = assemble(config_for(layout), mesh)
        restore(training, run)
        training.engine.synchronize()
        for name, parameter in training.model.named_parameters():
            group = mesh.group("edp") if ".experts." in name else mesh.group("cp", "dp")
            if not any(part in name for part in split):
                group = mesh.group("tp", "cp", "dp")
            if group is None:
                continue
            copies = all_gather(parameter.detach().reshape(1, -1), group).wait()
            assert bool((copies == copies[0]).all()), name

    with short_corpus():
        run_distributed(layout, on_rank, timeout_s=20)


@pytest.mark.parametrize("degrees", [{}, {"tp": 3}, {"cp": 3}])
@pytest.mark.parametrize("sequences", [1, 2, 4, 7])
def test_r123_validation_of_fewer_sequences_than_ranks(sequences, degrees):
    """Shares of [1, 0, 0], [1, 1, 0], [2, 2, 0] and [3, 3, 1] sequences, and rows that three ranks share."""
    sizes = ("model.num_heads=6", "model.num_kv_heads=3")
    double = "memory.compute_dtype=float64"

    def on_rank(mesh):
        training = assemble(config_for(mesh.layout, double, *sizes), mesh if mesh.layout.world > 1 else None)
        return validation_loss(training, sequences)

    with short_corpus():
        (expected,) = run_distributed(layout_of(1), on_rank)
        found = run_distributed(layout_of(3, **degrees), on_rank, timeout_s=20)
    assert found == [pytest.approx(expected, rel=1e-12)] * 3
    assert len(set(found)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_r101_ranks_share_the_global_order_without_repeat(ranks):
    """Over an epoch's end, where the last batch does not go round."""
    from moe_train.data.share import Share

    def ids(batch):
        return batch.token_index_BS[batch.valid_BS.any(1)][:, 0].tolist()

    with short_corpus():
        config = config_for(layout_of(1), "train.balance_sequences=2", "train.microbatch_sequences=2")
        straight = load_data(config).train
        shares = [load_data(config).train for _ in range(ranks)]
    batches = -(-straight.num_sequences // 8) + 2
    for _ in range(batches):
        whole = straight.next_batch()
        parts = [
            source.next_batch(Share(rank=rank, ranks=ranks, unit=2).rows(whole.num_sequences))
            for rank, source in enumerate(shares)
        ]
        assert len({part.num_sequences for part in parts}) == 1
        assert [i for part in parts for i in ids(part)] == ids(whole)
        tokens = torch.cat([part.token_BS[part.valid_BS.any(1)] for part in parts])
        assert torch.equal(tokens, whole.token_BS[whole.valid_BS.any(1)])
        for part in parts:
            assert not part.valid_BS.any() or part.first_sequence % 2 == 0
    assert all(source.state() == straight.state() for source in shares)


def test_a_sleeping_rank_ends_the_run_and_is_named(tmp_path):
    layout = layout_of(4, ep=2)
    config = config_for(layout)

    def on_rank(mesh):
        training = assemble(config, mesh)
        tokens = next_step(training.data.train, training.cut)
        if mesh.rank("world") == 3:
            signal.pause()
        loop.run_step(training, tokens.microbatches, updates=0, window=None)

    with (
        short_corpus(),
        pytest.raises(CollectiveError, match=r"rank \d: \w+ in group [\w *=]+ of ranks [\d, ]+") as caught,
    ):
        run_distributed(layout, on_rank, timeout_s=2, limit_s=60)
    assert "no report from rank 3" in caught.value.__notes__[0]
