"""A model directory becomes a checkpoint with equal logits, or nothing; training continues from it in any layout."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron.checkpoint import newest_record, read_tensors
from megatron.checkpoint.record import Record
from megatron.config import RunConfig
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import ConfigError, ConversionError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import losses, train_here
from tests.trident.convert.comparison import export
from tests.trident.convert.tiny_models import END, TOKENS, write_tokenizer
from trident.convert.hugging_face import importing
from trident.convert.hugging_face.importing import ModelImportRequest, import_model, unfinished_folder
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.table.tensors import gate_and_up

TinyModel = Callable[[str], Path]
NAME = "llama-grouped-llama3"
LENGTH = 32  # tokens of a sample: more than the original context of that model


@pytest.fixture(scope="module")
def imported(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_model(ModelImportRequest(tiny_model(NAME), tmp_path_factory.mktemp("import") / "llama"))


def copied(source: Path, target: Path, **fields: Any) -> Path:
    """A copy of a model directory with other fields in its `config.json`."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


def test_the_proof_says_what_was_compared(imported: Path) -> None:
    proof = json.loads((imported / "proof.json").read_text())
    assert proof["is_equal"] and proof["largest_difference"] <= 1e-5 * proof["largest_logit"]
    assert (proof["model_type"], proof["layers"], proof["dtype"]) == ("llama", 3, "float32")
    assert proof["versions"].keys() == {"trident-megatron", "transformers", "torch", "python"}
    kinds = [(sequence["kind"], len(sequence["tokens"])) for sequence in proof["sequences"]]
    assert proof["gradient"]["largest_difference"] <= 1e-5 * proof["gradient"]["largest"]
    assert proof["gradient"]["left_out"] is None
    assert kinds == [("random", 16), ("real", 16), ("random", 64), ("real", 64)], "within the context, and beyond it"


