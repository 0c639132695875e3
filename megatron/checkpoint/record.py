"""The record of a checkpoint: all of a run that is not a tensor, as one typed value and as JSON.

The JSON form is part of the checkpoint format. Its keys stay: old checkpoints are read, and old programs read new ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.order.plan import DataPlan
from megatron.errors import CheckpointError, printable
from megatron.tokenizers.record import NO_TOKENIZER, TokenizerRecord


@dataclass(frozen=True)
class Progress:
    """What has happened in a run so far.

    Attributes:
        step: optimizer steps taken, skipped ones included.
        consumed_samples: training samples consumed, also by skipped steps.
        consumed_tokens: the same in tokens.
        skipped_steps: steps whose update was dropped because a half-precision gradient overflowed.
        bad_steps: steps whose update was dropped because loss or gradient were not finite, or far above the usual.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    bad_steps: int = 0

    def after(self, samples: int, tokens: int, skipped: bool = False, bad: bool = False) -> Progress:
        """Progress after one more step that consumed this many samples and tokens."""
        return Progress(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            skipped_steps=self.skipped_steps + int(skipped),
            bad_steps=self.bad_steps + int(bad),
        )

    def to_json(self) -> dict[str, int]:
        """A JSON object with one entry per field; without `bad_steps`, which older programs do not know, if there are
        none.
        """
        values = dataclasses.asdict(self)
        if not self.bad_steps:
            del values["bad_steps"]
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Progress:
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: a field is missing, unknown, or no whole number >= 0.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        value = {"bad_steps": 0, **value}  # older versions did not count them
        wrong = sorted(names ^ set(value))
        wrong += sorted(name for name in names & set(value) if not _is_count(value[name]))
        if wrong:
            raise CheckpointError(
                f"The stored progress {printable(value)} cannot be used: {_names(wrong)} missing, unknown or no whole "
                "number >= 0. Resume from another checkpoint of this run (--load)."
            )
        return cls(**value)


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides its tensors.

    Attributes:
        optimizer_updates: updates the optimizer has made (skipped steps make none); Adam's bias correction needs it.
        loss_scale: counters of the dynamic loss scaler; empty outside fp16.
        config: the run's configuration as `RunConfig.to_json` gave it; `RunConfig.from_json` reads it.
        data_plan: which sample comes when.
        data: sizes and fingerprints of the data files; empty on ranks other than 0.
        tokenizer: the tokenizer that made the ids.
        program_version: version of the program that wrote the checkpoint.
        run_id: what the checkpoints of one run share, through all its restarts; empty in older checkpoints.
        finetuned_from: of the checkpoint whose weights a fine-tuning run began with, `run_id` (empty if it has none),
            `step` and `fingerprint`, a digest of its tensors; else empty.
        validation_loss: of the evaluation at this step, in nats per token; None without one.
        recent: the latest values, by name, which tell what is unusual.
        passed_batches: batches that were not trained on because they made runs fail: `step`, `first_sample`,
            `last_sample`.
        began_at: of parameters that were frozen before, by global name, how many updates the optimizer had made when
            their training began.
        family: the family of Hugging Face models that the weights were imported from; empty in the records of runs.
        parts: what other parts of the run keep, by name.
    """

    progress: Progress
    optimizer_updates: int
    loss_scale: Mapping[str, float]
    config: Mapping[str, Any]
    data_plan: DataPlan
    data: Mapping[str, Any]
    tokenizer: TokenizerRecord
    program_version: str
    run_id: str = ""
    finetuned_from: Mapping[str, Any] = field(default_factory=dict)
    validation_loss: float | None = None
    recent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    passed_batches: Sequence[Mapping[str, int]] = ()
    began_at: Mapping[str, int] = field(default_factory=dict)
    family: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_family(self) -> str:
        """The family of Hugging Face models that the first weights came from, also after fine-tuning; empty if none."""
        return self.family or str(self.finetuned_from.get("family") or "")

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the checkpoint holds moments and the loss scale: not if it was saved with --no-save-optim."""
        sections = (section for section in self.config.values() if isinstance(section, Mapping))
        return not any(section.get("no_save_optim") for section in sections)

    def to_json(self) -> dict[str, Any]:
        """The record as it appears in a manifest; optional entries that say nothing are left out."""
        optional = {
            "run_id": self.run_id,
            "finetuned_from": dict(self.finetuned_from),
            "validation_loss": self.validation_loss,
            "recent": {name: list(values) for name, values in self.recent.items()},
            "passed_batches": [dict(batch) for batch in self.passed_batches],
            "began_at": dict(self.began_at),
            "family": self.family,
            "parts": dict(self.parts),
        }
        return {
            "progress": self.progress.to_json(),
            "optimizer_updates": self.optimizer_updates,
            "loss_scale": dict(self.loss_scale),
            "config": dict(self.config),
            "data_plan": self.data_plan.to_json(),
            "data": dict(self.data),
            "tokenizer": {
                "fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "name": self.tokenizer.name,
                **({} if self.tokenizer.eod_id is None else {"eod_id": self.tokenizer.eod_id}),
                **({"behaviour": dict(self.tokenizer.behaviour)} if self.tokenizer.behaviour else {}),
            },
            "program": {"version": self.program_version},
            **{name: entry for name, entry in optional.items() if entry or entry == 0.0},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], path: Path) -> Record:
        """Reads what `to_json` wrote; entries that it does not know are ignored.

        Args:
            path: the checkpoint it comes from, for error texts.

        Raises:
            CheckpointError: an entry is missing or cannot be what it should; names the entry and its value.
            DataError: the same of the data plan's entries.
        """
        fields = _Fields(value, path)
        record = cls(
            progress=Progress.from_json(fields.mapping("progress")),
            optimizer_updates=fields.count("optimizer_updates"),
            loss_scale=fields.numbers("loss_scale"),
            config=fields.config("config"),
            data_plan=DataPlan.from_json(fields.mapping("data_plan")),
            data=fields.mapping("data"),
            tokenizer=fields.tokenizer("tokenizer"),
            program_version=fields.version("program"),
            run_id=fields.run_id("run_id"),
            finetuned_from=fields.base("finetuned_from"),
            validation_loss=fields.optional_number("validation_loss"),
            recent=fields.optional_series("recent"),
            passed_batches=fields.optional_batches("passed_batches"),
            began_at=fields.optional_counts("began_at"),
            family=fields.optional_text("family"),
            parts=fields.mapping("parts") if "parts" in value else {},
        )
        planned, consumed = record.data_plan.train, record.progress.consumed_samples
        if planned is not None and consumed > planned.available:
            raise CheckpointError(
                f"the record of {path} says that {consumed} samples were consumed of the {planned.available} that its "
                "data plan has. Give another checkpoint of the run with --load."
            )
        return record


