"""The tokenizer goes along, in a form that gives the same ids on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron.errors import ConversionError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers import sentencepiece_models
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.convert.tiny_encoders import write_roberta_tokenizer, write_wordpiece_tokenizer
from tests.trident.convert.tiny_models import END
from tests.trident.convert.tiny_models import write_tokenizer as write_tiny_tokenizer
from trident.convert.hugging_face.model_tokenizer import (
    added_tokens,
    adds_special_tokens,
    check_padding,
    check_same_ids,
    copy_tokenizer,
    keep_special_ids,
    name_special_tokens,
    special_ids,
    write_tokenizer,
)
from trident.convert.hugging_face.registry import family_of


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with a tokenizer, and an empty one."""
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    write_tiny_tokenizer(tmp_path / "source")
    return tmp_path / "source", tmp_path / "target"


def test_all_files_of_a_tokenizer_are_copied(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "README.md").write_text("not this one")
    choice = copy_tokenizer(source, target)
    assert choice == TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(target))
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()} - {"README.md"}
    check_same_ids(target, build_tokenizer(choice))
    keep_special_ids(target, {"eos_token_id": 5}, build_tokenizer(choice))
    kept = {"eos_token_id": 5, "temperature": 0.6}
    assert json.loads((target / "generation_config.json").read_text()) == kept, "the model's own stays"


def test_a_class_is_named_where_only_the_model_named_it(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    copy_tokenizer(source, target)
    named = json.loads((target / "tokenizer_config.json").read_text())
    assert named == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_a_tokenizer_without_tokenizer_json_gets_one(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "vocab.json").write_bytes(Path(str(choice.vocab_file)).read_bytes())
    (source / "merges.txt").write_bytes(Path(str(choice.merge_file)).read_bytes())
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    made = build_tokenizer(copy_tokenizer(source, target))
    assert (target / "tokenizer.json").exists()
    assert made.encode("import random") == build_tokenizer(choice).encode("import random")


def test_a_broken_tokenizer_is_named(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text("{")
    with pytest.raises(ConversionError, match=f"{source} has no tokenizer.json and transformers cannot create one"):
        copy_tokenizer(source, target)
    (target / "tokenizer.json").write_text("{")
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConversionError, match=f"transformers cannot load the tokenizer in {target}"):
        check_same_ids(target, build_tokenizer(write_vocabulary(target)))


def test_other_ids_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = folders
    with pytest.raises(
        ConversionError, match=f"the tokenizer in {source} gives 'The treaty was signed in 1648,'... the"
    ):
        check_same_ids(source, build_tokenizer(write_vocabulary(tmp_path)))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": END}),
        ({"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}, "bos_token": "a", "pad_token": "nowhere"},
         {"eos_token_id": END, "bos_token_id": 66}),
        ({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, {"eos_token_id": END}),
        ({}, {"eos_token_id": END}),
    ],
)  # fmt: skip
def test_ids_of_special_tokens(folders: tuple[Path, Path], named: dict[str, Any], expected: dict[str, int]) -> None:
    source, target = folders
    tokenizer = build_tokenizer(copy_tokenizer(source, target))
    (target / "tokenizer_config.json").write_text(json.dumps(named))
    found = special_ids(target, tokenizer)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert found == {**expected, **({"bos_token_id": vocabulary["a"]} if "bos_token" in named else {})}


def test_tokens_declared_beside_the_tokenizer_are_compared_and_counted(folders: tuple[Path, Path]) -> None:
    source, target = folders
    settings = json.loads((source / "tokenizer_config.json").read_text())
    declared = {**settings, "additional_special_tokens": ["<|im_start|>"], "bos_token": "<b>"}
    (source / "tokenizer_config.json").write_text(json.dumps(declared))
    described = json.loads((source / "tokenizer.json").read_text())
    described["model"]["dropout"] = 0.9  # which transformers would apply
    (source / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = build_tokenizer(copy_tokenizer(source, target))
    size = END + 1
    check_same_ids(target, tokenizer)
    assert special_ids(target, tokenizer) == {"eos_token_id": END, "bos_token_id": size}
    assert tokenizer.vocab_size == size + 2 and added_tokens(tokenizer) == {
        "<|endoftext|>": END, "<b>": size, "<|im_start|>": size + 1,
    }  # fmt: skip
    more = {**declared, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    (target / "tokenizer_config.json").write_text(json.dumps(more))
    with pytest.raises(ConversionError, match=r"gives 'a<\|im_end\|>b <\|im_end\|>'\.\.\. the ids"):
        check_same_ids(target, tokenizer)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"eos_token_id": [5, END], "bos_token_id": 3, "pad_token_id": 1}),
        ({"temperature": 0.6, "eos_token_id": []}, {"eos_token_id": END, "bos_token_id": 3, "pad_token_id": 1}),
        ({"eos_token_id": [7, 8], "pad_token_id": 8}, {"eos_token_id": [7, 8], "bos_token_id": 3}),
        ({"eos_token_id": [7], "pad_token_id": 9}, {"eos_token_id": [7], "bos_token_id": 3, "pad_token_id": 9}),
    ],
)
def test_ids_that_end_texts_are_kept_from_an_import_to_an_export(
    folders: tuple[Path, Path], generation: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    source, target = folders
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = build_tokenizer(copy_tokenizer(source, target))
    config = {"eos_token_id": [5, END], "bos_token_id": 3, "pad_token_id": 1, "vocab_size": 9}
    keep_special_ids(target, config, tokenizer)
    assert special_ids(target, tokenizer) == expected
    written = json.loads((target / "generation_config.json").read_text())
    assert written.items() >= {"bos_token_id": 3, **(generation or {})}.items() and "vocab_size" not in written
    (target / "generation_config.json").unlink()
    keep_special_ids(target, {"eos_token_id": [5, END + 1], "bos_token_id": None, "pad_token_id": -1}, tokenizer)
    assert special_ids(target, tokenizer) == {"eos_token_id": END}, "no id beyond the vocabulary"


@pytest.mark.parametrize("content", ["[]", "null"])
@pytest.mark.parametrize("has_json", [True, False])
def test_settings_that_are_no_object_are_named(folders: tuple[Path, Path], content: str, has_json: bool) -> None:
    source, target = folders
    path = source / "tokenizer_config.json"
    path.write_text(content)
    if not has_json:
        (source / "tokenizer.json").rename(source / "vocab.json")
    with pytest.raises(ConversionError, match=rf"{path}, .* holds no JSON object"):
        copy_tokenizer(source, target)
    with pytest.raises(DataError, match=rf"{path} holds no JSON object"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(source)))