def test_the_weights_are_those_of_the_files(imported: Path, tiny_model: TinyModel) -> None:
    stored = load_file(tiny_model(NAME) / "model.safetensors")
    ours = dict(read_tensors(imported / "iter_0000000"))
    fused = ours["decoder.layers.2.self_attention.linear_qkv.weight"]  # [g, q + 2, d, h]
    attention = "model.layers.2.self_attn"
    assert torch.equal(fused[:, :2].reshape(48, 48), stored[f"{attention}.q_proj.weight"])
    assert torch.equal(fused[:, 2].reshape(24, 48), stored[f"{attention}.k_proj.weight"])
    assert torch.equal(fused[:, 3].reshape(24, 48), stored[f"{attention}.v_proj.weight"])
    gate, up = ours["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(gate, stored["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(up, stored["model.layers.0.mlp.up_proj.weight"])
    assert all(values.dtype == torch.float32 for values in ours.values())


def test_half_precision_stays(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_model(NAME), dtype=torch.bfloat16).save_pretrained(source)
    write_tokenizer(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": None}))  # which some files have
    made = import_model(ModelImportRequest(source, tmp_path / "imported"))
    assert {values.dtype for _, values in read_tensors(made / "iter_0000000")} == {torch.bfloat16}
    found = newest_record(made, ParallelMesh.single())
    assert found is not None and found.record["config"]["precision"]["bf16"], "text is generated in it"
    again = load_file(export(made, tmp_path / "exported") / "model.safetensors")
    stored = load_file(source / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


def test_layers_that_predict_further_tokens_are_not_imported(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number is that of the layer after the last; transformers ignores them in the published size only."""
    source = copied(tiny_model("deepseek-v3"), tmp_path / "model", num_nextn_predict_layers=1)
    weights = load_file(source / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.layers.3.enorm.weight": torch.ones(48)}
    save_file({**weights, **further}, source / "model.safetensors", metadata={"format": "pt"})
    made = import_model(ModelImportRequest(source, tmp_path / "imported"))
    assert "2 tensors are not imported (model.layers.3." in "".join(capsys.readouterr())
    assert not [name for name, _ in read_tensors(made / "iter_0000000") if ".layers.3." in name]
    state = "decoder.layers.1.mlp.router.expert_bias"
    assert torch.equal(
        dict(read_tensors(made / "iter_0000000"))[state], weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    )
    folder = export(made, tmp_path / "exported", "bfloat16")
    kinds = {name: values.dtype for name, values in load_file(folder / "model.safetensors").items()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }


def test_a_padding_token_of_the_model_is_left_out_and_said_so(
    tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = copied(tiny_model(NAME), tmp_path / "model", pad_token_id=END)
    made = import_model(ModelImportRequest(source, tmp_path / "imported"))
    assert json.loads((made / "proof.json").read_text())["gradient"]["left_out"] == END
    assert f"the padding token {END} is skipped: transformers does not train its embedding" in "".join(
        capfd.readouterr()
    )


def test_a_wrong_table_leaves_nothing(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of({"model_type": "llama"})
    layer = "model.layers.{layer}.mlp."
    swapped = gate_and_up("decoder.layers.{layer}.mlp.linear_fc1", layer + "up_proj", layer + "gate_proj")
    rules = tuple(rule for rule in family.tensors if "linear_fc1" not in rule.ours)
    wrong = dataclasses.replace(family, tensors=(*rules, *swapped))
    monkeypatch.setattr(importing, "family_of", lambda config: wrong)
    with pytest.raises(ConversionError, match=r"the logits differ from transformers' by \d.*is allowed"):
        import_model(ModelImportRequest(tiny_model(NAME), tmp_path / "made"))
    assert not list(tmp_path.iterdir())


def test_weights_without_values_prove_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = copied(tiny_model("gpt2"), tmp_path / "zeros")
    file = source / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:header] + bytes(len(content) - header))
    with pytest.raises(ConversionError, match="the largest logit of .*zeros is 0.0, which proves nothing"):
        import_model(ModelImportRequest(source, tmp_path / "made"))


def test_the_first_layers_can_stand_for_all(tiny_model: TinyModel, tmp_path: Path) -> None:
    made = import_model(ModelImportRequest(tiny_model("qwen2-window"), tmp_path / "made", proof_layers=3))
    proof = json.loads((made / "proof.json").read_text())
    assert (proof["layers"], proof["layers_of_model"]) == (3, 4), "layer 2 is the first with a window"
    assert proof["is_equal"]


def test_an_existing_folder_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"{tmp_path} already exists"):
        import_model(ModelImportRequest(tiny_model(NAME), tmp_path))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mamba"}, '"model_type": "mamba", which cannot be converted. Known are gpt2, llama'),
        ({"hidden_act": "mish"}, '"hidden_act": "mish", which is not among the supported values "silu"'),
        ({"num_attention_heads": "4"}, '"num_attention_heads": "4", which should be an integer'),
        ({"some_switch": True}, '"some_switch": true, which is unknown in this family'),
        ({"num_attention_heads": 3}, "network that cannot be built: --num-attention-heads 3 is not divisible"),
        ({"num_hidden_layers": 2}, "unexpected: model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 64}, r"of another shape: model.layers.0.mlp.gate_proj.weight has shape \[80, 48\]"),
        ({"attention_bias": True}, "missing: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConversionError, match=says):
        import_model(ModelImportRequest(copied(tiny_model(NAME), tmp_path / "source", **fields), tmp_path / "made"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_missing_field_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = copied(tiny_model(NAME), tmp_path / "source", hidden_size=None)
    with pytest.raises(ConversionError, match="config.json has no hidden_size, which this family requires"):
        import_model(ModelImportRequest(source, tmp_path / "made"))


def test_a_tokenizer_is_needed_and_must_fit(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = copied(tiny_model(NAME), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConversionError, match=f"{source} has no tokenizer .*--tokenizer-name-or-path"):
        import_model(ModelImportRequest(source, tmp_path / "made"))
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other", TOKENS + 20)
    with pytest.raises(ConversionError, match="tokenizer in .*other has 300 tokens, and the model has rows for 280"):
        import_model(ModelImportRequest(source, tmp_path / "made", tokenizer=tmp_path / "other"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "source"]


@pytest.mark.parametrize("form", ["only the head is stored", "the index names a head that is not stored"])
def test_a_tied_matrix_is_found_whatever_its_name(tiny_model: TinyModel, tmp_path: Path, form: str) -> None:
    source = copied(tiny_model("llama-multi-query-linear"), tmp_path / "source")
    file = source / "model.safetensors"
    stored = load_file(file)
    assert "lm_head.weight" not in stored
    if form.startswith("only"):
        stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    else:
        named = dict.fromkeys([*stored, "lm_head.weight"], file.name)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    save_file(stored, file, {"format": "pt"})
    made = import_model(ModelImportRequest(source, tmp_path / "made", has_tokenizer=False))
    assert json.loads((made / "proof.json").read_text())["is_equal"]


def test_weights_can_be_imported_without_a_tokenizer(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = copied(tiny_model(NAME), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    made = import_model(ModelImportRequest(source, tmp_path / "made", has_tokenizer=False))
    proof = json.loads((made / "proof.json").read_text())
    assert proof["is_equal"] and {sequence["kind"] for sequence in proof["sequences"]} == {"random"}
    assert f"vocab-size: {TOKENS}\n" in (made / "model.yaml").read_text() and not (made / "tokenizer").exists()
    found = newest_record(made, ParallelMesh.single())
    assert found is not None
    record = Record.from_json(found.record, found.path)
    data = RunConfig.from_json(record.config).data
    with pytest.raises(
        ConfigError, match=rf"{made}/tokenizer does not exist: .*\(--no-tokenizer\), which text and training require"
    ):
        build_tokenizer(data)
    for tokens, fits in ((TOKENS - 5, True), (TOKENS, True), (TOKENS + 1, False)):
        assert record.tokenizer.is_of(TokenizerRecord("mine", "ab" * 32, tokens)) is fits
    (made / "tokenizer").mkdir()
    write_tokenizer(made / "tokenizer")
    assert build_tokenizer(data).vocab_size == TOKENS, "it is found where one is laid afterwards"


def test_a_token_that_was_added_for_another_model_needs_no_row(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one id more, for images, than the text model has rows."""
    source = copied(tiny_model(NAME), tmp_path / "source")
    described = json.loads((source / "tokenizer.json").read_text())
    image = {
        "id": TOKENS,
        "content": "<image>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    described["added_tokens"] = [*(described.get("added_tokens") or []), {**image, "normalized": False}]
    (source / "tokenizer.json").write_text(json.dumps(described))
    made = import_model(ModelImportRequest(source, tmp_path / "made"))
    assert f"vocab-size: {TOKENS}\n" in (made / "model.yaml").read_text()


def test_without_transformers_nothing_starts(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"logits, which is not installed. Run pip install .*\[hf\]"):
        import_model(ModelImportRequest(tiny_model(NAME), tmp_path / "made"))


def test_a_directory_that_transformers_cannot_load_is_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something is wrong inside")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(ConversionError, match=r"transformers cannot load .*\(RuntimeError: something is wrong inside"):
        import_model(ModelImportRequest(tiny_model(NAME), tmp_path / "made"))


def test_tensors_that_transformers_fills_in_are_noticed(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers` draws a missing tensor at random and only reports it."""
    load = AutoModelForCausalLM.from_pretrained

    def incomplete(*arguments: Any, **named: Any) -> Any:
        model, report = load(*arguments, **named)
        return model, {**report, "missing_keys": {"lm_head.weight"}}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", incomplete)
    with pytest.raises(ConversionError, match=r"only in part: missing_keys \['lm_head.weight'\]"):
        import_model(ModelImportRequest(tiny_model(NAME), tmp_path / "made"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"cannot create the folder .*file/\.made\."),
        unfinished_folder(tmp_path / "file" / "made"),
    ):
        pass


def test_a_folder_that_cannot_be_finished_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="cannot finish .*made: .*Nothing was written"),
        unfinished_folder(tmp_path / "made"),
    ):
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "taken").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def write_corpus(prefix: str) -> list[int]:
    """A corpus whose samples are all the same tokens; returns those of one sample and the token after it."""
    sample = np.random.default_rng(3).integers(0, END, LENGTH)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([np.append(np.tile(sample, 20), sample[0])])
    return [*sample.tolist(), int(sample[0])]


@pytest.mark.slow
def test_training_continues_in_another_layout(imported: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    """On tp2 x pp2: the first loss is that of transformers, and an export from there is the directory's own weights."""
    tokens = torch.tensor([write_corpus(str(tmp_path / "corpus_text_document"))])
    flags = [
        *("--config", imported / "model.yaml", "--load", imported, "--finetune", "--save", tmp_path / "out"),
        *("--save-interval", 1, "--data-path", tmp_path / "corpus_text_document", "--seq-length", LENGTH),
        *("--micro-batch-size", 1, "--global-batch-size", 1, "--train-iters", 1, "--lr", 0, "--min-lr", 0),
        *("--weight-decay", 0, "--eval-iters", 0, "--split", "100,0,0", "--run-dir", tmp_path / "run"),
        *("--log-interval", 1, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
    ]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    assert max(run_ranks(train_here, 4, list(map(str, flags)))) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(tiny_model(NAME))
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss)
    assert losses(tmp_path)[1] == pytest.approx(expected, rel=1e-5)
    from_four, from_one = (
        export(folder, tmp_path / name) for folder, name in ((tmp_path / "out", "4"), (imported, "1"))
    )
    assert (from_four / "model.safetensors").read_bytes() == (from_one / "model.safetensors").read_bytes()
    stored, again = (load_file(folder / "model.safetensors") for folder in (tiny_model(NAME), from_four))
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
