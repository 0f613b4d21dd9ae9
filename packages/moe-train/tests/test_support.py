"""The matrix of what was verified with what."""

import json

import pytest

from moe_train.cli import main
from moe_train.errors import MoeTrainError
from moe_train.observe.support import VerifyRecord, append_record, read_records, support_matrix
from moe_train.testing import SMALL, short_corpus

ONE = {"tp": 1, "cp": 1, "dp": 1, "etp": 1, "ep": 1, "edp": 1, "engine": "zero1", "microbatch": 2}


def record(holds=True, **choices):
    deviations = {"loss": 1e-16, "gradient": 2e-15, "losses": 3e-16, "state": 4e-15}
    return VerifyRecord(recipe="small", world=4, steps=2, choices=ONE | choices, deviations=deviations, holds=holds)


def cells(text, feature):
    line = next(line for line in text.splitlines() if f" {feature} |" in line.partition("|")[2].partition("|")[0] + "|")
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_cell_counts_the_cases_with_both_features():
    text = support_matrix([record(tp=4), record(tp=2, ep=4), record(ep=4, engine="fsdp"), record(False, tp=4)])
    assert text.startswith("4 cases, 1 beyond the limits.")
    assert cells(text, "tp") == ["3, 1 wrong", "", "", "", ""]
    assert cells(text, "ep") == ["1", "2", "", "", ""]
    assert cells(text, "engine fsdp") == ["", "1", "1", "", ""]
    assert cells(text, "small")[-1] == "4, 1 wrong"
    assert text.count("VIOLATED") == 1
    assert "| small | 4 | tp=2 ep=4 engine=zero1 microbatch=2 | 1.0e-16 | 2.0e-15 | 3.0e-16 | 4.0e-15 | ok |" in text


def test_records_come_back_as_they_were(tmp_path):
    path = tmp_path / "records.jsonl"
    for written in (record(tp=2), record(False, cp=4)):
        append_record(path, written)
    assert read_records(path) == [record(tp=2), record(False, cp=4)]


@pytest.mark.parametrize("content", ["{}", "nothing", '{"recipe": "small"}'])
def test_a_line_that_is_no_record_is_named(content, tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, record())
    path.write_text(path.read_text() + content + "\n")
    with pytest.raises(MoeTrainError, match=r"records.jsonl, line 2, is no record"):
        read_records(path)


def test_files_that_are_missing_or_empty_are_refused(tmp_path, capsys):
    assert main(["support", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert main(["support", str(tmp_path / "empty")]) == 2
    assert "no record" in capsys.readouterr().err
    with pytest.raises(MoeTrainError, match="cannot be added"):
        append_record(tmp_path, record())


@pytest.mark.dist
def test_verify_records_what_support_prints(tmp_path, capsys):
    path = tmp_path / "layouts.jsonl"
    with short_corpus():
        arguments = ["verify", "tiny_moe", *SMALL, "--world", "2", "--steps", "1", "--limit", "2"]
        assert main([*arguments, "--record", str(path)]) == 0
    assert [json.loads(line)["holds"] for line in path.read_text().splitlines()] == [True, True]
    capsys.readouterr()
    assert main(["support", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 cases, 0 beyond the limits")
    assert "loss_norm token" in printed
