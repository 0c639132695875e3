"""The record of a checkpoint: the state of a run except its tensors, as a typed value and as JSON.

The JSON is part of the checkpoint format. Its keys are stable, so that old and new versions read each other's
checkpoints.
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
    """The progress of a run.

    Attributes:
        step: optimizer steps taken, including skipped ones.
        consumed_samples: training samples consumed, also in skipped steps.
        consumed_tokens: the same in tokens.
        skipped_steps: steps whose update was skipped because a half-precision gradient overflowed.
        bad_steps: steps whose update was skipped because loss or gradient were not finite, or far above the usual.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    bad_steps: int = 0

    def after(self, samples: int, tokens: int) -> Progress:
        """The progress after one more step with this many samples and tokens."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
        )

    def counted(self, *, is_skipped: bool, is_bad: bool) -> Progress:
        """The progress with the outcome of a step counted."""
        if not (is_skipped or is_bad):
            return self
        skipped_steps, bad_steps = self.skipped_steps + int(is_skipped), self.bad_steps + int(is_bad)
        return dataclasses.replace(self, skipped_steps=skipped_steps, bad_steps=bad_steps)

    def to_json(self) -> dict[str, int]:
        values = dataclasses.asdict(self)
        if not self.bad_steps:  # older versions reject this key
            del values["bad_steps"]
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Progress:
        """Parses the output of `to_json`.

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
    """The state of a run except its tensors.

    Attributes:
        optimizer_updates: updates made by the optimizer (none for skipped steps), for Adam's bias correction.
        loss_scale: state of the dynamic loss scaler; empty outside fp16.
        config: the configuration as `RunConfig.to_json` returned it.
        data_plan: the order of samples.
        data: sizes and fingerprints of the data files; empty on ranks other than 0.
        tokenizer: the tokenizer of the token ids.
        program_version: version of the program that wrote the checkpoint.
        run_id: identifies the run through all its restarts; empty in older checkpoints.
        finetuned_from: the checkpoint whose weights a fine-tuning run started from: `run_id` (empty if unknown),
            `step` and `fingerprint`, a digest of its tensors; else empty.
        forked_from: the checkpoint of another run that this run was forked from, in the same form; else empty.
        validation_loss: of the evaluation at this step, in nats per token; None without one.
        recent: recent values by name, for the detection of spikes.
        passed_batches: batches that were skipped because starts failed on them: `step`, `first_sample`, `last_sample`.
        began_at: for parameters that used to be frozen, by global name: optimizer updates when their training began.
        averaged_from: for the same parameters: the averaging weight of a schedule-free optimizer at that time.
        family: the family of Hugging Face models that the weights were imported from; empty in the records of runs.
        averaging_weight: the sum of the weights in the average of a schedule-free optimizer; 0 for others.
        parts: state of callbacks by name.
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
        """The family of the Hugging Face model that the run, or its base, was imported from; empty if none."""
        return self.family or str(self.finetuned_from.get("family") or "")

    @property
    def has_optimizer_state(self) -> bool:
        """True unless the checkpoint was saved with --no-save-optim, without moments and loss scale."""
        sections = (section for section in self.config.values() if isinstance(section, Mapping))
        return not any(section.get("no_save_optim") for section in sections)

    def to_json(self) -> dict[str, Any]:
        """The record as it appears in a manifest, without empty optional entries."""
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
        """Parses the output of `to_json`; unknown entries are ignored.

        Args:
            path: the checkpoint, for error messages.

        Raises:
            CheckpointError: an entry is missing or invalid; names the entry and its value.
            DataError: the same for entries of the data plan.
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
            parts=stored.object("parts", default={}),
        )
        planned, consumed = record.data_plan.train, record.progress.consumed_samples
        if planned is not None and consumed > planned.available:
            raise CheckpointError(
                f"the record of {path} has {consumed} consumed samples, but its data plan has only "
                f"{planned.available} samples. Use another checkpoint of the run (--load)."
            )
        return record


_REQUIRED = object()  # the default of an entry without one


@dataclass(frozen=True)
class _Entries:
    """The entries of a stored record, checked when they are read.

    Args:
        prefix: precedes the names in error messages, such as "program.".
    """

    value: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def entry(self, name: str, is_valid: Callable[[Any], object], expected: str, default: Any = _REQUIRED) -> Any:
        if name not in self.value and default is _REQUIRED:
            raise CheckpointError(
                f"the record of {self.path} has no {name} (it has {_names(self.value) or 'nothing'}): it is not a "
                "checkpoint of a run. Use another one (--load)."
            )
        entry = self.value.get(name, default)
        if not is_valid(entry):
            shown = printable(f"{self.prefix}{name}", 80, quoted=False)
            raise CheckpointError(
                f"the record of {self.path} has {shown} = {printable(entry, 80)}, expected {expected}. Use another "
                "checkpoint of the run (--load)."
            )
        return entry

    def object(
        self,
        name: str,
        is_valid: Callable[[Any], object] = lambda entry: True,
        expected: str = "",
        default: Any = _REQUIRED,
    ) -> Mapping[str, Any]:
        """An entry that is an object; checks each of its entries."""
        inner: Mapping[str, Any] = self.entry(name, _is_object, _AN_OBJECT, default)
        for key in inner:
            _Entries(inner, self.path, f"{name}.").entry(key, is_valid, expected)
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
    base = stored.object(name, default={})
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
    """The run id in a record as JSON; empty if there is no valid one."""
    entry = record.get("run_id")
    return entry if isinstance(entry, str) and _RUN_ID.fullmatch(entry) else ""


def base_in(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The base checkpoint in an entry of a record as JSON (`finetuned_from`, `forked_from`); empty if invalid."""
    entry = record.get(name)
    if not isinstance(entry, Mapping) or not _is_count(entry.get("step")):
        return {}
    fingerprint = entry.get("fingerprint", "")
    has_id = run_id_of(entry) or entry.get("run_id") == ""
    return entry if has_id and isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint) else {}


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
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT  # `type`, since True is an int


def _names(names: Iterable[str]) -> str:
    shown = [printable(name, 80, quoted=False) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
