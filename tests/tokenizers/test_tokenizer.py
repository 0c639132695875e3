"""Tokenizers: equal to the reference library on hard text, and clear about what is wrong with their files."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from megatron.errors import ConfigError, DataError
from megatron.tokenizers import fast_encoder as fast_module
from megatron.tokenizers.fast_encoder import FastEncoder, fast_encoder, hard_texts, resident_bytes
from megatron.tokenizers.tokenizer import GPT2_END_OF_DOCUMENT, TokenizerChoice, build_tokenizer, surround
from tests.helpers.vocabulary import GPT2_FOLDER, hard_documents, write_vocabulary

needs_gpt2 = pytest.mark.skipif(
    not (GPT2_FOLDER / "gpt2-vocab.json").is_file(), reason=f"GPT-2's vocabulary is not in {GPT2_FOLDER}"
)


def reference_of(choice: TokenizerChoice) -> tokenizers.Tokenizer:
    """GPT-2's rules, built from the files by the `tokenizers` library alone."""
    assert choice.vocab_file and choice.merge_file
    reference = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(choice.vocab_file, choice.merge_file))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return reference


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
    check_equal(choice, hard_documents(600) + hard_texts([GPT2_END_OF_DOCUMENT]))


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


def test_round_trip_and_empty_texts(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    for text in hard_documents(100):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.encode_batch([]) == []
    assert [len(ids) for ids in tokenizer.encode_batch(["", "a", ""])] == [0, 1, 0]


def test_fingerprint_is_of_the_contents_not_of_the_bytes(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    before = build_tokenizer(choice).fingerprint
    vocab_file, merge_file = Path(choice.vocab_file or ""), Path(choice.merge_file or "")
    vocab_file.write_text(json.dumps(json.loads(vocab_file.read_text()), indent=2, sort_keys=True))
    merge_file.write_bytes(merge_file.read_bytes().replace(b"\n", b"\r\n"))
    assert build_tokenizer(choice).fingerprint == before
    merge_file.write_text("\n".join(merge_file.read_text().splitlines()[:-1]))
    assert build_tokenizer(choice).fingerprint != before


def test_without_the_fast_library_the_ids_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = write_vocabulary(tmp_path)
    fast = build_tokenizer(choice)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    slow = build_tokenizer(choice)
    assert (fast.library, slow.library) == ("gigatoken", "tokenizers")
    for left, right in zip(fast.encode_batch(hard_documents()), slow.encode_batch(hard_documents()), strict=True):
        assert left.tolist() == right.tolist() and left.dtype == right.dtype


def test_a_disagreeing_fast_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = FastEncoder.encode_flat

    def wrong(self: FastEncoder, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = honest(self, texts)
        return (ids ^ 1 if len(ids) else ids), lengths

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    assert tokenizer.library == "tokenizers"
    assert "gigatoken gives other ids" in capsys.readouterr().err


def test_the_cache_of_the_fast_library_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_of(write_vocabulary(tmp_path))
    encoder = FastEncoder(reference.to_str(), cache_bytes=8 << 20)
    drawn = random.Random(1)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = [" ".join("".join(drawn.choices(alphabet, k=9)) for _ in range(50_000)) for _ in range(12)]
    expected = encoder.encode_flat(["end of it"])[0].tolist()
    before = resident_bytes()
    for text in words:
        encoder.encode_flat([text])
    after = resident_bytes()
    assert before is not None and after is not None
    assert after - before < 60 << 20  # 6 MB of unlike words would otherwise leave about 45 MB and go on growing
    monkeypatch.setattr(fast_module, "_MEMORY_FILE", str(tmp_path / "none"))
    assert resident_bytes() is None
    encoder.encode_flat(words[:3])
    assert encoder.encode_flat(["end of it"])[0].tolist() == expected


@pytest.mark.parametrize("long_rows", [True, False])
def test_surround_puts_ids_around_every_row(long_rows: bool) -> None:
    lengths = np.array([700, 900] if long_rows else [2, 0, 3], dtype=np.int64)
    ids = np.arange(int(lengths.sum()), dtype=np.uint16)
    result, longer = surround(ids, lengths, [7, 8], [9])
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    assert result.tolist() == [token for row in rows for token in [7, 8, *row.tolist(), 9]]
    assert longer.tolist() == (lengths + 3).tolist() and result.dtype == np.uint16


# --- Hugging Face ---------------------------------------------------------------------------------


def write_folder(
    folder: Path, *, begin: bool = False, eos: str | dict[str, str] | None = "<eot>"
) -> tokenizers.Tokenizer:
    choice = write_vocabulary(folder)
    reference = reference_of(choice)
    reference.decoder = tokenizers.decoders.ByteLevel()
    reference.add_special_tokens(["<bos>", "<eot>"])
    if begin:
        single = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", reference.token_to_id("<bos>"))]
        )
        reference.post_processor = single
    reference.enable_truncation(max_length=4)
    reference.save(str(folder / "tokenizer.json"))
    reference.no_truncation()
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return reference


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


def test_local_tokenizers_need_no_transformers_and_no_torch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    program = (
        "import sys\nfor name in ('transformers', 'torch', 'huggingface_hub'): sys.modules[name] = None\n"
        "from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer\n"
        "print(build_tokenizer(TokenizerChoice('PretrainedFromHF', "
        f"tokenizer_name_or_path={str(tmp_path)!r})).encode('a b'))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


# --- errors ---------------------------------------------------------------------------------------


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


def test_a_vocabulary_that_is_not_utf8(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    Path(choice.vocab_file or "").write_bytes(b'{"\xff": 1}')
    with pytest.raises(DataError, match="demo-vocab.json .* cannot be read as UTF-8"):
        build_tokenizer(choice)


def test_a_vocabulary_that_the_disk_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = write_vocabulary(tmp_path)

    def broken_disk(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken_disk)
    with pytest.raises(DataError, match=r"demo-vocab.json \(--vocab-file\) cannot be read: Input/output error"):
        build_tokenizer(choice)


def test_missing_flags_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs --vocab-file .*\n.*needs --merge-file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer"))
    with pytest.raises(ConfigError, match="--vocab-file /nowhere/v.json is not a file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer", "/nowhere/v.json", "/nowhere/m.txt"))
    with pytest.raises(ConfigError, match="--tokenizer-type Parrot is not known"):
        build_tokenizer(TokenizerChoice("Parrot"))
    with pytest.raises(ConfigError, match="PretrainedFromHF needs --tokenizer-name-or-path"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF"))
    with pytest.raises(ConfigError, match="./none is neither a file nor a folder"):
        build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path="./none"))


def test_damaged_hugging_face_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer that the tokenizers library can load"):
        build_tokenizer(choice)
    write_folder(tmp_path, eos="<nope>")
    with pytest.raises(
        DataError, match="tokenizer_config.json names eos_token '<nope>', which is not in the vocabulary"
    ):
        build_tokenizer(choice)
    write_folder(tmp_path, eos="\ud800" * 1000)
    with pytest.raises(DataError, match=r"names eos_token '\\ud800\\ud800.{1,200}, which is not in the vocabulary"):
        build_tokenizer(choice)
    write_folder(tmp_path, eos=None)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setattr("megatron.tokenizers.hugging_face._END_OF_DOCUMENT_GUESSES", ())
    with pytest.raises(ConfigError, match="names no end-of-document token"):
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
    with pytest.raises(ConfigError, match=r"transformers could not convert what is there \(OSError: nothing in"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)))


