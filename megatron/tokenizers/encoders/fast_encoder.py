"""Encoding by `gigatoken`, checked to give the ids of `tokenizers`.

Its word cache grows without limit, so the wrapped tokenizer is replaced when the process has grown too much.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE_BYTES = 4096
_MEMORY_FILE = "/proc/self/statm"
_DEFAULT_CACHE_BYTES = 96 << 20
_MANY_TEXTS, _SHORT_TEXT_LETTERS = 4096, 256
_TEXT_PER_CACHE_RATIO = 8  # the cache takes up to 8 bytes per byte of text; used if memory cannot be measured


class FastEncoder:
    """A `gigatoken` tokenizer with a bounded cache.

    Args:
        description: the contents of a tokenizer.json.
        cache_bytes: allowed growth of the process before the tokenizer is replaced (which costs about 0.1 s).
    """

    def __init__(self, description: str, cache_bytes: int = _DEFAULT_CACHE_BYTES) -> None:
        self._description = description
        self._cache_bytes = cache_bytes
        self._renew()

    def encode_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Returns the concatenated ids of all texts, and the number of ids of each; runs in the calling thread."""
        letters = sum(map(len, texts))
        if len(texts) >= _MANY_TEXTS and letters < _SHORT_TEXT_LETTERS * len(texts):
            ids, lengths = self._encode_batch(texts)
        else:
            ids, lengths = self._encode_each(texts)
        self._text_since_renewal += letters
        if self._has_grown():
            self._renew()
        return ids, lengths

    def _encode_each(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        encode = self._library.backend.encode
        rows = [encode(text) for text in texts]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if len(rows) == 1:
            return rows[0], lengths
        return (np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)), lengths

    def _encode_batch(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        # Half the time of one call per text for short texts; its result imports a package, which takes 0.3 s once.
        layout = self._library.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return ids, np.diff(offsets).astype(np.int64, copy=False)

    def _renew(self) -> None:
        import gigatoken

        self._library: Any = None  # frees the old cache before the new tokenizer is built
        self._library = gigatoken.Tokenizer.from_json(self._description)
        self._text_since_renewal = 0
        self._bytes_at_renewal = resident_bytes()

    def _has_grown(self) -> bool:
        if self._text_since_renewal * _TEXT_PER_CACHE_RATIO < self._cache_bytes:
            return False
        now = resident_bytes()
        return now is None or self._bytes_at_renewal is None or now - self._bytes_at_renewal > self._cache_bytes


def fast_encoder(reference: Any) -> tuple[FastEncoder | None, str]:
    """Returns a fast encoder for the reference tokenizer, or None and the reason.

    Args:
        reference: a `tokenizers.Tokenizer`.
    """
    texts = edge_cases([str(token.content) for token in reference.get_added_tokens_decoder().values()])
    bare = {text: reference.encode(text, add_special_tokens=False).ids for text in texts}
    encoder, reason = agreeing_encoder(reference.to_str(), texts, bare.__getitem__)
    if encoder is not None and reference.post_processor is not None:
        prefix, suffix = added_ids(reference)
        if any(reference.encode(text).ids != prefix + bare[text] + suffix for text in texts):
            return None, "its post-processor does more than add fixed tokens"
    return encoder, reason


def agreeing_encoder(
    description: str, texts: Sequence[str], right_ids: Callable[[str], list[int]]
) -> tuple[FastEncoder | None, str]:
    """Returns a fast encoder if it gives the right ids for all texts, else None and the reason.

    Args:
        description: the contents of a tokenizer.json.
    """
    try:
        encoder = catch_rust_panics(lambda: FastEncoder(description))
    except ImportError:
        return None, "gigatoken is not installed; pip install gigatoken speeds this up many times"
    except ValueError as failure:
        return None, f"gigatoken does not support this tokenizer: {failure}"
    try:
        ids, lengths = catch_rust_panics(lambda: encoder.encode_flat(texts))
    except ValueError as failure:
        return None, f"gigatoken fails on this tokenizer: {failure}"
    ends = np.cumsum(lengths).tolist()
    for text, length, end in zip(texts, lengths.tolist(), ends, strict=True):
        if ids[end - length : end].tolist() != right_ids(text):
            return None, f"gigatoken gives other ids for {text[:40]!r}"
    return encoder, ""


def edge_cases(special_tokens: Sequence[str]) -> list[str]:
    """Returns texts that different tokenizers are likely to encode differently: scripts, spaces, runs, special tokens.

    Deterministic; about 40 KB, which take some 30 ms to check.
    """
    texts = [
        "", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "\x00", "\x7f\x80\xa0\xad",
        "\ufeffBOM", "a\u2028b\u2029c\u3000d\x1cd\x85e",
        "It's we'll I'M they'Ve 'tis ''s can't  won't\n's 'S \u2019s I'd've y'all're",
        "for (int i = 0; i < 10; ++i) {\r\n\t\tx[i] += 3.14159e-26;  // note\r\n}\r\n\r\n\r\n   \r\n",
        "def f(x):\n    return x  \n\n\n\tif x:\n\t  pass\n",
        "1 12 123 1234 12345 1234567890 1,234.56 ٣٤٥ १२३ ½ ² Ⅷ ㊿ 0x1F",
        "Ünïcödé café cafe\u0301 A\u030a Å ﬁ ﬀ ǅ ß ẞ İ ı ς Σ ＡＢＣ １２３ ｱｲｳ", "naïve NAÏVE Straße STRASSE",
        "Привет, мир! Γειά σου Κόσμε! שלום עולם مرحبا بالعالم",
        "สวัสดีชาวโลก नमस्ते दुनिया こんにちは世界 你好，世界 안녕 세상아",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ☺️ ❤️‍🔥 🧑🏿‍🚀😀😀😀",
        "e\u0301\u0302\u0303\u0304 Z\u0351\u036b\u0343\u036aA\u0335 \u200b\u200c\u200d\u2060\u202e \U000e0001",
        *(piece * 100 for piece in ("aaa", "   ", "\n", "\r\n", "!", "=-", "0", " a", "\t ", "é", "字")),
        "<|endoftext|>", "a<|endoftext|>b <|endoftext|> <s></s> <unk> <pad> [CLS] [MASK] <|im_start|>user\n▁▁x▁",
    ]  # fmt: skip
    for token in list(special_tokens)[:64]:
        texts.append(f"a{token}b {token} {token}{token}\n{token}")
    points = [*range(0x20, 0x3000, 3), *range(0x3000, 0x20000, 61), *range(0x20000, 0x110000, 4099)]
    drawn = random.Random(1234)
    letters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    for start in range(0, len(letters), 64):
        texts.append(
            "".join(
                letter + drawn.choice(("", " ", "a", "1", "\n", "'s", letter)) for letter in letters[start : start + 64]
            )
        )
    return texts


def resident_bytes() -> int | None:
    """Returns the resident memory of this process in bytes; None if unknown."""
    try:
        with open(_MEMORY_FILE, "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def added_ids(reference: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that the tokenizer's post-processor adds before and after a text."""
    bare = reference.encode("a", add_special_tokens=False).ids
    full = reference.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def catch_rust_panics(load: Callable[[], Any]) -> Any:
    """Calls code of a Rust library and converts panics, which are not `Exception`s, and errors to `ValueError`."""
    try:
        return load()
    except (ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as failure:
        raise ValueError(str(failure).splitlines()[0][:200] if str(failure) else type(failure).__name__) from failure
