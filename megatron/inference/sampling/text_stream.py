"""The text of a sequence while it is generated, up to the first stop text: a later token never changes what was given
out.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # replaces bytes that are not UTF-8, so also the beginning of a character
_LONGEST_BEGINNING = 3  # bytes of a character that is not complete
_RARE_CHARACTER = "\U0010fffd"  # of no vocabulary, so it is written in bytes where a tokenizer can
_WINDOW_TOKENS = 32


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
        """Adds text to what is kept back; returns what comes before a stop text, or before what may become one."""
        text = self._kept_back + piece
        stops = [(start + len(stop), start, stop) for stop in self._stop_texts if (start := text.find(stop)) >= 0]
        if stops:
            _, start, self.stop_text = min(stops)
            self._kept_back = ""
            return text[:start]
        length = len(text) - max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._kept_back = text[length:]
        return text[:length]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop text."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class IncrementalDecoder:
    """The text of a growing list of tokens, in pieces that add up to `tokenizer.decode` of all of them.

    Two things may change when a token follows: replacement characters at the end, which may be the beginning of a
    character, and, for a tokenizer that gives up a whole run of byte tokens for one that does not fit, the run at the
    end. Both are kept back until they are settled.

    Only the last tokens are decoded. Older ones are dropped after checking that the text of the rest is the same
    without them.

    Args:
        context: tokens before the text, whose own text is not given out. It decides, for example, whether a
            SentencePiece text begins with a space. A character that begins in it and ends in the text is given out.
        window_tokens: how many tokens remain when older ones are dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, window_tokens: int = _WINDOW_TOKENS
    ) -> None:
        self._tokenizer = tokenizer
        self._window_tokens = window_tokens
        self._ids = list(context[-2 * window_tokens :])
        self._probe = _token_that_changes_text(tokenizer)
        text = tokenizer.decode(self._ids) if self._ids else ""
        self._given = self._settled_length(text) if text else 0  # characters
        self.open_context = text[self._given :]  # the end of the context, which the next tokens may change

    def push(self, token: int) -> str:
        """The text that is settled with this token; often none, or more than the token's own."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        piece = self._give(text, max(self._given, self._settled_length(text)))
        if len(self._ids) % (2 * self._window_tokens) == 0:
            self._drop_old_tokens(text)
        return piece

    def flush(self) -> str:
        """The rest of the text, if no token follows."""
        text = self._tokenizer.decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, settled: int) -> str:
        """What becomes certain of `text` up to a place, without the end of the context where that has not changed."""
        piece = text[self._given : settled]
        self._given = settled
        pairs = enumerate(zip(piece, self.open_context, strict=False))
        shorter = min(len(piece), len(self.open_context))
        unchanged = next((place for place, (new, old) in pairs if new != old), shorter)
        self.open_context = self.open_context[unchanged:] if unchanged == len(piece) else ""
        return piece[unchanged:]

    def _settled_length(self, text: str) -> int:
        """How many characters of `text`, the text of the present tokens, no later token changes."""
        if self._probe is None:
            beginning = text[-_LONGEST_BEGINNING:]
            return len(text) - len(beginning) + len(beginning.rstrip(REPLACEMENT))
        changed = self._tokenizer.decode([*self._ids, self._probe])
        pairs = enumerate(zip(text, changed, strict=False))
        length = next((place for place, (old, new) in pairs if old != new), len(text))
        return len(text[:length].rstrip(REPLACEMENT))

    def _drop_old_tokens(self, text: str) -> None:
        """Keeps the last tokens, unless the second half of their text differs without the tokens before them."""
        rest = self._ids[-self._window_tokens :]
        shorter = self._tokenizer.decode(rest)
        dropped, half = len(text) - len(shorter), len(shorter) // 2
        if half > 0 and text[dropped + half :] == shorter[half:] and self._given >= dropped + half:
            self._ids = rest
            self._given -= dropped


def settled_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens without an end that those after them may change: it comes with theirs."""
    decoder = IncrementalDecoder(tokenizer, tokens)
    return tokenizer.decode(tokens).removesuffix(decoder.open_context)


def _token_that_changes_text(tokenizer: Tokenizer) -> int | None:
    """A byte token that changes the text of bytes before it; None if the tokenizer has none.

    The `ByteFallback` decoder of Hugging Face's tokenizers is like that: it replaces every byte of a run of byte tokens
    that is not UTF-8 as a whole.
    """
    ids = tokenizer.encode(_RARE_CHARACTER)
    text = tokenizer.decode(ids)
    return next((token for token in ids if not tokenizer.decode([*ids, token]).startswith(text)), None)
