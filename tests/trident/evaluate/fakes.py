"""A tokenizer and scorers whose answers can be computed in the head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.errors import ConfigError
from trident.evaluate.scoring import Progress, Query, Score

EOD = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is a token, and 256 ends a document."""

    name: str = "bytes"
    vocab_size: int = 257
    fingerprint: str = "bytes"
    has_eod: bool = True
    behaviour: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def eod_id(self) -> int:
        if not self.has_eod:
            raise ConfigError("The tokenizer bytes has no end-of-document token.")
        return EOD

    @property
    def ids_before(self) -> list[int]:
        return []

    @property
    def ids_after(self) -> list[int]:
        return []

    @property
    def special_ids(self) -> dict[str, int]:
        return {"": EOD}

    def encode_bare(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text)) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self.encode_batch(texts)
        return np.concatenate(encoded), np.array([len(one) for one in encoded])

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token != EOD).decode(errors="replace")


@dataclass
class FakeScorer:
    """Scores every target by a function of the tokens up to and including it.

    It predicts the target where the function says more than -0.7 (a probability above a half), else the letter "?".
    """

    logprob: Callable[[tuple[int, ...]], float] = lambda tokens: -1.0
    max_length: int = 33
    asked: list[Query] = field(default_factory=list)

    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        self.asked += queries
        scores = []
        for number, query in enumerate(queries, start=1):
            assert len(query.tokens) <= self.max_length
            places = range(query.first_target, len(query.tokens))
            found = [self.logprob(query.tokens[: place + 1]) for place in places]
            said = tuple(
                query.tokens[place] if value > -0.7 else ord("?") for place, value in zip(places, found, strict=True)
            )
            scores.append(Score(sum(found), len(found), said == query.targets, said))
            if on_progress is not None:
                on_progress(number, len(queries))
        return scores


def knows(*texts: str) -> Callable[[tuple[int, ...]], float]:
    """A network that gives the next byte of these texts log-probability -0.1, and any other -3."""

    def logprob(tokens: tuple[int, ...]) -> float:
        text = ByteTokenizer().decode(tokens)
        return -0.1 if any(one.startswith(text) for one in texts) else -3.0

    return logprob
