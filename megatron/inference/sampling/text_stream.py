"""The text of a sequence while it is generated, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.inference.sampling.incremental_decoder import IncrementalDecoder
from megatron.tokenizers.tokenizer import Tokenizer


class TextStream:
    """Token ids in, pieces of text out: joined, they are the tokens' text up to the first stop text.

    A piece never ends within a character, and never holds a part of a stop text: what may be the beginning of one is
    kept back until the next tokens decide. Where the text is cut does not depend on how it is split into tokens.

    Args:
        stop_texts: the text ends before the first of them; a stop text may begin and end anywhere within tokens. Of
            several, the one that is complete first counts, and of those that end at the same place the longest.
        context: tokens before the text, such as the prompt (see `IncrementalDecoder`).

    Attributes:
        stop_text: the stop text that ended the text; None as long as none did.

    Raises:
        ConfigError: a stop text is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        if "" in stop_texts:
            raise ConfigError("a stop text is empty, so every text would end at once. Leave it out.")
        self.stop_text: str | None = None
        self._stop_texts = tuple(stop_texts)
        self._decoder = IncrementalDecoder(tokenizer, context)
        self._kept_back = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text was met, so that nothing follows."""
        return self.stop_text is not None

    def push(self, token: int) -> str:
        """The text that is certain with this token; empty after a stop text."""
        return "" if self.is_stopped else self._scan(self._decoder.push(token))

    def finish(self) -> str:
        """The rest of the text, if no token follows."""
        if self.is_stopped:
            return ""
        piece = self._scan(self._decoder.flush())
        rest, self._kept_back = self._kept_back, ""
        return piece + rest

    def _scan(self, piece: str) -> str:
        """Adds text to what is kept back; returns what lies before a stop text, or before what may become one."""
        text = self._kept_back + piece
        found = [(start + len(stop), start, stop) for stop in self._stop_texts if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stop_text = min(found)
            self._kept_back = ""
            return text[:start]
        length = len(text) - max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._kept_back = text[length:]
        return text[:length]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop text."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
