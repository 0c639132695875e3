"""`model.yaml`: the flags of an imported model, with which a run continues its training (`--config model.yaml`)."""

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

_ALWAYS = ("max_position_embeddings",)  # its default comes from another section, the length of a sample
_ALWAYS_OF_ENCODERS = ("masked_lm_head", "sentence_order_head")  # pretrain_bert.py has both unless flags say otherwise
_USUAL_TOKENS = 1024  # of a sample, where the model has that many positions


def model_file_text(model: ModelConfig, choice: TokenizerChoice, tokenizer: Tokenizer | None, origin: str) -> str:
    """The text of `model.yaml`.

    Args:
        tokenizer: the one that the flags describe; None if the model came without one.
        origin: where the model came from, in words.
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
        model_file: where `model.yaml` and the tokenizer next to it are while the import is not finished.
        target: the folder that they will be in.
        tokenizer: None if the model came without one.
        dtype: the element type of the weights as safetensors names it, in which text is generated.
        family: the family of the model.

    Raises:
        ConfigError: the flags do not make up a run.
    """
    length = min(_USUAL_TOKENS, model.max_position_embeddings)
    flags = [
        *("--config", str(model_file), "--seq-length", str(length), "--no-save-optim", "--data-path", "none"),
        *("--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-5"),
        *{"BF16": ("--bf16",), "F16": ("--fp16",)}.get(dtype, ()),
    ]
    nothing = TokenizerRecord(NO_TOKENIZER, None, model.vocab_size)
    recorded = nothing if tokenizer is None else TokenizerRecord.of(tokenizer)
    record = untrained_record(flags, recorded, target)
    name = recorded.name.replace(str(model_file.parent), str(target.absolute()))
    return dataclasses.replace(record, tokenizer=dataclasses.replace(recorded, name=name), family=family)


def untrained_record(words: Sequence[str], tokenizer: TokenizerRecord, target: Path) -> Record:
    """The record of a run that was never made: on one process, with the `model.yaml` of the target folder.

    Args:
        words: the command line.

    Raises:
        ConfigError: the flags do not make up a run.
    """
    machine = Machine("cpu", 1, True, True, supports_fp8=True)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id or 0, tokenizer.fingerprint or "")
    config = resolve(parse(words), machine, facts)
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
        is_usual = value is None or (not flag.required and value == _usual_value(flag, model))
        if flag.field in _ALWAYS or (model.bidirectional and flag.field in _ALWAYS_OF_ENCODERS) or not is_usual:
            yield flag.field.replace("_", "-"), value
    if model.bidirectional:
        yield "objective", MASKED
    if tokenizer is None or tokenizer.vocab_size != model.vocab_size:
        yield "vocab-size", model.vocab_size
    for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_name_or_path"):
        if getattr(choice, name) is not None:
            yield name.replace("_", "-"), getattr(choice, name)


def _usual_value(flag: Flag, model: ModelConfig) -> Any:
    """The value of a flag that is left out; None where only another section can say."""
    computed = flag.facts.computed
    if computed is None:
        return flag.default
    return None if flag.field in _ALWAYS else computed(model)


def yaml_value(value: Any) -> str:
    """A value as YAML, a superset of JSON except for numbers such as 1e-05, which YAML reads as text."""
    if isinstance(value, float):
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
