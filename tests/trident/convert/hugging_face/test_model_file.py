"""`model.yaml` describes the network completely, as a run reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.config import ModelConfig, parse
from megatron.errors import ConfigError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.trident.convert.hugging_face.families.published import PUBLISHED
from tests.trident.convert.tiny_models import TOKENS, write_tokenizer
from trident.convert.hugging_face.model_file import imported_record, model_file_text
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.table.family import essential_fields

RUN = (
    *("--data-path", "none", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--seq-length", "64"),
    *("--global-batch-size", "1"),
)


@pytest.fixture
def choice(tmp_path: Path) -> TokenizerChoice:
    write_tokenizer(tmp_path)
    return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_flags_give_the_network_back(name: str, choice: TokenizerChoice, tmp_path: Path) -> None:
    model = family_of(PUBLISHED[name]).read_config(PUBLISHED[name])
    path = tmp_path / "model.yaml"
    path.write_text(model_file_text(model, choice, build_tokenizer(choice), "Imported from here."))
    request = parse(["--config", str(path), *RUN])
    fields = {field: getattr(request.model, field) for field in type(request.model).__dataclass_fields__}
    again = ModelConfig(**fields, padded_vocab_size=model.vocab_size)
    assert essential_fields(again) == essential_fields(model)
    assert (again.hidden_dropout, again.init_method_std) == (model.hidden_dropout, model.init_method_std)
    assert TokenizerChoice.of(request.data) == choice


def test_an_encoder_names_its_program_and_its_heads(choice: TokenizerChoice) -> None:
    model = family_of(PUBLISHED["RoBERTa base"]).read_config(PUBLISHED["RoBERTa base"])
    lines = model_file_text(model, choice, build_tokenizer(choice), "Imported from here.").splitlines()
    assert lines[1].startswith("# Flags of pretrain_bert.py")
    assert {"masked-lm-head: true", "sentence-order-head: false", 'objective: "masked"'} <= set(lines)


def test_a_record_without_training(choice: TokenizerChoice, tmp_path: Path) -> None:
    config = {**PUBLISHED["Llama 3.2 1B"], "vocab_size": TOKENS}
    model, tokenizer = family_of(config).read_config(config), build_tokenizer(choice)
    path = tmp_path / "model.yaml"
    path.write_text(model_file_text(model, choice, tokenizer, "Imported from here."))
    assert path.read_text().startswith("# Imported from here.\n# Flags of pretrain_gpt.py")
    record = imported_record(path, path.parent, model, tokenizer, "BF16")
    assert (record.progress.step, record.optimizer_updates, record.has_optimizer_state) == (0, 0, False)
    assert record.config["precision"]["bf16"] and record.config["data"]["seq_length"] == 1024
    assert record.tokenizer == TokenizerRecord.of(tokenizer)


def test_a_vocabulary_of_another_size_is_a_flag(choice: TokenizerChoice, tmp_path: Path) -> None:
    config = {**PUBLISHED["Llama 3.2 1B"], "vocab_size": TOKENS + 24}
    model, tokenizer = family_of(config).read_config(config), build_tokenizer(choice)
    path = tmp_path / "model.yaml"
    path.write_text(model_file_text(model, choice, tokenizer, "Imported from here."))
    assert imported_record(path, path.parent, model, tokenizer, "F32").config["model"]["vocab_size"] == TOKENS + 24
    smaller = dataclasses.replace(model, vocab_size=TOKENS - 1)
    path.write_text(model_file_text(smaller, choice, tokenizer, "Imported from here."))
    with pytest.raises(ConfigError, match="--vocab-size 279 excludes the end-of-document token, id 279"):
        imported_record(path, path.parent, smaller, tokenizer, "F32")