def test_an_unreachable_hub_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    with pytest.raises(
        ConfigError, match=r"--tokenizer-name-or-path some/name: .*no route to host.*give a local folder"
    ):
        build_tokenizer(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path="some/name"))


def test_a_post_processor_that_does_more_is_left_to_the_reference(tmp_path: Path) -> None:
    class Odd:
        """A reference whose post-processor repeats the text."""

        post_processor = "repeats"

        def __init__(self) -> None:
            self._inner = reference_of(write_vocabulary(tmp_path))

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def encode(self, text: str, add_special_tokens: bool = True) -> object:
            return self._inner.encode(text + text if add_special_tokens and len(text) > 1 else text)

    encoder, reason = fast_encoder(Odd())
    assert encoder is None and "does more than add fixed tokens" in reason


@pytest.mark.parametrize("count", [1, 20_000])
def test_many_short_texts_in_one_call_get_the_ids_of_one_call_each(tmp_path: Path, count: int) -> None:
    texts = [text[:50] for text in hard_documents(300)] * (count // 300) + ["one more"]
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    encoder = tokenizer._fast
    assert isinstance(encoder, FastEncoder)
    ids, lengths = encoder.encode_flat(texts)
    other_ids, other_lengths = encoder._encode_each(texts)
    np.testing.assert_array_equal(ids, other_ids)
    np.testing.assert_array_equal(lengths, other_lengths)
    assert (ids.dtype, lengths.dtype) == (np.uint32, np.int64)
