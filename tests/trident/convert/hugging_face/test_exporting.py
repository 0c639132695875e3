"""A checkpoint becomes a directory that Hugging Face's libraries load offline, with equal logits, or nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint import newest_record
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.record import Record
from megatron.config import RunConfig
from megatron.errors import CheckpointError, ConversionError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import ChatTemplate, load_chat_template
from megatron.tokenizers.chat.named import SOURCES
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from megatron.train.restarts.identity import base_of
from tests.helpers.vocabulary import write_vocabulary
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import CHATML_TOKENS, DSGPT2_TOKENS, LLAMA_TOKENS, hugging_face_with
from tests.trident.convert.tiny_models import END
from trident.convert.hugging_face import exporting, streaming
from trident.convert.hugging_face.exporting import ExportRequest, export_model, tuned_template
from trident.convert.hugging_face.importing import ModelImportRequest, import_model
from trident.convert.hugging_face.model_tokenizer import check_same_ids, write_chat_template, write_tokenizer
from trident.convert.hugging_face.registry import family_for

TinyModel = Callable[[str], Path]
NAME = "llama-multi-query-linear"


@pytest.fixture(scope="module")
def imported(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_model(ModelImportRequest(tiny_model(NAME), tmp_path_factory.mktemp("export") / "llama"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a GPT-2 with the tokenizer of vocab.json and merges.txt."""
    return make_checkpoint(tmp_path_factory.mktemp("trained"))


def request(checkpoints: Path, target: Path, **changes: Any) -> ExportRequest:
    found = newest_record(checkpoints, ParallelMesh.single())
    assert found is not None
    record = Record.from_json(found.record, found.path)
    config = RunConfig.from_json(record.config)
    made = ExportRequest(found.path, target, config.model, TokenizerChoice.of(config.data), record.tokenizer)
    return dataclasses.replace(made, **changes)


def loaded(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(report.values()), report
    return model


def test_a_trained_gpt2_loads_offline(trained: Path, tmp_path: Path) -> None:
    folder = export_model(request(trained, tmp_path / "gpt2"))
    model = loaded(folder)
    assert type(model).__name__ == "GPT2LMHeadModel" and model.dtype == torch.float32
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "proof.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert load_file(folder / "model.safetensors")["transformer.wte.weight"].shape == (600, 32), "no padding"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = build_tokenizer(request(trained, tmp_path).tokenizer)
    text = "import os\n\n# naïve 漢字 <|endofte"
    assert tokenizer(text)["input_ids"] == ours.encode(text) and tokenizer.decode(ours.encode(text)) == text
    assert tokenizer.eos_token_id == ours.eod_id == model.config.eos_token_id
    assert model.generation_config.eos_token_id == ours.eod_id
    assert tokenizer.model_max_length == 48
    assert json.loads((folder / "proof.json").read_text())["is_equal"]


def test_means_of_weights_are_exported_and_proved(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, mean_ratio=0.5)
    weights, means = (
        loaded(export_model(request(checkpoints, tmp_path / kind, kind=kind))).state_dict()
        for kind in ("weight", "average")
    )
    name = "transformer.h.0.mlp.c_fc.weight"
    assert weights[name].any() and torch.equal(means[name], weights[name] * 0.5)


def test_means_that_no_run_kept_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds no averaged weights \(--averaged-weights\).* without --ema-decay"
    ):
        export_model(request(trained, tmp_path / "out", kind="average"))


def test_a_chosen_type_is_rounded_to_and_proved(imported: Path, tmp_path: Path) -> None:
    folder = export_model(request(imported, tmp_path / "half", dtype="bfloat16"))
    assert loaded(folder).dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {values.dtype for values in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "proof.json").read_text())["weights_rounded_to"] == "bfloat16"


def test_files_of_a_chosen_size_load(imported: Path, tmp_path: Path) -> None:
    folder = export_model(request(imported, tmp_path / "parts", largest_file_bytes=60_000))
    files = sorted(path for path in folder.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(path.stat().st_size for path in files) < 65_000
    assert not (folder / "model.safetensors").exists()
    loaded(folder)


def test_both_forms_of_the_rotation_are_written(imported: Path, tmp_path: Path) -> None:
    folder = export_model(request(imported, tmp_path / "llama"))
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 4.0}
    assert AutoConfig.from_pretrained(folder).rope_parameters["factor"] == 4.0
    assert config["eos_token_id"] == END and "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_small_slices_write_the_same_file(imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_model(request(imported, tmp_path / "1"))
    monkeypatch.setattr(streaming, "SLICE_BYTES", 700)
    cut = export_model(request(imported, tmp_path / "2"))
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()


