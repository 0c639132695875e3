"""Which tokenizer made ids: the record stored with data and checkpoints, and the check that a run uses the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, DataError, MegatronError, printable

if TYPE_CHECKING:
    from megatron.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer gave the ids.

    Args:
        fingerprint: hash of its files, None when unknown.
        eod_id: its end-of-document id, None when it has none or it is not known.
    """

    name: str
    fingerprint: str | None
    vocab_size: int
    eod_id: int | None = None

    @staticmethod
    def of(tokenizer: Tokenizer) -> TokenizerRecord:
        """The record of a tokenizer."""
        try:
            eod_id: int | None = tokenizer.eod_id
        except ConfigError:  # it has none
            eod_id = None
        return TokenizerRecord(tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, eod_id)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TokenizerRecord:
        """The record that was stored as JSON.

        Raises:
            KeyError, TypeError, ValueError: it is not one.
        """
        fingerprint, eod_id = value["fingerprint"], value.get("eod_id")
        return TokenizerRecord(
            str(value.get("name", "unnamed")),
            None if fingerprint is None else str(fingerprint),
            int(value["vocab_size"]),
            None if eod_id is None else int(eod_id),
        )

    def is_of(self, tokenizer: TokenizerRecord | Tokenizer) -> bool:
        """Whether a tokenizer gives the ids that were recorded, as far as the record tells."""
        return self.fingerprint in (None, tokenizer.fingerprint) and self.vocab_size == tokenizer.vocab_size


def check_same_tokenizer(
    made: str,
    record: TokenizerRecord,
    tokenizer: TokenizerRecord | Tokenizer,
    error: type[MegatronError] = DataError,
    advice: str = "",
) -> None:
    """Checks that ids mean the same words to a tokenizer as to the one that was recorded.

    Args:
        made: what was made with the recorded one, for example "the checkpoint in out was trained".
        error: the type that is raised.
        advice: what else the user may do, appended to the text.

    Raises:
        MegatronError: `error`, if they do not.
    """
    if record.is_of(tokenizer):
        return
    raise error(
        f"{made} with another tokenizer ({printable(record.name, quoted=False)}, fingerprint "
        f"{printable(str(record.fingerprint)[:12], quoted=False)}, "
        f"{record.vocab_size} tokens) than this run's ({tokenizer.name}, {str(tokenizer.fingerprint)[:12]}, "
        f"{tokenizer.vocab_size} tokens): its ids would mean other words. Give the same --tokenizer-type, "
        f"--vocab-file, --merge-file or --tokenizer-name-or-path{advice}."
    )
