"""dispatch and combine are the six steps in order; configuration needs no torch; the README runs."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import moe_comm
from moe_comm import AllToAllConfig, LocalConfig, combine, dispatch
from moe_parallel import Pending

README = Path(__file__).parents[1] / "README.md"


class Recorder:
    """Each step returns its name applied to what it got."""

    def __getattr__(self, step):
        def call(plan, *values):
            result = f"{step}({', '.join(values)})"
            return Pending.completed(result) if step.startswith("exchange") else result

        return call


def test_dispatch_and_combine_are_three_steps_each():
    assert dispatch(Recorder(), "plan", "x", "probs") == "arrange(exchange(prepare(x, probs)))"
    assert combine(Recorder(), "plan", "rows") == "merge(exchange_return(prepare_return(rows)))"


def test_configuration_does_not_import_torch():
    code = (
        "import sys, moe_comm.config\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("config", [AllToAllConfig, LocalConfig])
def test_configs_are_frozen_and_keyword_only(config):
    with pytest.raises(FrozenInstanceError):
        config().kind = "other"
    with pytest.raises(TypeError):
        config("local")
    assert config.__pydantic_config__ == {"extra": "forbid"}


def test_every_public_name_can_be_reached():
    for name in moe_comm.__all__:
        assert getattr(moe_comm, name) is not None
    assert dir(moe_comm) == sorted(moe_comm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        moe_comm.Nothing  # noqa: B018


def test_the_examples_of_the_readme_run():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
