"""`ByteTokenizer`: UTF-8 bytes as tokens, plus one token that ends a document."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class ByteTokenizer:
    """Token i < 256 is byte i of the UTF-8 encoding; token 256 ends a document."""

    end_of_document = 256
    vocab_size = 257

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a text, int32, without an end-of-document token."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def encode_documents(self, documents: Iterable[str]) -> npt.NDArray[np.int32]:
        """All documents in a row, int32, each followed by exactly one end-of-document token."""
        end = np.array([self.end_of_document], dtype=np.int32)
        parts = [part for document in documents for part in (self.encode(document), end)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, an end of document becomes a newline."""
        raw = bytes(10 if token == self.end_of_document else token for token in tokens)
        return raw.decode("utf-8", errors="replace")
