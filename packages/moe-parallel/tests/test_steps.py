"""Steps: order, state, and that a list can be cut at its exchanges."""

from moe_parallel import Step, StepKind, run_steps


def test_steps_run_in_order_on_one_state():
    steps = [
        Step("double", StepKind.COMPUTE, lambda state: state.update(x=state["x"] * 2)),
        Step("send", StepKind.EXCHANGE, lambda state: state.update(sent=state["x"])),
        Step("add", StepKind.COMPUTE, lambda state: state.update(x=state["sent"] + 1)),
    ]
    state = {"x": 3}
    assert run_steps(steps, state) is state
    assert state == {"x": 7, "sent": 6}
    exchanges = [step.name for step in steps if step.kind is StepKind.EXCHANGE]
    assert exchanges == ["send"]


def test_no_steps_leave_the_state_alone():
    assert run_steps([], "state") == "state"
