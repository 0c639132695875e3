"""No artefact of a run, of a resume, of a tool or of a failure holds a password of the document store it reads."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import traceback
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

import pretrain_gpt
from megatron.errors import MegatronError
from tests.data.databases import numbered
from tests.helpers.programs import forking_python
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus

ROOT = Path(__file__).resolve().parents[2]
PASSWORDS = ("open:s3same/p@ss word", "another:s3same@2%")
OPTION = "key+s3same/three"
SECRETS = tuple(
    form.encode()
    for secret in (*PASSWORDS, OPTION)
    for form in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret))
) + (b"s3same",)


def address(password: str, collection: str = "web") -> str:
    user = f"me:{quote(password, safe='')}"
    options = f"tlsCertificateKeyFilePassword={quote(OPTION, safe='')}&collection={collection}"
    return f"mongodb://{user}@localhost:27017/corpus?{options}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    pytest.importorskip("mongomock", reason="the mongomock package is not installed")
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def found_in(folder: Path, secrets: Iterable[bytes] = SECRETS) -> list[str]:
    """The files below a folder, and the names, that hold a secret."""
    held = []
    for path in folder.rglob("*"):
        content = os.fsencode(path) + (path.read_bytes() if path.is_file() else b"")
        if any(secret in content for secret in secrets):
            held.append(str(path))
    return held


class _Wandb(types.ModuleType):
    """Keeps what it is told in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.path = path
        self.config = types.SimpleNamespace(update=lambda values, **options: self._keep(values))

    def init(self, **options: Any) -> _Wandb:
        self._keep(options)
        return self

    def log(self, values: Any, step: int) -> None:
        self._keep(values)

    def finish(self) -> None:
        """Nothing is held back."""

    def _keep(self, values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def run_programs(rank: int, folder: str, commands: Sequence[Sequence[str]]) -> list[int]:
    """Runs programs on an in-process server; their outputs go to `stdout` and `stderr` in the folder."""
    import mongomock

    os.chdir(folder)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        stream.flush()
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
    sys.modules["wandb"] = _Wandb(Path(folder, "wandb.jsonl"))
    with mongomock.patch(servers=(("localhost", 27017),)):
        import pymongo

        database = pymongo.MongoClient("mongodb://localhost:27017")["corpus"]
        for name in ("web", "news"):
            database[name].create_index("idx", unique=True)
            rows = numbered([f"the text of document {number} of {name}" for number in range(60)])
            database[name].insert_many([{"idx": idx, "filt_text": text} for idx, text in rows])
        return [_run(command) for command in commands]


def _run(command: Sequence[str]) -> int:
    sys.argv = list(command)
    sys.stderr.write(f"== {command[0]}\n")
    try:
        if command[0] == "pretrain_gpt.py":
            return int(pretrain_gpt.main())
        return int(runpy.run_path(str(ROOT / "tools" / command[0]))["main"]() or 0)
    except MegatronError as failure:
        sys.stderr.write(f"{failure}\n")
        traceback.print_exc()
        return int(failure.exit_code)


def test_no_artefact_of_a_run_or_a_tool_holds_a_password(corpus: TinyCorpus, tmp_path: Path) -> None:
    first, second = address(PASSWORDS[0]), address(PASSWORDS[1])
    run = corpus.flags(
        "--log-per-source-loss", folder=tmp_path, data_path=None, data_cache_path=tmp_path / "cache",
        tensorboard_dir=tmp_path / "tensorboard", log_path=tmp_path / "arguments", wandb_project="p", eval_interval=2,
        log_level="debug",
    )  # fmt: skip
    sources = ["--data-path", "1", corpus.prefix, "2"]
    config = tmp_path.parent / f"{tmp_path.name}.json"
    config.write_text(
        json.dumps({"train_weighted_split_paths": [f"t: 1 0:1 {first}, 1 0:1 {address(PASSWORDS[1], 'news')}"]})
    )
    vocabulary = ["--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file]
    family = ["--tokenizer-type", "GPT2BPETokenizer"]
    encode = ["preprocess_data.py", *vocabulary, *family, "--input", first]
    blend = corpus.flags(folder=tmp_path / "blend", data_path=None, data_cache_path=None, split=None)
    lengths = ["--max-sequence-length", "32", "--min-sequence-length", "4", "--stride", "16"]
    texts = ["--sample-id-range", "0", "4", "--print-text"]
    commands = [
        ["pretrain_gpt.py", *run, *sources, first, "--exit-interval", "4"],
        ["pretrain_gpt.py", *run, *sources, second],  # the password may change between the starts of a run
        ["pretrain_gpt.py", *blend, "--config", str(config)],
        ["sample_idxs_to_text.py", "--load", "checkpoints", "--data-path", "1", corpus.prefix, "2", first, *texts],
        ["sample_idxs_to_text.py", "--run-dir", "run", *texts],
        [*encode, "--output-prefix", "tokens", "--append-eod"],
        [*encode, "--output-prefix", "parts", "--partitions", "2", "--workers", "2"],
        ["corpus/check_data.py", "tokens_text_document", "--show", "1", *vocabulary, *family],
        ["corpus/featurize.py", *vocabulary, "--input", first, "--output-path", "windows/w", *lengths],
        [
            *("corpus/corpus_store.py", "import", second, "--json-key", "filt_text"),
            *("--config", first, "--collection", "copy"),
        ],
        ["corpus/corpus_store.py", "stat", "--config", first],
        ["corpus/corpus_store.py", "bench", "--config", first, "--n", "5"],
        ["corpus/corpus_store.py", "fetch", "--config", first, "--nsample", "3", "--output-prefix", "drawn"],
        ["corpus/clean_corpus.py", "--input", first, "--output", "clean.jsonl"],
        ["corpus/check_data.py", first],
        [
            *("corpus/featurize.py", "--runner", "DirectRunner", *vocabulary),
            *("--input", first, "--output-path", "b/w", *lengths),
        ],
    ]  # fmt: skip
    (codes,) = run_ranks(run_programs, 1, str(tmp_path), commands, timeout_seconds=300)
    output = (tmp_path / "stderr").read_text()
    assert codes == [0] * 4 + [64] + [0] * 9 + [65, 64], (codes, output[-5000:])
    assert found_in(tmp_path) == []
    shown = "mongodb://me:***@localhost:27017/corpus?tlsCertificateKeyFilePassword=***"
    written = [path for path in tmp_path.rglob("*") if path.is_file() and shown.encode() in path.read_bytes()]
    names = {path.name for path in written} | {path.parent.name for path in written}
    assert {"config.json", "log.txt", "stderr", "wandb.jsonl", "arguments", "tensorboard"} <= names, names
    assert "instead of a password: it comes from a record of a run" in output
    assert "cannot be passed to Beam: its password would be part of the job" in output


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("me:{password}@127.0.0.1:9/corpus?serverSelectionTimeoutMS=50&proxyPassword={option}", "cannot be reached"),
        ("me:s3same@pass@localhost/corpus", "contains a character that must be percent-encoded. Use %40 for @"),
        ("me:{password}@localhost:s3same/corpus", "[Pp]ort"),
        ("me:{password}@localhost?tlsCertificateKeyFilePassword={option}", "names no database"),
        ("me:s3same", "names no database"),
    ],
)  # fmt: skip
def test_no_failure_shows_a_password(corpus: TinyCorpus, tmp_path: Path, place: str, said: str) -> None:
    wrong = "mongodb://" + place.format(password=quote(PASSWORDS[0], safe=""), option=quote(OPTION, safe=""))
    run = corpus.flags(folder=tmp_path, data_path=wrong, log_level="debug")
    store = ["stat", "--config", wrong]
    for words in ([str(ROOT / "pretrain_gpt.py"), *run], [str(ROOT / "tools" / "corpus" / "corpus_store.py"), *store]):
        done = subprocess.run([forking_python(), *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode in (64, 74) and re.search(said, done.stderr), done.stderr[-2000:]
        assert "s3same" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert found_in(tmp_path) == []
