"""SentencePiece models: the ids of the `sentencepiece` package with every encoder, and upstream's special ids."""

import sys
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.encoders.fast_encoder import edge_cases
from megatron.tokenizers.encoders.long_text import LongText
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.sentencepiece_models import TYPES, load, write_model
from tests.helpers.vocabulary import hard_documents

LLAMA_LIKE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}


@pytest.mark.parametrize(
    ("options", "library"),
    [
        ({}, "gigatoken"),
        (LLAMA_LIKE, "gigatoken"),
        ({"add_dummy_prefix": False, "normalization_rule_name": "nfkc_cf"}, "gigatoken"),
        ({"model_type": "unigram", "vocab_size": 500}, "sentencepiece"),
        ({"byte_fallback": False}, "sentencepiece"),
        ({"user_defined_symbols": "<sep>,of the"}, "sentencepiece"),
        ({"treat_whitespace_as_suffix": True}, "sentencepiece"),
    ],
)
def test_ids_are_those_of_sentencepiece(
    tmp_path: Path, options: dict[str, Any], library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path, **options)
    tokenizer, reference = load(path), SentencePieceProcessor(model_file=str(path))
    said = capsys.readouterr().err
    assert tokenizer.library == library
    assert ("encoding with the sentencepiece library" in said) == (library == "sentencepiece")
    texts = [*hard_documents(400), *edge_cases(["<s>", "</s>", "<sep>"]), "of the end <sep>of the", " \u2581 \u2581a"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference.encode(text), repr(text[:80])
    again = load(path, known_library=tokenizer.library)
    assert again.library == library and again.encode(texts[5]) == tokenizer.encode(texts[5])
    assert again.encode_flat([])[0].tolist() == []


def test_special_ids_are_upstreams(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    size = len(SentencePieceProcessor(model_file=str(path)))
    big, small, llama = (load(path, kind) for kind in TYPES)
    # <CLS> <SEP> <EOD> <MASK>, and <PAD> since a model has none unless it is asked to
    assert (big.vocab_size, big.eod_id) == (size + 5, size + 2)
    assert (small.vocab_size, small.eod_id) == (llama.vocab_size, llama.eod_id) == (size, 2)
    ids = small.encode("import this")
    assert big.encode("import this") == ids and llama.encode("import this") == [1, *ids]
    assert len({big.fingerprint, small.fingerprint, llama.fingerprint}) == 3
    assert big.decode([*ids, big.eod_id, *ids, size]) == "import this<EOD>import this<CLS>"
    assert llama.decode([1, *ids, 2]) == "<s>import this</s>" and small.decode([]) == ""
    assert small.unknown_id == 0


def test_a_model_with_tokens_of_its_own_keeps_their_ids(tmp_path: Path) -> None:
    path = write_model(tmp_path, control_symbols="<EOD>", pad_id=3)
    own = SentencePieceProcessor(model_file=str(path))
    tokenizer = load(path, "SentencePieceTokenizer")
    assert tokenizer.eod_id == own.piece_to_id("<EOD>") and tokenizer.vocab_size == len(own) + 3
    assert tokenizer.eod_id not in tokenizer.encode("a <EOD> b")


def test_the_text_round_trips(tmp_path: Path) -> None:
    tokenizer = load(write_model(tmp_path, **LLAMA_LIKE))
    for text in ("Merhaba dünya, çok güzel ğüşıöç", "안녕 세상아", "👩‍👩‍👧 a\tb\n\n  c", "</s> <s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("without", [None, "gigatoken"])
@pytest.mark.parametrize(
    "options",
    [{}, LLAMA_LIKE, {"byte_fallback": False}, {"add_dummy_prefix": False}, {"allow_whitespace_only_pieces": True}],
)
def test_long_texts_may_be_split_before_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], without: str | None
) -> None:
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    tokenizer = load(write_model(tmp_path, **options), "Llama2Tokenizer")
    assert tokenizer.can_cut_before_spaces
    marks = " a \u2581 b \u200b c  d\u3000 e \u0301 f \xa0 g \t h"
    for text in [
        *hard_documents(60),
        " ".join(hard_documents(60)),
        marks * 40,
        "ab " * 60,
        "ab  " * 60,
        "x" * 80 + " ",
    ]:
        found = encode_pieces(tokenizer, text)
        assert found == tokenizer.encode(text), repr(text[:60])


def encode_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    first, *rest = LongText(bytearray(text.encode())).chunks(60)
    return [*tokenizer.encode(first), *(token for piece in rest for token in tokenizer.encode_rest(piece).tolist())]


def test_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Llama2Tokenizer requires --tokenizer-model"):
        build_tokenizer(TokenizerChoice("Llama2Tokenizer"))
    with pytest.raises(ConfigError, match="--tokenizer-model /nowhere.model is not a file"):
        load(Path("/nowhere.model"))
    with pytest.raises(ConfigError, match="small.model has none. Use GPTSentencePieceTokenizer"):
        load(write_model(tmp_path, bos_id=-1), "Llama2Tokenizer")
    with pytest.raises(ConfigError, match="small.model has no end-of-document token"):
        _ = load(write_model(tmp_path, eos_id=-1)).eod_id
    for content in (b"", b"{}", b"\x0a\xff", write_model(tmp_path).read_bytes()[:2000]):
        path = tmp_path / "broken.model"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"broken.model \(--tokenizer-model\) is not a SentencePiece model"):
            load(path)
    content = write_model(tmp_path, normalization_rule_name="nfkc").read_bytes()
    path.write_bytes(content.replace(b"\0fi\0", b"\0\x87\x87\0"))  # what the ligature ﬁ becomes
    with pytest.raises(DataError, match=r"broken.model .* is not a SentencePiece model: 'utf-8' codec can't decode"):
        load(path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match="small.model requires the sentencepiece package"):
        load(write_model(tmp_path))
