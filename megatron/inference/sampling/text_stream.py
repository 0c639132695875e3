"""The text of a sequence while it is generated, up to the first stop text; returned text never changes later."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # replaces bytes that are not UTF-8, such as an incomplete character
_LONGEST_BEGINNING = 3  # bytes of an incomplete character
_RARE_CHARACTER = "\U0010fffd"  # in no vocabulary, so that it is encoded in bytes if a tokenizer can
_WINDOW_TOKENS = 32


class TextStream:
    """Decodes token ids to increments of text, up to the first stop text.

    An increment never ends within a character, and never contains a part of a stop text: a possible beginning of one is
    held back until the next tokens decide. The text does not depend on its split into tokens.

    Args:
        stop_texts: the text ends before the first of them; a stop text may begin and end within tokens. Among several,
            the one that is complete first counts, and the longest of those that end together.
        context: tokens before the text, such as the prompt (see `IncrementalDecoder`).

    Attributes:
        stop_text: the stop text that ended the text; None before.

    Raises:
        ConfigError: a stop text is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        if "" in stop_texts:
            raise ConfigError("a stop text is empty, so every text would end at once. Remove it.")
        self.stop_text: str | None = None
        self._stop_texts = tuple(stop_texts)
        self._decoder = IncrementalDecoder(tokenizer, context)
        self._held_back = ""

    @property
    def is_stopped(self) -> bool:
        """True after a stop text."""
        return self.stop_text is not None

    def push(self, token: int) -> str:
        """Adds a token; returns the new text, empty after a stop text."""
        return "" if self.is_stopped else self._scan(self._decoder.push(token))

    def finish(self) -> str:
        """The rest of the text, if no token follows."""
        if self.is_stopped:
            return ""
        text = self._scan(self._decoder.flush())
        rest, self._held_back = self._held_back, ""
        return text + rest

    def _scan(self, addition: str) -> str:
        """Adds text; returns the text before a stop text, or before the possible beginning of one."""
        text = self._held_back + addition
        stops = [(start + len(stop), start, stop) for stop in self._stop_texts if (start := text.find(stop)) >= 0]
        if stops:
            _, start, self.stop_text = min(stops)
            self._held_back = ""
            return text[:start]
        length = len(text) - max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._held_back = text[length:]
        return text[:length]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that is the beginning of a stop text, in characters."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class IncrementalDecoder:
    """Decodes a growing list of tokens in increments that add up to `tokenizer.decode` of all of them.

    A further token may change two things: replacement characters at the end, which may be an incomplete character, and,
    if the tokenizer rejects a run of byte tokens as a whole, the run at the end. Both are held back until settled.

    Only the last tokens are decoded. Older ones are dropped once the text of the rest is the same without them.

    Args:
        context: tokens before the text, whose text is not returned. It determines, for example, if a SentencePiece text
            begins with a space. A character that begins in it and ends in the text is returned.
        window_tokens: number of tokens that remain when older ones are dropped.
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
        self.open_context = text[self._given :]  # the end of the context, if the next tokens may change it

    def push(self, token: int) -> str:
        """Adds a token; returns the newly settled text, which may be empty or exceed the token's text."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        settled = self._release(text, max(self._given, self._settled_length(text)))
        if len(self._ids) % (2 * self._window_tokens) == 0:
            self._drop_old_tokens(text)
        return settled

    def flush(self) -> str:
        """The rest of the text, if no token follows."""
        text = self._tokenizer.decode(self._ids)
        return self._release(text, len(text))

    def _release(self, text: str, settled: int) -> str:
        """The new text up to the index `settled`, without the unchanged end of the context."""
        new = text[self._given : settled]
        self._given = settled
        pairs = enumerate(zip(new, self.open_context, strict=False))
        shorter = min(len(new), len(self.open_context))
        unchanged = next((index for index, (now, before) in pairs if now != before), shorter)
        self.open_context = self.open_context[unchanged:] if unchanged == len(new) else ""
        return new[unchanged:]

    def _settled_length(self, text: str) -> int:
        """The number of characters of the tokens' text that no later token changes."""
        if self._probe is None:
            beginning = text[-_LONGEST_BEGINNING:]
            return len(text) - len(beginning) + len(beginning.rstrip(REPLACEMENT))
        changed = self._tokenizer.decode([*self._ids, self._probe])
        pairs = enumerate(zip(text, changed, strict=False))
        length = next((index for index, (old, new) in pairs if old != new), len(text))
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
    """The text of tokens, without an end that later tokens may change."""
    decoder = IncrementalDecoder(tokenizer, tokens)
    return tokenizer.decode(tokens).removesuffix(decoder.open_context)


def _token_that_changes_text(tokenizer: Tokenizer) -> int | None:
    """A byte token that changes the text of the bytes before it; None if the tokenizer has none.

    With the `ByteFallback` decoder of Hugging Face's tokenizers, every byte is replaced in a run of byte tokens that is
    not UTF-8 as a whole.
    """
    ids = tokenizer.encode(_RARE_CHARACTER)
    text = tokenizer.decode(ids)
    return next((token for token in ids if not tokenizer.decode([*ids, token]).startswith(text)), None)
