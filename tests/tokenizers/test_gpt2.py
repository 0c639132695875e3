"""GPT-2's byte-level BPE: the ids of its vocabulary, and damaged files."""

import json
import random
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizers.encoders.fast_encoder import edge_cases
from megatron.tokenizers.tokenizer import GPT2_END_OF_DOCUMENT, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import GPT2_FOLDER, hard_documents, write_vocabulary
from tests.tokenizers.references import reference_of

needs_gpt2 = pytest.mark.skipif(
    not (GPT2_FOLDER / "gpt2-vocab.json").is_file(), reason=f"GPT-2's vocabulary is not in {GPT2_FOLDER}"
)


def gpt2_choice() -> TokenizerChoice:
    return TokenizerChoice(
        "GPT2BPETokenizer", str(GPT2_FOLDER / "gpt2-vocab.json"), str(GPT2_FOLDER / "gpt2-merges.txt")
    )


def check_equal(choice: TokenizerChoice, texts: list[str]) -> None:
    tokenizer, reference = build_tokenizer(choice), reference_of(choice)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference.encode(text).ids, repr(text[:80])
        assert ids.size == 0 or int(ids.max()) < tokenizer.vocab_size


def test_small_vocabulary_gives_the_reference_ids(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    assert build_tokenizer(choice).library == "gigatoken"
    check_equal(choice, hard_documents(600) + edge_cases([GPT2_END_OF_DOCUMENT]))


@needs_gpt2
def test_gpt2_vocabulary_gives_the_reference_ids_in_all_planes() -> None:
    points = [chr(point) for point in range(0, 0x110000, 5) if not 0xD800 <= point < 0xE000]
    planes = [
        "".join(f"a{letter} {letter}{letter}1" for letter in points[start : start + 512])
        for start in range(0, len(points), 512)
    ]
    long_line = "".join(random.Random(3).choices(["the ", "of", "\n", "é", "1", "!"], k=400_000))
    assert len(long_line.encode()) > 700_000
    check_equal(gpt2_choice(), [*hard_documents(2000), *planes, long_line, "a" * 1_000_000, "\r\n" * 20_000, "", ""])


@needs_gpt2
def test_gpt2_facts_and_known_ids() -> None:
    tokenizer = build_tokenizer(gpt2_choice())
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.name) == (50257, 50256, "GPT2BPETokenizer")
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizer.decode([15496, 50256, 995]) == "Hello<|endoftext|> world"


def test_the_fingerprint_depends_on_contents_not_on_bytes(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    before = build_tokenizer(choice).fingerprint
    vocab_file, merge_file = Path(choice.vocab_file or ""), Path(choice.merge_file or "")
    vocab_file.write_text(json.dumps(json.loads(vocab_file.read_text()), indent=2, sort_keys=True))
    merge_file.write_bytes(merge_file.read_bytes().replace(b"\n", b"\r\n"))
    assert build_tokenizer(choice).fingerprint == before
    merge_file.write_text("\n".join(merge_file.read_text().splitlines()[:-1]))
    assert build_tokenizer(choice).fingerprint != before


def broken(tmp_path: Path, vocab: str | None = None, merges: str | None = None) -> TokenizerChoice:
    choice = write_vocabulary(tmp_path)
    for path, text in ((choice.vocab_file, vocab), (choice.merge_file, merges)):
        if text is not None and path is not None:
            Path(path).write_text(text)
    return choice


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", None, "demo-vocab.json is not valid JSON"),
        ("[" * 100_000, None, "is not valid JSON"),
        ("[1]", None, "must hold one JSON object"),
        ('{"a": "b"}', None, "token 'a' has id 'b'"),
        ('{"a": -1}', None, "token 'a' has id -1"),
        ('{"a": 1, "b": 1}', None, "one id to two tokens"),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\n", r"no <\|endoftext\|> or </s> entry"),
        (None, "#version: 0.2\na b c\n", r"demo-merges.txt:2 .* is not two tokens"),
        (
            None,
            "#version: 0.2\nĠ xyzzy\n",
            r"demo-merges.txt:2 merges 'Ġ' and 'xyzzy', but 'xyzzy' is not in .*demo-vocab.json",
        ),
    ],
)
def test_damaged_gpt2_files_are_named(tmp_path: Path, vocab: str | None, merges: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(broken(tmp_path, vocab, merges))
