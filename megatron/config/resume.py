"""Comparison of configurations on resume: fields that must match, may change, or come from the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.architecture.feed_forward import MICRO_BATCH
from megatron.config.architecture.positions import LEARNED
from megatron.config.flags.blends import read_split, shown_split
from megatron.config.flags.fields import FROM_CHECKPOINT, MAY_CHANGE, MUST_MATCH, RUN_MUST_MATCH, Unset, resume_rule
from megatron.config.flags.section import build_unchecked
from megatron.config.run_config import RunConfig, frozen, plain, saved_fields, sections_of
from megatron.config.run_sections import CHECKPOINT, fields_of
from megatron.config.sections.curriculum import CurriculumFields
from megatron.config.sections.model import ModelConfig, ModelRequest, unused_fields
from megatron.config.sections.optim import OptimConfig
from megatron.config.sections.optimizers import AVERAGING
from megatron.errors import ConfigError, printable

# Taken from the checkpoint with --use-checkpoint-lr-scheduler.
SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_tokens",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
)
_LONGEST_SHOWN = 1000  # characters of a value
_STATE_MUST_MATCH = "must match unless --no-load-optim or --finetune"
# These may change, with a notice.
_NOTABLE = frozenset(
    {
        *SCHEDULE_FIELDS,
        "global_batch_size",
        "rampup_batch_size",
        "weight_decay",
        "clip_grad",
        "fp16",
        "bf16",
        "fp8_format",
    }
    | {"start_weight_decay", "end_weight_decay", "weight_decay_incr_style"}
    | {
        "hidden_dropout",
        "attention_dropout",
        "train_iters",
        "train_samples",
        "train_tokens",
        "z_loss_coeff",
        "label_smoothing",
        "freeze",
        "epochs",
        "kd",
        "mos",
        "kd_alpha_ce",
        "kd_beta_ce",
        "kd_temp",
        "kd_iters",
        "load_teacher",
        "use_bnb_optimizer",
        *(field.name for field in fields_of(CurriculumFields)),
    }
)


def check_resume(saved: Mapping[str, Any], current: RunConfig) -> RunConfig:
    """Compares the configuration a checkpoint was saved with (`RunConfig.to_json`) with the current one.

    Both must be resolved. Returns the current configuration with the fields that come from the checkpoint, and a notice
    for every change that affects training.

    Raises:
        ConfigError: fields that must match differ, with a sentence for each.
    """
    problems: list[str] = []
    notices: list[str] = []
    taken: dict[str, dict[str, Any]] = {}
    values = _saved_values(saved)
    if values["bidirectional"] != current.model.bidirectional:
        held, program = ("an encoder", "pretrain_bert.py") if values["bidirectional"] else ("a GPT", "pretrain_gpt.py")
        raise ConfigError(
            f"the checkpoint holds {held}, but this run trains another kind of network. Resume it with {program}, or "
            "load another checkpoint (--load)."
        )
    for section, field, then, now in _differences(values, current):
        rule = _rule(section, field, current)
        name = f"--{field.name.replace('_', '-')}"
        if rule in (MUST_MATCH, _STATE_MUST_MATCH) or (rule == RUN_MUST_MATCH and not current.loading.finetune):
            problems.append(_must_match_sentence(section, field, then, now, rule))
        elif (
            rule == FROM_CHECKPOINT
            and field.name not in SCHEDULE_FIELDS
            and current.was_given(f"{section}.{field.name}")
        ):
            problems.append(
                f"{name} {_shown(now)} contradicts the checkpoint, which was saved with {_shown(then)}. Drop {name}, "
                f"or set it to {_shown(then)}."
            )
        elif rule == FROM_CHECKPOINT:
            taken.setdefault(section, {})[field.name] = then
            notices.append(f"{name} {_shown(then)} is taken from the checkpoint instead of {_shown(now)}.")
        elif field.name in ("train_iters", "train_tokens") and current.finetuning.epochs is not None:
            continue  # they follow from the epochs
        elif field.name in _notable(current) and not (current.loading.finetune or current.evaluation.eval_only):
            notices.append(f"{name} changed from {_shown(then)} in the checkpoint to {_shown(now)}.")
    if current.optim.use_checkpoint_lr_scheduler:
        problems.extend(_schedule_problems(values, current.optim))
        _fix_decay(values, current.optim, taken)
    if problems:
        raise ConfigError(problems)
    changes: dict[str, Any] = {
        section: dataclasses.replace(getattr(current, section), **fields) for section, fields in taken.items()
    }
    provenance = {
        **current.provenance,
        **{f"{section}.{name}": CHECKPOINT for section in taken for name in taken[section]},
    }
    return dataclasses.replace(current, **changes, provenance=provenance, notices=(*current.notices, *notices))


def architecture_differences(saved: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (field, value, other value) wherever two saved configurations describe different networks."""
    one, two = _saved_values(saved), _saved_values(other)
    unused = unused_fields(build_unchecked(ModelRequest, {name: frozen(value) for name, value in one.items()}))
    for field in fields_of(ModelConfig):
        if field.name in unused:
            continue
        is_context = field.name == "max_position_embeddings" and one.get("position_embedding_type") != LEARNED
        if is_context and one.get("rope_scaling_type") == "none":
            continue  # neither weights nor frequencies depend on it
        if resume_rule(field) == MUST_MATCH and one.get(field.name) != two.get(field.name):
            yield field.name, one.get(field.name), two.get(field.name)