def test_a_padding_token_that_is_none_is_noticed(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*given: Any) -> dict[str, Any]:
        return {**surroundings(*given), "pad_token_id": END}

    surroundings = exporting._generation_fields
    monkeypatch.setattr(exporting, "_generation_fields", planted)
    with pytest.raises(
        ConversionError, match=f"gradient of the embedding of token {END} differs .*Nothing was written"
    ):
        export_model(request(imported, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_family_can_be_chosen(imported: Path, tmp_path: Path) -> None:
    folder = export_model(request(imported, tmp_path / "mistral", model_type="mistral"))
    assert type(loaded(folder)).__name__ == "MistralForCausalLM"
    with pytest.raises(ConversionError, match=r"--model-type mamba is unknown. Known are gpt2, llama"):
        export_model(request(imported, tmp_path / "mamba", model_type="mamba"))
    with pytest.raises(ConversionError, match=r"of type gpt2 cannot express .*--position-embedding-type rope"):
        export_model(request(imported, tmp_path / "gpt2", model_type="gpt2"))


def test_a_network_that_no_family_has_is_refused(trained: Path, tmp_path: Path) -> None:
    wanted = request(trained, tmp_path / "odd")
    odd = dataclasses.replace(wanted.model, output_logit_softcap=30.0)
    with pytest.raises(ConversionError, match=r"no family can express .*--output-logit-softcap 30.0"):
        export_model(dataclasses.replace(wanted, model=odd))
    assert not list(tmp_path.iterdir())


def test_the_family_of_the_import_comes_back(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Phi-3's network is one that Llama's family can express, which is looked at first."""
    made = import_model(ModelImportRequest(tiny_model("phi3"), tmp_path / "phi3"))
    found = newest_record(made, ParallelMesh.single())
    assert found is not None
    record = Record.from_json(found.record, found.path)
    assert record.first_family == "phi3"
    base = base_of(record, read_manifest(found.path))
    tuned = dataclasses.replace(record, family="", run_id="0" * 16, finetuned_from=base)
    assert Record.from_json(tuned.to_json(), found.path).first_family == "phi3", "after a fine-tuning"
    assert family_for(RunConfig.from_json(record.config).model).model_type != "phi3"
    folder = export_model(request(made, tmp_path / "again", origin=record.first_family))
    assert type(loaded(folder)).__name__ == "Phi3ForCausalLM"
    other = export_model(request(made, tmp_path / "other", origin="bloom"))
    assert json.loads((other / "config.json").read_text())["model_type"] == "mistral", "bloom cannot express it"


CONVERSATION = (
    {"role": "user", "content": "Is one < two?"},
    {"role": "assistant", "content": "Yes, it is."},
    {"role": "user", "content": "and\nnow?"},
    {"role": "assistant", "content": "No. 1 + 1\nis 2!"},
)
LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\n"
THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<usr>' + message.content }}"
    "{% else %}{{ '<sys>' + message.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<sys><think>\\n' }}{% endif %}"
)
BLOCKS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}A:{% generation %}{{ message.content }}"
    "{% endgeneration %}</s>{% else %}Q:{{ message.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose vocabulary has the special tokens of every template by name."""
    tokens = dict.fromkeys((*CHATML_TOKENS, *LLAMA_TOKENS, *DSGPT2_TOKENS))
    return make_checkpoint(tmp_path_factory.mktemp("chatting"), more_tokens=tuple(tokens))


@pytest.mark.parametrize("name", [*SOURCES, "lines", "thinking", "blocks"])
def test_transformers_gives_conversations_the_trainers_ids(name: str, chatting: Path, tmp_path: Path) -> None:
    written = {"lines": LINES, "thinking": THINKING, "blocks": BLOCKS}.get(name)
    if written is not None:
        (tmp_path / "mine.jinja").write_text(written)
        name = str(tmp_path / "mine.jinja")
    wanted = request(chatting, tmp_path)
    folder, tokenizer = tmp_path / "exported", build_tokenizer(wanted.tokenizer)
    template = load_chat_template(name, None)
    folder.mkdir()
    write_tokenizer(wanted.tokenizer, tokenizer, folder, 48)
    write_chat_template(folder, template, tokenizer)
    check_same_ids(folder, tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    for count in (2, 4):
        if name == "llama" and count > 2:  # GPT-2's rules cut the empty line before an answer otherwise than by itself
            continue
        ids, _ = template.example_ids(CONVERSATION[:count], tokenizer)
        whole = theirs.apply_chat_template([*CONVERSATION[:count]], return_dict=False)
        assert whole == ids or (name == "llama" and theirs.decode(whole) == tokenizer.decode(ids))
        prompt = theirs.apply_chat_template([*CONVERSATION[: count - 1]], return_dict=False, add_generation_prompt=True)
        assert prompt == template.prompt_ids(CONVERSATION[: count - 1], tokenizer)


def test_an_export_carries_the_template_of_its_tuning(chatting: Path, tmp_path: Path) -> None:
    wanted = request(chatting, tmp_path / "plain")
    found = newest_record(chatting, ParallelMesh.single())
    assert found is not None
    config = RunConfig.from_json(found.record["config"])
    assert tuned_template(None, config.data, wanted.tokenizer) is None, "no examples, no template"
    data = dataclasses.replace(config.data, data_path=("chat.jsonl",))
    tuned = tuned_template(None, data, wanted.tokenizer)
    assert tuned is not None and tuned.name == "plain"
    named = tuned_template("chatml", config.data, wanted.tokenizer)
    assert named is not None and named.name == "chatml"
    folder = export_model(dataclasses.replace(wanted, chat_template=tuned))
    assert (folder / "chat_template.jinja").read_text() == tuned.standalone(build_tokenizer(wanted.tokenizer))


def test_a_template_with_other_ids_in_transformers_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that puts a space before each text does so before an answer in training only."""
    (tmp_path / "made").mkdir()
    tokenizer = hugging_face_with(tmp_path / "made", ("<|endoftext|>",), "<|endoftext|>")
    path = tmp_path / "made" / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(described))
    tokenizer = build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(tmp_path / "made")))
    source = "{% for message in messages %}{{ message.role + ':' + message.content }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    write_chat_template(tmp_path / "made", ChatTemplate("glued", source), tokenizer)
    assert "the chat template glued gives a conversation other ids in transformers" in capsys.readouterr().err


def test_an_existing_folder_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"{tmp_path} already exists"):
        export_model(request(trained, tmp_path))


def test_tensors_that_would_be_lost_are_named(trained: Path, tmp_path: Path) -> None:
    wanted = request(trained, tmp_path / "less")
    smaller = dataclasses.replace(wanted.model, num_layers=1)
    with pytest.raises(ConversionError, match=r"iter_0000003 holds decoder.layers.1.input_layernorm.bias, .*be lost"):
        export_model(dataclasses.replace(wanted, model=smaller))


EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--swiglu", "--normalization"),
    *("RMSNorm", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
)


def test_what_a_router_keeps_for_its_loss_is_left_out(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, *EXPERTS, "--moe-aux-loss-scope", "global")
    wanted = request(checkpoints, tmp_path / "mixtral")
    assert "decoder.layers.0.mlp.router.expert_shares" in read_manifest(wanted.checkpoint).catalogue.names()
    assert type(loaded(export_model(wanted))).__name__ == "MixtralForCausalLM"


def test_multi_token_prediction_is_left_out_and_said_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = request(make_checkpoint(tmp_path, *EXPERTS, "--mtp-num-layers", "1"), tmp_path / "mixtral")
    assert "mtp.layers.0.eh_proj.weight" in read_manifest(wanted.checkpoint).catalogue.names()
    model = loaded(export_model(wanted))
    assert type(model).__name__ == "MixtralForCausalLM" and model.config.num_hidden_layers == 2
    output = capfd.readouterr()
    assert "the weights of --mtp-num-layers 1 are skipped: transformers does not" in output.out + output.err


def test_the_bias_of_a_router_is_not_lost(tmp_path: Path) -> None:
    """Without it, tokens would go to other experts."""
    wanted = request(make_checkpoint(tmp_path, *EXPERTS, "--moe-router-enable-expert-bias"), tmp_path / "mixtral")
    with pytest.raises(
        ConversionError,
        match="no equivalent of --moe-router-enable-expert-bias. It has --no-moe-router-enable-expert-bias",
    ):
        export_model(wanted)
    unbiased = dataclasses.replace(wanted.model, moe_router_enable_expert_bias=False)
    with pytest.raises(ConversionError, match=r"holds decoder.layers.0.mlp.router.expert_bias, .*be lost"):
        export_model(dataclasses.replace(wanted, model=unbiased))


def test_a_damaged_checkpoint_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    (file,) = copy.glob("iter_*/pieces_*")
    with file.open("r+b") as pieces:
        pieces.seek(-5, 2)
        pieces.write(b"\xff\xff")
    with pytest.raises(CheckpointError, match="is damaged between bytes"):
        export_model(request(copy, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_another_tokenizer_is_refused_or_warned_of(
    trained: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = write_vocabulary(tmp_path, 500)
    with pytest.raises(ConversionError, match="GPT2BPETokenizer has 500 tokens, and the checkpoint .* has 600"):
        export_model(request(trained, tmp_path / "other", tokenizer=smaller))
    first = export_model(request(trained, tmp_path / "first"))
    another_form = TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(first))
    capsys.readouterr()
    export_model(request(trained, tmp_path / "second", tokenizer=another_form))
    assert "is not the file that the checkpoint was trained with (GPT2BPETokenizer)" in capsys.readouterr().err
    assert (first / "tokenizer.json").read_bytes() == (tmp_path / "second" / "tokenizer.json").read_bytes()
