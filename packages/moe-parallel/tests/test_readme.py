"""The examples of the README run as they stand, in order, in one namespace."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.dist
def test_the_examples_of_the_readme_run():
    text = README.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 3
    namespace = {"__name__": "readme"}
    for block in blocks:
        above = "\n" * text.count("\n", 0, block.start(1))  # so that a failure shows its line of the README
        exec(compile(above + block[1], str(README), "exec"), namespace)
