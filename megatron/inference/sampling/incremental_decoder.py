"""Token ids in, text out, one token at a time: what is given out is never changed by a later token."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8, so also for the beginning of a character
_LONGEST_BEGINNING = 3  # bytes of a character that is not complete
_RARE_CHARACTER = "\U0010fffd"  # of no vocabulary, so it is written in bytes where a tokenizer can
_WINDOW_TOKENS = 32


class IncrementalDecoder:
    """The text of a growing list of tokens, in pieces that add up to `tokenizer.decode` of all of them.

    Two things may change when a token follows: replacement characters at the end, which may be the beginning of a
    character, and, for a tokenizer that gives up a whole run of byte tokens for one that does not fit, the run at the
    end. Both are kept back until they are settled.

    Only the last tokens are decoded. Older ones are dropped after checking that the text of the rest is the same
    without them.

    Args:
        context: tokens before the text, whose own text is not given out. It decides, for example, whether a
            SentencePiece text begins with a space.
        window_tokens: how many tokens remain when older ones are dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, window_tokens: int = _WINDOW_TOKENS
    ) -> None:
        self._tokenizer = tokenizer
        self._window_tokens = window_tokens
        self._ids = list(context[-2 * window_tokens :])
        self._given = len(tokenizer.decode(self._ids)) if self._ids else 0  # characters
        self._probe = _token_that_changes_text(tokenizer)

    def push(self, token: int) -> str:
        """The text that is settled with this token; often none, or more than the token's own."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        settled = max(self._given, self._settled_length(text))
        piece = text[self._given : settled]
        self._given = settled
        if len(self._ids) % (2 * self._window_tokens) == 0:
            self._drop_old_tokens(text)
        return piece

    def flush(self) -> str:
        """The rest of the text, if no token follows."""
        text = self._tokenizer.decode(self._ids)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _settled_length(self, text: str) -> int:
        """How many characters of `text`, that of the present tokens, no further token changes."""
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


def _token_that_changes_text(tokenizer: Tokenizer) -> int | None:
    """A byte token that changes the text of bytes before it; None if the tokenizer has none.

    The `ByteFallback` decoder of Hugging Face's tokenizers is like that: it replaces every byte of a run of byte tokens
    that is not UTF-8 as a whole.
    """
    ids = tokenizer.encode(_RARE_CHARACTER)
    text = tokenizer.decode(ids)
    return next((token for token in ids if not tokenizer.decode([*ids, token]).startswith(text)), None)
