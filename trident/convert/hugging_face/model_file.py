"""Writes `model.yaml`: the flags of an imported model, to continue its training (`--config model.yaml`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron import __version__
from megatron.checkpoint.record import Progress, Record
from megatron.config import Machine, ModelConfig, TokenizerFacts, parse, resolve
from megatron.config.flags.fields import Flag, flags_of
from megatron.config.objective.loss import MASKED
from megatron.config.sections.model import ModelRequest
from megatron.data.order.plan import DataPlan
from megatron.tokenizers.record import NO_TOKENIZER, TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice

MODEL_FILE = "model.yaml"

_ALWAYS = ("max_position_embeddings",)  # its default depends on another section: the sequence length
_ALWAYS_OF_ENCODERS = ("masked_lm_head", "sentence_order_head")  # enabled by default in pretrain_bert.py
_DEFAULT_TOKENS = 1024  # sequence length, if the model has that many positions


def model_file_text(model: ModelConfig, choice: TokenizerChoice, tokenizer: Tokenizer | None, origin: str) -> str:
    """The text of `model.yaml`.

    Args:
        tokenizer: the tokenizer of the flags, if any.
        origin: description of the model's origin.
    """
    program = "pretrain_bert.py" if model.bidirectional else "pretrain_gpt.py"
    lines = [f"# {origin}", f"# Flags of {program} by name; the command line wins over them."]
    lines += [f"{name}: {yaml_value(value)}" for name, value in model_flags(model, choice, tokenizer)]
    return "\n".join(lines) + "\n"


def imported_record(
    model_file: Path, target: Path, model: ModelConfig, tokenizer: Tokenizer | None, dtype: str, family: str = ""
) -> Record:
    """The record of a checkpoint without training: step 0, no optimizer state, the flags of `model.yaml`.

    Args:
        model_file: path of `model.yaml`, next to the tokenizer, during the import.
        target: their final folder.
        tokenizer: None if the model has none.
        dtype: safetensors' element type of the weights, also used for generation.
        family: the family of the model.

    Raises:
        ConfigError: the flags are not valid for a run.
    """
    length = min(_DEFAULT_TOKENS, model.max_position_embeddings)
    flags = [
        *("--config", str(model_file), "--seq-length", str(length), "--no-save-optim", "--data-path", "none"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-5"),
        *{"BF16": ("--bf16",), "F16": ("--fp16",)}.get(dtype, ()),
    ]
    no_tokenizer = TokenizerRecord(NO_TOKENIZER, None, model.vocab_size)
    recorded = no_tokenizer if tokenizer is None else TokenizerRecord.of(tokenizer)
    record = untrained_record(flags, recorded, target)
    name = recorded.name.replace(str(model_file.parent), str(target.absolute()))
    return dataclasses.replace(record, tokenizer=dataclasses.replace(recorded, name=name), family=family)


def untrained_record(arguments: Sequence[str], tokenizer: TokenizerRecord, target: Path) -> Record:
    """The record of a hypothetical run on one process, with the `model.yaml` of the target folder.

    Args:
        arguments: the command line.

    Raises:
        ConfigError: the flags are not valid for a run.
    """
    machine = Machine("cpu", 1, True, True, supports_fp8=True)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id or 0, tokenizer.fingerprint or "")
    config = resolve(parse(arguments), machine, facts)
    files = dataclasses.replace(config.files, config=str(target.absolute() / MODEL_FILE))
    return Record(
        progress=Progress(),
        optimizer_updates=0,
        loss_scale={},
        config=dataclasses.replace(config, files=files).to_json(),
        data_plan=DataPlan(
            config.data.seq_length, config.random.seed, config.data.index_epoch_rule, train=None, valid=(), test=()
        ),
        data={},
        tokenizer=tokenizer,
        program_version=__version__,
    )


def model_flags(model: ModelConfig, choice: TokenizerChoice, tokenizer: Tokenizer | None) -> Iterator[tuple[str, Any]]:
    """Names and values of the flags that differ from their defaults."""
    for flag in flags_of(ModelRequest):
        if flag.field == "vocab_size":
            continue
        value = getattr(model, flag.field)
        is_default = value is None or (not flag.required and value == _default_value(flag, model))
        if flag.field in _ALWAYS or (model.bidirectional and flag.field in _ALWAYS_OF_ENCODERS) or not is_default:
            yield flag.field.replace("_", "-"), value
    if model.bidirectional:
        yield "objective", MASKED
    if tokenizer is None or tokenizer.vocab_size != model.vocab_size:
        yield "vocab-size", model.vocab_size
    for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_name_or_path"):
        if getattr(choice, name) is not None:
            yield name.replace("_", "-"), getattr(choice, name)


def _default_value(flag: Flag, model: ModelConfig) -> Any:
    """The default of a flag; None if it depends on another section."""
    computed = flag.facts.computed
    if computed is None:
        return flag.default
    return None if flag.field in _ALWAYS else computed(model)


def yaml_value(value: Any) -> str:
    """Formats a value as YAML: JSON, except for numbers such as 1e-05, which YAML reads as strings."""
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
