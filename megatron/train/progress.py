"""How far a run is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Progress:
    """What has happened in a run so far.

    Attributes:
        step: optimizer steps taken, skipped ones included.
        consumed_samples: training samples consumed, those of skipped steps included.
        consumed_tokens: the same in tokens.
        skipped_steps: steps whose update was dropped because a half-precision gradient overflowed.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0

    def after(self, samples: int, tokens: int, skipped: bool = False) -> Progress:
        """Progress after one more step that consumed so many samples and tokens."""
        return Progress(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            skipped_steps=self.skipped_steps + int(skipped),
        )

    def to_json(self) -> dict[str, int]:
        """A JSON object with one entry per field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Progress:
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: a field is missing, unknown, or no whole number >= 0.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted(names ^ set(value))
        wrong += sorted(name for name in names & set(value) if type(value[name]) is not int or value[name] < 0)
        if wrong:
            raise CheckpointError(
                f"The stored progress {dict(value)!r} cannot be used: {', '.join(wrong)} missing, unknown or no whole "
                "number >= 0. Resume from another checkpoint of this run (--load)."
            )
        return cls(**value)
