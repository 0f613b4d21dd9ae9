"""The main job at its real size: what the README promises of it."""

import json

import pytest

from moe_train.cli import main
from moe_train.observe.jsonl import read_jsonl

# The experts of one layer as a single dense one, of the size that a token meets in the recipe: 2 of 8 experts of 128.
# Its one weight is 1, as the two weights of a token add up to one expert each.
SINGLE_EXPERT = [
    "model.num_experts=1",
    "model.router.top_k=1",
    "model.router.scale=1.0",
    "model.expert_features=256",
    "model.balance.aux=0.0",
]


def run(directory, *overrides):
    assert main(["run", "tiny_moe", *overrides, "--run-dir", str(directory)]) == 0
    records = list(read_jsonl(directory / "metrics.jsonl"))
    summary = json.loads((directory / "summary.json").read_text())
    valid = [record["valid_loss"] for record in records if record["record"] == "valid"]
    steps = [record for record in records if record["record"] == "step"]
    return valid[-1], steps, summary


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_demo_learns_more_than_bigrams_and_its_experts_are_worth_having(tmp_path):
    loss, steps, summary = run(tmp_path / "moe")
    assert len(steps) == 200
    assert loss < summary["corpus"]["bigram_nats"] < summary["corpus"]["unigram_nats"]
    assert steps[-1]["dead"] == 0
    assert all(record["drop"] == 0 and not record["skipped"] for record in steps)
    assert len(summary["sample"]["text"]) > 50
    report = (tmp_path / "moe" / "report.html").read_text()
    assert "bits per byte" in report.lower() or "bits/byte" in report
    assert "bigram" in report

    single, _, single_summary = run(tmp_path / "single", *SINGLE_EXPERT)
    assert single_summary["parameters"]["active"] == pytest.approx(summary["parameters"]["active"], rel=0.01)
    assert single > loss + 0.02
