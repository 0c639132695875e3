"""The record of a checkpoint: all of a run that is not a tensor, as one typed value and as JSON.

The JSON form is part of the checkpoint format. Its keys stay: old checkpoints are read, and old programs read new ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def after(self, samples: int, tokens: int) -> Progress:
        """Progress after one more step that consumed this many samples and tokens."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
        )

    def counted(self, *, is_skipped: bool, is_bad: bool) -> Progress:
        """Once it is known what became of the update of a step."""
        if not (is_skipped or is_bad):
            return self
        skipped_steps, bad_steps = self.skipped_steps + int(is_skipped), self.bad_steps + int(is_bad)
        return dataclasses.replace(self, skipped_steps=skipped_steps, bad_steps=bad_steps)

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
            CheckpointError: a field is missing, unknown, or not an integer >= 0.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        value = {"bad_steps": 0, **value}  # older versions did not count them
        wrong = sorted(names ^ set(value))
        wrong += sorted(name for name in names & set(value) if not _is_count(value[name]))
        if wrong:
            raise CheckpointError(
                f"The stored progress {printable(value)} cannot be used: {_names(wrong)} missing, unknown or not an "
                "integer >= 0. Resume from another checkpoint of this run (--load)."
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
        forked_from: the same of the checkpoint at which a run left another one that goes on without it; else empty.
        validation_loss: of the evaluation at this step, in nats per token; None without one.
        recent: the latest values, by name, which tell what is unusual.
        passed_batches: batches that were not trained on because they made runs fail: `step`, `first_sample`,
            `last_sample`.
        began_at: of parameters that were frozen before, by global name, how many updates the optimizer had made when
            their training began.
        averaged_from: of the same, what the iterates of a schedule-free optimizer counted in its mean by then.
        family: the family of Hugging Face models that the weights were imported from; empty in the records of runs.
        averaging_weight: what the iterates of a schedule-free optimizer count in its mean; 0 for others.
        parts: what callbacks of the run keep, by name.
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
    forked_from: Mapping[str, Any] = field(default_factory=dict)
    validation_loss: float | None = None
    recent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    passed_batches: Sequence[Mapping[str, int]] = ()
    began_at: Mapping[str, int] = field(default_factory=dict)
    averaged_from: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    averaging_weight: float = 0.0
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
        optional: dict[str, Any] = {
            "run_id": self.run_id,
            "finetuned_from": dict(self.finetuned_from),
            "forked_from": dict(self.forked_from),
            "validation_loss": self.validation_loss,
            "recent": {name: list(values) for name, values in self.recent.items()},
            "passed_batches": [dict(batch) for batch in self.passed_batches],
            "began_at": dict(self.began_at),
            "averaged_from": dict(self.averaged_from),
            "family": self.family,
            "averaging_weight": self.averaging_weight or None,
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
        stored = _Entries(value, path)
        loss = stored.entry(
            "validation_loss", lambda entry: entry is None or _is_number(entry), "a number or null", None
        )
        record = cls(
            progress=Progress.from_json(stored.object("progress")),
            optimizer_updates=stored.entry("optimizer_updates", _is_count, _A_COUNT),
            loss_scale=stored.object("loss_scale", _is_number, "a number"),
            config=stored.object("config", _is_object, _AN_OBJECT),
            data_plan=DataPlan.from_json(stored.object("data_plan")),
            data=stored.object("data"),
            tokenizer=_tokenizer(stored.within("tokenizer")),
            program_version=stored.within("program").entry("version", _is_text, "a text", None),
            run_id=stored.entry(
                "run_id", lambda entry: entry == "" or run_id_of({"run_id": entry}), "16 hexadecimal digits", ""
            ),
            finetuned_from=_base(stored, "finetuned_from"),
            forked_from=_base(stored, "forked_from"),
            validation_loss=None if loss is None else float(loss),
            recent=stored.object("recent", _is_series, "a list of numbers", {}),
            passed_batches=_batches(stored),
            began_at=stored.object("began_at", _is_count, _A_COUNT, {}),
            averaged_from=stored.object("averaged_from", _is_number, "a number", {}),
            family=stored.entry("family", _is_text, "a text", ""),
            averaging_weight=float(stored.entry("averaging_weight", _is_number, "a number", 0.0)),
            parts=stored.object("parts", usual={}),
        )
        planned, consumed = record.data_plan.train, record.progress.consumed_samples
        if planned is not None and consumed > planned.available:
            raise CheckpointError(
                f"the record of {path} says that {consumed} samples were consumed of the {planned.available} that its "
                "data plan has. Give another checkpoint of the run with --load."
            )
        return record


_NEEDED = object()  # the usual value of an entry that has none


@dataclass(frozen=True)
class _Entries:
    """The entries of a stored record, each checked when it is asked for.

    Args:
        place: what comes before the names in error texts, such as "program.".
    """

    value: Mapping[str, Any]
    path: Path
    place: str = ""

    def entry(self, name: str, is_right: Callable[[Any], object], should_be: str, usual: Any = _NEEDED) -> Any:
        """An entry; `usual` where it is absent."""
        if name not in self.value and usual is _NEEDED:
            raise CheckpointError(
                f"the record of {self.path} has no {name} (it has {_names(self.value) or 'nothing'}): it is not the "
                "checkpoint of a run. Give another one with --load."
            )
        entry = self.value.get(name, usual)
        if not is_right(entry):
            place = printable(f"{self.place}{name}", 80, quoted=False)
            raise CheckpointError(
                f"the record of {self.path} has {place} = {printable(entry, 80)}, which should be {should_be}. Give "
                "another checkpoint of the run with --load."
            )
        return entry

    def object(
        self,
        name: str,
        is_right: Callable[[Any], object] = lambda entry: True,
        should_be: str = "",
        usual: Any = _NEEDED,
    ) -> Mapping[str, Any]:
        """An entry that is an object, each of whose own entries must be right."""
        inner: Mapping[str, Any] = self.entry(name, _is_object, _AN_OBJECT, usual)
        for key in inner:
            _Entries(inner, self.path, f"{name}.").entry(key, is_right, should_be)
        return inner

    def within(self, name: str) -> _Entries:
        return _Entries(self.object(name), self.path, f"{name}.")


def _tokenizer(stored: _Entries) -> TokenizerRecord:
    name = stored.entry("name", _is_text, "a text", None)
    is_unknown = name == NO_TOKENIZER and stored.value.get("fingerprint", "") is None
    stored.entry("fingerprint", lambda entry: is_unknown or _is_text(entry), "a text", None)
    stored.entry("vocab_size", _is_count, _A_COUNT, None)
    stored.entry("eod_id", lambda entry: entry is None or _is_count(entry), f"{_A_COUNT} or null", None)
    stored.entry(
        "behaviour", lambda entry: _is_object(entry) and all(map(_is_text, entry.values())), "an object of texts", {}
    )
    return TokenizerRecord.from_json(stored.value)


def _base(stored: _Entries, name: str) -> Mapping[str, Any]:
    base = stored.object(name, usual={})
    what = "an object with run_id, step and fingerprint"
    stored.entry(name, lambda entry: not entry or base_in({name: entry}, name), what, {})
    return base


def _batches(stored: _Entries) -> Sequence[Mapping[str, int]]:
    batches = stored.entry("passed_batches", lambda entry: isinstance(entry, list), "a list", [])
    for batch in batches:
        _Entries({"passed_batches": batch}, stored.path).entry(
            "passed_batches",
            lambda entry: _is_object(entry) and all(_is_count(entry.get(key)) for key in _BATCH_KEYS),
            f"an object with {', '.join(_BATCH_KEYS)}",
        )
    return tuple(batches)


def run_id_of(record: Mapping[str, Any]) -> str:
    """The run that a record as JSON names; empty if it names none."""
    entry = record.get("run_id")
    return entry if isinstance(entry, str) and _RUN_ID.fullmatch(entry) else ""


def base_in(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The checkpoint that an entry of a record as JSON says its run began with; empty if it says none."""
    entry = record.get(name)
    if not isinstance(entry, Mapping) or not _is_count(entry.get("step")):
        return {}
    fingerprint = entry.get("fingerprint", "")
    known = run_id_of(entry) or entry.get("run_id") == ""
    return entry if known and isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint) else {}


_RUN_ID = re.compile(r"[0-9a-f]{16}\Z")
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?\Z")
_LARGEST_COUNT = 2**53
_BATCH_KEYS = ("step", "first_sample", "last_sample")
_A_COUNT, _AN_OBJECT = "an integer >= 0", "a JSON object"


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Whether a value is a number; JSON's true is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    """Whether a value is an integer >= 0 that counts something; JSON's true is not one."""
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _names(names: Iterable[str]) -> str:
    shown = [printable(name, 80, quoted=False) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
