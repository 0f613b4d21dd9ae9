"""Where a long text is cut into sequences. Cuts are ascending: sequence i has the tokens `cut_i <= t < cut_i+1`.

The last token of a text is no input, because nothing follows it; so the last cut is before it.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moe_train.config.tree import SequenceKind

# A sentence ends with one of these bytes and a space, which belongs to it.
_STOPS = np.frombuffer(b".?!", dtype=np.uint8)
_SPACE = ord(" ")


def cut(
    tokens: npt.NDArray[np.int32], sequences: SequenceKind, *, longest: int, end_of_document: int
) -> npt.NDArray[np.int64]:
    """The cuts between sequences of a kind.

    Args:
        tokens: text, one document after the other; of sentences UTF-8 bytes.
        sequences: `windows` have all the same length, whatever is in them, but for the last; `documents` and
            `sentences` have their own, and those that are too long are cut into pieces.
        longest: tokens of a window, or of the longest piece.
        end_of_document: the last token of every document.
    """
    end = tokens.size - 1
    if sequences == "windows":
        return np.append(np.arange(0, end, longest), end)
    ends = tokens == end_of_document
    if sequences == "sentences":
        ends[1:] |= (tokens[1:] == _SPACE) & np.isin(tokens[:-1], _STOPS)
    bound_N = np.unique(np.concatenate(([0], np.flatnonzero(ends) + 1, [end])))
    bound_N = bound_N[bound_N <= end]
    pieces = [np.arange(start, stop, longest) for start, stop in pairwise(bound_N)]
    return np.append(np.concatenate(pieces), end)
