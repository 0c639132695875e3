"""The tokenizer record stored with data and checkpoints, and the check that a run uses an equal tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError, printable
from megatron.tokenizers.behaviour import TokenizerParts, differences
from megatron.tokenizers.library import Tokenizer

NO_TOKENIZER = "none"  # the name in the record of weights imported without a tokenizer


@dataclass(frozen=True)
class TokenizerRecord:
    """The identity of a tokenizer.

    Args:
        fingerprint: hash of its files, None if unknown.
        eod_id: its end-of-document id, None if missing or unknown.
        behaviour: see `behaviour.summaries`; empty if unknown, as in records of older versions.
    """

    name: str
    fingerprint: str | None
    vocab_size: int
    eod_id: int | None = None
    behaviour: Mapping[str, str] = field(default_factory=dict, hash=False)

    @staticmethod
    def of(tokenizer: Tokenizer) -> TokenizerRecord:
        """Creates the record of a tokenizer."""
        try:
            eod_id: int | None = tokenizer.eod_id
        except ConfigError:  # it has none
            eod_id = None
        return TokenizerRecord(
            tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, eod_id, dict(tokenizer.behaviour)
        )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TokenizerRecord:
        """Reads a record from JSON.

        Raises:
            KeyError, TypeError, ValueError: invalid record.
        """
        fingerprint, eod_id = value["fingerprint"], value.get("eod_id")
        return TokenizerRecord(
            str(value.get("name", "unnamed")),
            None if fingerprint is None else str(fingerprint),
            int(value["vocab_size"]),
            None if eod_id is None else int(eod_id),
            {str(part): str(summary) for part, summary in dict(value.get("behaviour") or {}).items()},
        )

    def is_of(self, tokenizer: TokenizerRecord | Tokenizer, *, ends_matter: bool = True) -> bool:
        """Returns True if a tokenizer gives the recorded ids, as far as known.

        It does if its files or its behaviour are equal; records of older versions lack the behaviour.

        Args:
            ends_matter: documents must end with the same id.
        """
        other = _record_of(tokenizer)
        if self.name == NO_TOKENIZER:
            return other.vocab_size <= self.vocab_size
        if self.vocab_size != other.vocab_size or (ends_matter and not self._ends_like(other)):
            return False
        behaves_equally = bool(self.behaviour) and self.behaviour == other.behaviour
        return self.fingerprint in (None, other.fingerprint) or behaves_equally

    def differences(self, tokenizer: TokenizerRecord | Tokenizer) -> str:
        """Describes how a tokenizer differs; empty if unknown."""
        other = _record_of(tokenizer)
        parts: TokenizerParts = {} if isinstance(tokenizer, TokenizerRecord) else tokenizer.parts
        texts: list[str] = []
        if self.behaviour and other.behaviour and self.fingerprint != other.fingerprint:
            texts += differences(self.behaviour, other.behaviour, parts)
        if not self._ends_like(other):
            texts.append(f"documents end with {other.eod_id}, not {self.eod_id} (eos_token)")
        return "; ".join(texts)

    def _ends_like(self, other: TokenizerRecord) -> bool:
        return None in (self.eod_id, other.eod_id) or self.eod_id == other.eod_id


def check_same_tokenizer(
    made: str,
    record: TokenizerRecord,
    tokenizer: TokenizerRecord | Tokenizer,
    error: type[MegatronError] = DataError,
    advice: str = "",
    *,
    ends_matter: bool = True,
) -> None:
    """Checks that a tokenizer gives the ids of the recorded one.

    Args:
        made: beginning of the message, for example "the checkpoint in out was trained".
        error: type of the exception.
        advice: further advice, appended to the message.
        ends_matter: documents must end with the same id.

    Raises:
        MegatronError: `error`, if it does not.
    """
    if record.is_of(tokenizer, ends_matter=ends_matter):
        return
    differing = record.differences(tokenizer)
    raise error(
        f"{made} with another tokenizer ({printable(record.name, quoted=False)}, fingerprint "
        f"{printable(str(record.fingerprint)[:12], quoted=False)}, "
        f"{record.vocab_size} tokens) than this run's ({tokenizer.name}, {str(tokenizer.fingerprint)[:12]}, "
        f"{tokenizer.vocab_size} tokens): {f'{differing}, so ' if differing else ''}its ids would mean other text. "
        f"Use the same --tokenizer-type, --vocab-file, --merge-file or --tokenizer-name-or-path{advice}."
    )


def _record_of(tokenizer: TokenizerRecord | Tokenizer) -> TokenizerRecord:
    return tokenizer if isinstance(tokenizer, TokenizerRecord) else TokenizerRecord.of(tokenizer)