def test_gpt2_files_become_a_tokenizer_json(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    tokenizer = build_tokenizer(choice)
    target = tmp_path / "target"
    target.mkdir()
    write_tokenizer(choice, tokenizer, target, 1024)
    check_same_ids(target, tokenizer)
    theirs = AutoTokenizer.from_pretrained(target)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eod_id and len(theirs) == tokenizer.vocab_size
    assert theirs("a<|endoftext|>")["input_ids"][-1] == tokenizer.eod_id
    assert theirs.pad_token is None, "padding has no gradient, and the end of a document has one"


def test_a_wordpiece_vocabulary_becomes_a_tokenizer_with_its_special_tokens(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    write_wordpiece_tokenizer(source)
    choice = TokenizerChoice("BertWordPieceLowerCase", vocab_file=str(source / "vocab.txt"))
    tokenizer = build_tokenizer(choice)
    write_tokenizer(choice, tokenizer, target, 64)
    check_same_ids(target, tokenizer, is_bare=adds_special_tokens(choice))
    theirs = AutoTokenizer.from_pretrained(target)
    assert (theirs.pad_token, theirs.unk_token, theirs.mask_token) == ("[PAD]", "[UNK]", "[MASK]")
    pair = theirs("The end", "and")
    first, second = tokenizer.encode("The end"), tokenizer.encode("and")
    assert pair["input_ids"] == [2, *first, 3, *second, 3]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert special_ids(target, tokenizer) == {"pad_token_id": 0, "eos_token_id": tokenizer.eod_id}
    again = TokenizerChoice("BertWordPieceLowerCase", vocab_file=str(target / "vocab.txt"))
    assert build_tokenizer(again).fingerprint == tokenizer.fingerprint


def test_special_tokens_that_only_the_class_knows_are_named(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    write_roberta_tokenizer(source)
    copied = copy_tokenizer(source, target)
    name_special_tokens(source, target)
    named = json.loads((target / "tokenizer_config.json").read_text())
    assert (named["mask_token"], named["pad_token"], named["model_max_length"]) == ("<mask>", "<pad>", 64)
    ids = special_ids(target, build_tokenizer(copied))
    assert ids == {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    family = family_of({"model_type": "roberta"})
    check_padding(family, ids)
    check_padding(family_of({"model_type": "bert"}), {})
    for wrong, sentence in (({"pad_token_id": 7}, "must be 1; the tokenizer has 7"), ({}, "the tokenizer has none")):
        with pytest.raises(ConversionError, match=sentence):
            check_padding(family, wrong)


def test_a_sentencepiece_model_needs_another_form(tmp_path: Path) -> None:
    path = sentencepiece_models.write_model(tmp_path)
    choice = TokenizerChoice("GPTSentencePieceTokenizer", tokenizer_name_or_path=str(path))
    with pytest.raises(ConversionError, match=r"\(GPTSentencePieceTokenizer\) belongs to a library .*FOLDER"):
        write_tokenizer(choice, build_tokenizer(choice), tmp_path, 1024)


def test_a_copy_that_fails_is_named(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (target / "tokenizer.json").mkdir()
    with pytest.raises(StorageError, match="cannot write .*target/tokenizer.json"):
        copy_tokenizer(source, target)


def test_a_link_out_of_the_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model from elsewhere could have a private file published with what is made of it; the hub's cache has links."""
    private = tmp_path / "private"
    private.write_text("mine")
    for folder, links in (("cached", {"tokenizer.json": tmp_path / "blobs" / "1f"}), ("odd", {"merges.txt": private})):
        source = tmp_path / folder
        source.mkdir()
        (tmp_path / "blobs").mkdir(exist_ok=True)
        (tmp_path / "blobs" / "1f").write_text("{}")
        (source / "tokenizer.json").write_text("{}")
        for name, target in links.items():
            (source / name).unlink(missing_ok=True)
            (source / name).symlink_to(target)
        (tmp_path / f"{folder}-copy").mkdir()
        copy_tokenizer(source, tmp_path / f"{folder}-copy")
    warned = capsys.readouterr().err
    assert f"odd/merges.txt is a link to {private}, whose content is copied into" in warned and "cached" not in warned
