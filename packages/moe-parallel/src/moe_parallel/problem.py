"""`Problem`: one violated rule of a configuration, in a form that a person can act on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A violated rule.

    Attributes:
        key: dotted name of the offending value, for example `parallel.ep`.
        value: the value as given.
        rule: the rule it breaks, with the numbers that enter it.
        legal: legal values here in words, for example `1, 2, 4`; empty where they cannot be listed.
        next_step: what to change, in one sentence; empty where `legal` says it.
    """

    key: str
    value: object
    rule: str
    legal: str = ""
    next_step: str = ""

    def __str__(self) -> str:
        text = f"{self.key} = {self.value!r}: {self.rule}"
        if self.legal:
            text += f"; legal here: {self.legal}"
        if self.next_step:
            text += f". {self.next_step}"
        return text
