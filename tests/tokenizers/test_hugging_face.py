"""Tokenizers described by a tokenizer.json: from a file, a folder or the hub."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.tokenizers.references import write_folder


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("kind", ["PretrainedFromHF", "HFTokenizer"])
def test_local_folder_follows_tokenizer_json(tmp_path: Path, kind: str, begin: bool) -> None:
    reference = write_folder(tmp_path, begin=begin)
    tokenizer = build_tokenizer(TokenizerChoice(kind, tokenizer_name_or_path=str(tmp_path)))
    assert tokenizer.eod_id == reference.token_to_id("<eot>")
    assert tokenizer.vocab_size == reference.get_vocab_size() == max(reference.get_vocab().values()) + 1
    texts = [*hard_documents(), "a<eot>b <bos><eot> c"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference.encode(text).ids
    assert tokenizer.library == "gigatoken"
    assert tokenizer.decode(tokenizer.encode("a<eot>b")).endswith("a<eot>b")


def test_tokenizer_json_by_itself_and_eos_as_an_object(tmp_path: Path) -> None:
    write_folder(tmp_path, eos={"content": "<eot>"})
    by_file = build_tokenizer(TokenizerChoice("HFTokenizer", vocab_file=str(tmp_path / "tokenizer.json")))
    by_folder = build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)))
    assert by_file.fingerprint == by_folder.fingerprint and by_file.eod_id == by_folder.eod_id


def test_a_tokenizer_the_fast_library_lacks_falls_back(tmp_path: Path) -> None:
    reference = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}, unk_token="[UNK]")
    )
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)))
    assert tokenizer.library == "tokenizers"
    assert tokenizer.encode("ab a c") == reference.encode("ab a c").ids
    assert tokenizer.eod_id == 3


def test_damaged_hugging_face_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer that the tokenizers library can load"):
        build_tokenizer(choice)
    write_folder(tmp_path, eos="<nope>")
    with pytest.raises(DataError, match="tokenizer_config.json names eos_token '<nope>', which is not in"):
        build_tokenizer(choice)
    write_folder(tmp_path, eos="\ud800" * 1000)
    with pytest.raises(DataError, match=r"names eos_token '\\ud800\\ud800.{1,200}, which is not in the vocabulary"):
        build_tokenizer(choice)
    write_folder(tmp_path, eos=None)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setattr("megatron.tokenizers.hugging_face._END_OF_DOCUMENT_GUESSES", ())
    with pytest.raises(ConfigError, match="has no end-of-document token"):
        _ = build_tokenizer(choice).eod_id
    (tmp_path / "tokenizer.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json, and transformers, .* is not installed"):
        build_tokenizer(choice)


def test_a_folder_that_transformers_cannot_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        """Stands in for `transformers.AutoTokenizer`."""

        @staticmethod
        def from_pretrained(source: str) -> None:
            raise OSError(f"nothing in {source}")

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Fails))
    with pytest.raises(ConfigError, match=r"transformers could not convert its files \(OSError: nothing in"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)))


def test_an_unreachable_hub_name_is_a_one_sentence_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match=r"--tokenizer-name-or-path some/name: .*no route.*use a local folder"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path="some/name"))
