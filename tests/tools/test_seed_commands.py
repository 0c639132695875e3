"""The commands of the Megatron-DeepSpeed guide, word for word, on a small corpus: every way gives the same files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.programs import forking_python
from tests.helpers.vocabulary import hard_documents, write_vocabulary

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT.parent / "shared" / "seeds" / "001_abfc08f09f0e8134.txt"
PREPROCESS = r"""python tools/preprocess_data.py \
    --input my-corpus.json \
    --output-prefix my-gpt2 \
    --vocab gpt2-vocab.json \
    --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer \
    --merge-file gpt2-merges.txt \
    --append-eod \
    --workers 8
"""
MERGE = r"""python tools/merge_preprocessed_data.py \
    --datasets \
    meg-gpt2-oscar-en-500-p1_text_document \
    meg-gpt2-oscar-en-500-p2_text_document \
    meg-gpt2-oscar-en-500-p3_text_document \
    --output-prefix meg-gpt2_oscar_text_document
"""
OTHER_TOKENIZER = (
    "python tools/preprocess_data.py --input ~/c4_en_train.jsonl --output-prefix c4_en_train --dataset-impl mmap "
    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path t5-small --workers 30 --append-eod"
)
TEXTS = [*hard_documents(300), "Türkçe: İstanbul'da ığdır, IĞDIR; ağaç, şişe, çöğüş."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small versions of the guide's files, and the outputs of its first command."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "tools").symlink_to(ROOT / "tools")
    choice = write_vocabulary(folder)
    for name, path in (("vocab.json", choice.vocab_file), ("merges.txt", choice.merge_file)):
        (folder / f"gpt2-{name}").write_bytes(Path(str(path)).read_bytes())
    write_lines(folder / "my-corpus.json", TEXTS)
    guide(folder, PREPROCESS)
    return folder


def write_lines(path: Path, texts: list[str]) -> None:
    fields = {"src": "www.nvidia.com", "type": "Eng", "id": "0", "title": "First Part"}
    path.write_text("".join(json.dumps({**fields, "text": text}) + "\n" for text in texts))


def guide(folder: Path, command: str, **changes: str) -> None:
    """Runs a command of the guide as a shell does, with some of its words changed."""
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    path = f"{Path(forking_python()).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def pair(folder: Path, name: str) -> list[bytes]:
    return [(folder / f"{name}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.skipif(not GUIDE.is_file(), reason=f"the guide is not in {GUIDE}")
def test_the_commands_match_the_guide() -> None:
    text = GUIDE.read_text()
    assert all(command in text for command in (PREPROCESS, MERGE, OTHER_TOKENIZER))


def test_every_document_round_trips(folder: Path) -> None:
    tokenizer = build_tokenizer(
        TokenizerChoice("GPT2BPETokenizer", f"{folder}/gpt2-vocab.json", f"{folder}/gpt2-merges.txt")
    )
    data = IndexedDataset(folder / "my-gpt2_text_document")
    kept = [text for text in TEXTS if text]
    assert len(data) == len(kept)
    for ids, text in zip(data[:], kept, strict=True):
        assert ids[-1] == tokenizer.eod_id and tokenizer.decode(ids[:-1]) == text


def test_workers_and_the_other_tools_give_the_same_bytes(folder: Path) -> None:
    for name, workers, tool in (
        ("one", "1", "preprocess_data"),
        ("two", "2", "preprocess_data"),
        ("cores", "60", "preprocess_data_many_cores"),
        ("ranks", "", "preprocess_data_dist"),
    ):
        command = PREPROCESS if workers else PREPROCESS.replace(" \\\n    --workers 8", "")
        changes = {"my-gpt2": name, "preprocess_data": tool} | (
            {"--workers 8": f"--workers {workers}"} if workers else {}
        )
        guide(folder, command, **changes)
        assert pair(folder, name) == pair(folder, "my-gpt2"), name
    assert not list(folder.glob("ranks_0*"))


def test_three_chunks_merged_are_the_whole(folder: Path) -> None:
    for number in range(3):
        write_lines(folder / "chunk.json", TEXTS[number * 110 : (number + 1) * 110])
        changes = {"my-corpus.json": "chunk.json", "my-gpt2": f"meg-gpt2-oscar-en-500-p{number + 1}"}
        guide(folder, PREPROCESS, **changes)
    guide(folder, MERGE)
    assert pair(folder, "meg-gpt2_oscar") == pair(folder, "my-gpt2")
    merged, whole = (read_sidecar(folder / f"{name}_text_document") for name in ("meg-gpt2_oscar", "my-gpt2"))
    assert merged is not None and whole is not None and merged.tokenizer == whole.tokenizer
    assert (merged.documents, merged.empty, merged.tokens) == (whole.documents, whole.empty, whole.tokens)


def test_any_hugging_face_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    reference = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(f"{folder}/gpt2-vocab.json", f"{folder}/gpt2-merges.txt")
    )
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.add_special_tokens(["</s>"])
    (folder / "t5-small").mkdir()
    reference.save(f"{folder}/t5-small/tokenizer.json")
    (folder / "t5-small" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    write_lines(folder / "c4_en_train.jsonl", TEXTS[:20])
    guide(folder, OTHER_TOKENIZER)
    expected = [[*reference.encode(text).ids, reference.token_to_id("</s>")] for text in TEXTS[:20] if text]
    assert [ids.tolist() for ids in IndexedDataset(folder / "c4_en_train_text_document")[:]] == expected
