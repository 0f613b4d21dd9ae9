"""Unigram and bigram entropy of a token sequence: what a model must beat to have learned more than frequencies."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class TextEntropy:
    """Entropies in nats per token.

    Attributes:
        unigram_nats: H(x) = -sum p(x) ln p(x).
        bigram_nats: H(y|x) = -sum p(x, y) ln p(y|x) over neighbouring tokens.
    """

    unigram_nats: float
    bigram_nats: float


def text_entropy(tokens: npt.NDArray[np.int32], vocab_size: int) -> TextEntropy:
    """Empirical entropies of the sequence itself (maximum likelihood, no smoothing); at least two tokens."""
    pairs = np.bincount(
        tokens[:-1].astype(np.int64) * vocab_size + tokens[1:], minlength=vocab_size * vocab_size
    ).reshape(vocab_size, vocab_size)
    return TextEntropy(
        unigram_nats=_entropy(np.bincount(tokens, minlength=vocab_size)),
        bigram_nats=_entropy(pairs) - _entropy(pairs.sum(axis=1)),
    )


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