def _saved_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved values by name, with defaults for architecture fields that an older version did not have."""
    values = {name: value for _, name, value in saved_fields(saved)}
    names = [field.name for field in fields_of(ModelRequest)]
    model = build_unchecked(ModelRequest, {name: frozen(values[name]) for name in names if name in values})
    known = {name: plain(getattr(model, name)) for name in names}
    return {**{name: value for name, value in known.items() if value is not Unset.COMPUTED}, **values}


def _differences(
    saved: Mapping[str, Any], current: RunConfig
) -> Iterator[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Yields (section, field, saved value, current value) wherever both are known and differ."""
    unused = unused_fields(current.model)
    for section, cls in sections_of(RunConfig).items():
        for field in fields_of(cls):
            if section == "model" and field.name in unused:
                continue
            now = plain(getattr(getattr(current, section), field.name))
            if field.name in saved and not _is_same(field.name, saved[field.name], now):
                yield section, field, frozen(saved[field.name]), frozen(now)


def _is_same(name: str, then: Any, now: Any) -> bool:
    return bool(then == now) or (name == "split" and read_split(str(then)) == read_split(str(now)))


def _notable(current: RunConfig) -> frozenset[str]:
    """Fields whose change gets a notice, including the micro-batch size if experts are balanced over it."""
    scope = current.model.moe_aux_loss_scope if current.model.expert_counts else None
    return _NOTABLE | {"micro_batch_size"} if scope == MICRO_BATCH else _NOTABLE


def _rule(section: str, field: dataclasses.Field[Any], current: RunConfig) -> str:
    if current.optim.use_checkpoint_lr_scheduler and section == "optim" and field.name in SCHEDULE_FIELDS:
        return FROM_CHECKPOINT
    # The average of the iterates is derived from the state with β₁.
    if field.name == "optimizer" or (field.name == "adam_beta1" and current.optim.optimizer in AVERAGING):
        return _STATE_MUST_MATCH if current.loading.takes_optimizer_state else MAY_CHANGE
    if field.name == "max_position_embeddings" and current.model.position_embedding_type != LEARNED:
        if not current.was_given("model.max_position_embeddings"):
            return FROM_CHECKPOINT
        return MUST_MATCH if current.model.rope_scaling_type != "none" else MAY_CHANGE
    if field.name == "split" and not current.data.data_path:
        return MAY_CHANGE  # unused; the data plan compares the ranges themselves
    return resume_rule(field)


def _schedule_problems(saved: Mapping[str, Any], optim: OptimConfig) -> Iterator[str]:
    """Differences that would make the checkpoint's schedule give other learning rates."""
    then, now = _unit(saved), _unit(vars(optim))
    by_samples = then != "iters"
    if by_samples != optim.is_counted_in_samples:
        yield (
            f"--use-checkpoint-lr-scheduler: the checkpoint's schedule is measured in --train-{then}, but this run has "
            f"--train-{now}. Use --train-{then}, or drop --use-checkpoint-lr-scheduler."
        )
    elif not by_samples and saved.get("global_batch_size", optim.global_batch_size) != optim.global_batch_size:
        then = saved["global_batch_size"]
        yield (
            f"--use-checkpoint-lr-scheduler: the checkpoint's schedule is measured in steps of {then} samples, but "
            f"--global-batch-size is {optim.global_batch_size}. Use {then}, or drop --use-checkpoint-lr-scheduler."
        )


def _fix_decay(saved: Mapping[str, Any], optim: OptimConfig, taken: dict[str, dict[str, Any]]) -> None:
    """Keeps the length of a decay over the whole saved run, so that a longer run does not extend it."""
    unit = _unit(saved)
    if any(saved.get(f"lr_decay_{kind}") for kind in ("iters", "samples", "tokens")):
        return  # an explicit length is taken from the checkpoint
    length = saved.get("most_iters") or saved.get(f"train_{unit}")
    if length is not None and length != (optim.most_iters or getattr(optim, f"train_{unit}")):
        taken.setdefault("optim", {})[f"lr_decay_{unit}"] = length


def _unit(optim: Mapping[str, Any]) -> str:
    """The unit of a run and its decay: samples, tokens or iters."""
    if optim.get("most_iters") is not None:
        return "iters"
    given = (unit for unit in ("samples", "tokens") if optim.get(f"train_{unit}") is not None)
    return next(given, "iters")


def _must_match_sentence(section: str, field: dataclasses.Field[Any], then: Any, now: Any, rule: str) -> str:
    name = f"--{field.name.replace('_', '-')}"
    if "derived" in field.metadata:
        return (
            f"{section}.{field.name} ({field.metadata['derived']}) is {_shown(now)}, but the checkpoint was saved with "
            f"{_shown(then)}. They must match: use the checkpoint's tokenizer files and --vocab-size."
        )
    if field.name == "split":
        then, now = shown_split(then), shown_split(now)
    hint = " To start a new run from its weights, use --finetune." if rule == RUN_MUST_MATCH else ""
    hint = " To load only its weights, use --no-load-optim." if rule == _STATE_MUST_MATCH else hint
    switch = isinstance(then, bool)
    fix = (name if then else f"--no-{field.name.replace('_', '-')}") if switch else f"{name} {_shown(then)}"
    saved, remedy = (f"saved with {_shown(then)}", f"use {fix}")
    if then is None:
        saved, remedy = "saved without it", f"drop {name}"
    return f"{name} is {_shown(now)}, but the checkpoint was {saved}. They must match: {remedy}.{hint}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if text.isprintable() and len(text) <= _LONGEST_SHOWN else printable(text, _LONGEST_SHOWN)
