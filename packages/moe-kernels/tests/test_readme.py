import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_examples_run_on_their_own(code: str) -> None:
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 6