@dataclass(frozen=True)
class _Fields:
    """The entries of a stored record, each checked when it is asked for."""

    value: Mapping[str, Any]
    path: Path

    def mapping(self, name: str) -> Mapping[str, Any]:
        entry = self._entry(name)
        if not isinstance(entry, Mapping):
            raise self._wrong(name, entry, "a JSON object")
        return entry

    def count(self, name: str) -> int:
        entry = self._entry(name)
        if not _is_count(entry):
            raise self._wrong(name, entry, "a whole number >= 0")
        return int(entry)

    def numbers(self, name: str) -> Mapping[str, float]:
        entry = self.mapping(name)
        for key, number in entry.items():
            if not _is_number(number):
                raise self._wrong(f"{name}.{key}", number, "a number")
        return entry

    def config(self, name: str) -> Mapping[str, Any]:
        entry = self.mapping(name)
        for section, values in entry.items():
            if not isinstance(values, Mapping):
                raise self._wrong(f"{name}.{section}", values, "a JSON object")
        return entry

    def tokenizer(self, name: str) -> TokenizerRecord:
        entry = self.mapping(name)
        if not isinstance(entry.get("name"), str):
            raise self._wrong(f"{name}.name", entry.get("name"), "a text")
        is_unknown = entry["name"] == NO_TOKENIZER and entry.get("fingerprint", "") is None
        if not isinstance(entry.get("fingerprint"), str) and not is_unknown:
            raise self._wrong(f"{name}.fingerprint", entry.get("fingerprint"), "a text")
        if not _is_count(entry.get("vocab_size")):
            raise self._wrong(f"{name}.vocab_size", entry.get("vocab_size"), "a whole number >= 0")
        if entry.get("eod_id") is not None and not _is_count(entry["eod_id"]):
            raise self._wrong(f"{name}.eod_id", entry["eod_id"], "a whole number >= 0 or null")
        behaviour = entry.get("behaviour", {})
        if not isinstance(behaviour, Mapping) or not all(isinstance(part, str) for part in behaviour.values()):
            raise self._wrong(f"{name}.behaviour", behaviour, "an object of texts")
        return TokenizerRecord.from_json(entry)

    def version(self, name: str) -> str:
        version = self.mapping(name).get("version")
        if not isinstance(version, str):
            raise self._wrong(f"{name}.version", version, "a text")
        return version

    def optional_text(self, name: str) -> str:
        entry = self.value.get(name, "")
        if not isinstance(entry, str):
            raise self._wrong(name, entry, "a text")
        return entry

    def run_id(self, name: str) -> str:
        entry = self.value.get(name, "")
        if entry != "" and not run_id_of({"run_id": entry}):
            raise self._wrong(name, entry, "16 hexadecimal digits")
        return str(entry)

    def base(self, name: str) -> Mapping[str, Any]:
        entry = self.optional_mapping(name)
        if entry and not finetuned_from_of({"finetuned_from": entry}):
            raise self._wrong(name, dict(entry), "an object with run_id, step and fingerprint")
        return entry

    def optional_mapping(self, name: str) -> Mapping[str, Any]:
        return self.mapping(name) if name in self.value else {}

    def optional_number(self, name: str) -> float | None:
        entry = self.value.get(name)
        if entry is not None and not _is_number(entry):
            raise self._wrong(name, entry, "a number or null")
        return None if entry is None else float(entry)

    def optional_series(self, name: str) -> Mapping[str, Sequence[float]]:
        series = self.optional_mapping(name)
        for key, values in series.items():
            if not isinstance(values, list) or not all(_is_number(value) for value in values):
                raise self._wrong(f"{name}.{key}", values, "a list of numbers")
        return series

    def optional_counts(self, name: str) -> Mapping[str, int]:
        counts = self.optional_mapping(name)
        for key, count in counts.items():
            if not _is_count(count):
                raise self._wrong(f"{name}.{key}", count, "a whole number >= 0")
        return counts

    def optional_batches(self, name: str) -> Sequence[Mapping[str, int]]:
        entries = self.value.get(name, [])
        if not isinstance(entries, list):
            raise self._wrong(name, entries, "a list")
        for entry in entries:
            if not isinstance(entry, Mapping) or not all(_is_count(entry.get(key)) for key in _BATCH_KEYS):
                raise self._wrong(name, entry, f"an object with {', '.join(_BATCH_KEYS)}")
        return tuple(entries)

    def _entry(self, name: str) -> Any:
        if name not in self.value:
            raise CheckpointError(
                f"the record of {self.path} has no {name} (it has {_names(self.value) or 'nothing'}): it is not the "
                "checkpoint of a run. Give another one with --load."
            )
        return self.value[name]

    def _wrong(self, name: str, entry: Any, should_be: str) -> CheckpointError:
        place = printable(name, 80, quoted=False)
        return CheckpointError(
            f"the record of {self.path} has {place} = {printable(entry, 80)}, which should be {should_be}. Give "
            "another checkpoint of the run with --load."
        )


def run_id_of(record: Mapping[str, Any]) -> str:
    """The run that a record as JSON names; empty if it names none."""
    entry = record.get("run_id")
    return entry if isinstance(entry, str) and _RUN_ID.fullmatch(entry) else ""


def finetuned_from_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint that a record as JSON says its run was fine-tuned from; empty if it says none."""
    entry = record.get("finetuned_from")
    if not isinstance(entry, Mapping) or not _is_count(entry.get("step")):
        return {}
    fingerprint = entry.get("fingerprint", "")
    known = run_id_of(entry) or entry.get("run_id") == ""
    return entry if known and isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint) else {}


_RUN_ID = re.compile(r"[0-9a-f]{16}\Z")
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?\Z")
_LARGEST_COUNT = 2**53
_BATCH_KEYS = ("step", "first_sample", "last_sample")


def _is_number(value: Any) -> bool:
    """Whether a value is a number; JSON's true is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number >= 0 that counts something; JSON's true is not one."""
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _names(names: Iterable[str]) -> str:
    shown = [printable(name, 80, quoted=False) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
