"""Pending: waits once, finishes once, says whether it would wait."""

import pytest

from moe_parallel import MoeParallelError, Pending


class RecordingWork:
    def __init__(self, log, name, completed=False):
        self.log, self.name, self.completed = log, name, completed

    def wait(self):
        self.log.append(self.name)
        self.completed = True

    def is_completed(self):
        return self.completed


def test_a_completed_value_needs_no_waiting():
    pending = Pending.completed(7)
    assert pending.done()
    assert pending.wait() == 7


def test_waits_for_all_work_in_order_and_then_finishes_once():
    log = []

    def finish(value):
        log.append("finish")
        return value + 1

    pending = Pending(1, [RecordingWork(log, "a"), RecordingWork(log, "b")], finish)
    assert not pending.done()
    assert log == [], "nothing is awaited before wait()"
    assert pending.wait() == 2
    assert log == ["a", "b", "finish"]
    assert pending.wait() == 2
    assert log == ["a", "b", "finish"], "the second wait neither waits nor finishes again"
    assert pending.done()


def test_done_needs_every_part():
    log = []
    parts = [RecordingWork(log, "a", completed=True), RecordingWork(log, "b")]
    pending = Pending(0, parts)
    assert not pending.done()
    parts[1].completed = True
    assert pending.done()
    assert log == [], "asking does not wait"


def test_what_failed_is_not_handed_out_by_waiting_again():
    class Failing(RecordingWork):
        def wait(self):
            raise RuntimeError("lost")

    finished = []
    pending = Pending(0, [Failing([], "a")], finished.append)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            pending.wait()
    assert finished == []


def test_what_failed_while_it_was_finished_is_not_handed_out_by_waiting_again():
    """Nor finished once more: what comes next may have begun, and is not begun twice."""
    begun = []

    def finish(value):
        begun.append(value)
        raise RuntimeError("lost")

    pending = Pending(7, [RecordingWork([], "a")], finish)
    with pytest.raises(RuntimeError, match="lost"):
        pending.wait()
    with pytest.raises(MoeParallelError, match="waited for before, and failed"):
        pending.wait()
    assert begun == [7]
