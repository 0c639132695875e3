"""Tokenizers: equal to the reference library on hard text, and clear about what is wrong with their files."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.tokenizers.references import write_folder


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
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


def test_missing_flags_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requires --vocab-file .*\n.*requires --merge-file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer"))
    with pytest.raises(ConfigError, match="--vocab-file /nowhere/v.json is not a file"):
        build_tokenizer(TokenizerChoice("GPT2BPETokenizer", "/nowhere/v.json", "/nowhere/m.txt"))
    with pytest.raises(ConfigError, match="unknown --tokenizer-type Parrot"):
        build_tokenizer(TokenizerChoice("Parrot"))
    with pytest.raises(ConfigError, match="PretrainedFromHF requires --tokenizer-name-or-path"):
        build_tokenizer(TokenizerChoice("PretrainedFromHF"))
    with pytest.raises(ConfigError, match="./none is neither a local file or folder"):
        build_tokenizer(TokenizerChoice("HFTokenizer", tokenizer_name_or_path="./none"))


RUN = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --lr 1 "
RUN += "--micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"


def test_a_vocabulary_without_words_has_ids_of_which_the_last_ends_a_document() -> None:
    request = parse([*RUN.split(), "--vocab-size", "512"])
    tokenizer = build_tokenizer(request.data)
    assert (tokenizer.vocab_size, tokenizer.eod_id, request.model.vocab_size) == (512, 511, 512)
    assert tokenizer.encode("3 511  0") == [3, 511, 0] and tokenizer.decode([3, 511, 0]) == "3 511 0"
    assert tokenizer.written(511) == "511" and tokenizer.written(512) is None
    record = TokenizerRecord.of(tokenizer)
    assert record.is_of(build_tokenizer(TokenizerChoice("NullTokenizer", tokenizer_name_or_path="512")))
    assert not record.is_of(build_tokenizer(TokenizerChoice("NullTokenizer", tokenizer_name_or_path="511")))


@pytest.mark.parametrize("word", ["512", "-1", "word", "9" * 5000])
def test_a_text_that_is_no_list_of_ids_is_refused(word: str) -> None:
    tokenizer = build_tokenizer(TokenizerChoice("NullTokenizer", tokenizer_name_or_path="512"))
    with pytest.raises(DataError, match=rf"'{word[:50]}.*is not an id of --tokenizer-type NullTok.* from 0 to 511\."):
        tokenizer.encode(f"1 {word}")


def test_the_number_of_ids_must_be_one() -> None:
    for count in (None, "", "0", "t.model"):
        with pytest.raises(
            ConfigError, match=rf"--tokenizer-model {count} is not a number of ids\. .*--vocab-size 50304"
        ):
            build_tokenizer(TokenizerChoice("NullTokenizer", tokenizer_name_or_path=count))
    with pytest.raises(ConfigError, match="--vocab-size is required by --tokenizer-type NullTokenizer"):
        parse(RUN.split())
