"""The Beam pipeline writes the rows of the default runner in the same order, here and at addresses."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.formats.parquet_windows import COLUMNS, WindowFile
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.preprocess_runs import quiet, write_lines
from trident.corpus.featurize import beam as featurize_beam
from trident.corpus.featurize.beam import featurize_with_beam, make_shard
from trident.corpus.featurize.featurize_corpus import FeaturizeResult, WindowOptions, featurize
from trident.corpus.featurize.windows_to_tokens import windows_to_tokens
from trident.corpus.preprocess.encode import EncodeOptions

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pytest.importorskip("apache_beam", reason="the Beam pipeline needs apache-beam")
local_files = pytest.importorskip("apache_beam.io.localfilesystem")

OPTIONS = WindowOptions(min_sequence_length=8, max_sequence_length=32, stride=16, num_shards=3)


class FolderStore(local_files.LocalFileSystem):  # type: ignore[misc, name-defined]
    """Files at `folderstore://` addresses, stored in a local folder."""

    @classmethod
    def scheme(cls) -> str:
        return "folderstore"

    def _local(self, path: str) -> str:
        return path.removeprefix("folderstore:/")

    def match(self, patterns: list[str], limits: Any = None) -> Any:
        found = super().match([self._local(pattern) for pattern in patterns], limits)
        for result in found:
            for one in result.metadata_list:
                one.path = f"folderstore:/{one.path}"
        return found

    def create(self, path: str, *rest: Any) -> Any:
        return super().create(self._local(path), *rest)

    def open(self, path: str, *rest: Any) -> Any:
        return super().open(self._local(path), *rest)

    def exists(self, path: str) -> bool:
        return bool(super().exists(self._local(path)))

    def rename(self, sources: list[str], targets: list[str]) -> None:
        super().rename([self._local(one) for one in sources], [self._local(one) for one in targets])

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            Path(self._local(path)).unlink()


def make(element: str, folder: str, job: str) -> None:
    assert (Path(folder) / "megatron").is_dir()
    make_shard(element, job)


def run(inputs: list[str], output: str, choice: TokenizerChoice, **changed: Any) -> FeaturizeResult:
    encoding = EncodeOptions(choice, **changed)
    return featurize_with_beam(inputs, output, encoding, OPTIONS, ["--direct_running_mode", "in_memory"], make)


def rows_of(paths: tuple[str, ...]) -> list[Any]:
    found: list[Any] = []
    for path in paths:
        for windows in WindowFile(path).batches(1000):
            found += zip(*(getattr(windows, name).tolist() for name in COLUMNS), strict=True)
    return found


def test_the_rows_are_those_of_the_default_runner(tmp_path: Path, choice: TokenizerChoice) -> None:
    first = write_lines(tmp_path / "a.jsonl", hard_documents(200))
    second = tmp_path / "b.jsonl.gz"
    second.write_bytes(gzip.compress(Path(write_lines(tmp_path / "b", hard_documents(50, seed=3))).read_bytes()))
    inputs = [first, str(second)]
    (tmp_path / "beam-00007-of-00009").touch()
    expected = featurize(inputs, f"{tmp_path}/here", EncodeOptions(choice), OPTIONS, 1, quiet())
    result = run(inputs, f"{tmp_path}/beam", choice)
    assert rows_of(result.shards) == rows_of(expected.shards)
    assert (result.tally, result.empty, result.skipped) == (expected.tally, expected.empty, 0)
    assert sorted(map(str, tmp_path.glob("beam*"))) == list(result.shards) and not list(tmp_path.glob(".*"))
    assert WindowFile(result.shards[0]).facts == WindowFile(expected.shards[0]).facts
    assert windows_to_tokens([f"{tmp_path}/beam"], f"{tmp_path}/out").tokens == expected.tally.tokens


def test_inputs_and_outputs_at_addresses(tmp_path: Path, choice: TokenizerChoice) -> None:
    paths = [write_lines(tmp_path / f"{number}.jsonl", hard_documents(40, seed=number)) for number in range(2)]
    expected = featurize(paths, f"{tmp_path}/here", EncodeOptions(choice), OPTIONS, 1, quiet())
    (tmp_path / "there-00000-of-00001").touch()
    addresses = [f"folderstore:/{path}" for path in paths]
    result = run(addresses, f"folderstore:/{tmp_path}/there", choice)
    assert rows_of(tuple(str(path) for path in sorted(tmp_path.glob("there-*")))) == rows_of(expected.shards)
    assert len(result.shards) == 3 and not list(tmp_path.glob(".*"))
    with pytest.raises(ConfigError, match=r"none\.jsonl matches 0 files, expected 1"):
        run([f"folderstore:/{tmp_path}/none.jsonl"], f"{tmp_path}/x", choice)
    with pytest.raises(ConfigError, match="--input nosuch://x: Beam cannot look it up"):
        run(["nosuch://x"], f"{tmp_path}/x", choice)


def test_bad_lines_stop_it_or_are_counted(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = Path(write_lines(tmp_path / "in.jsonl", ["good"] * 30))
    size = source.stat().st_size
    source.write_bytes(source.read_bytes() + b'{"text": 5}\n')
    with pytest.raises(DataError, match=rf"in\.jsonl: byte offset {size}: key 'text'.*--on-bad-line skip\.$"):
        run([str(source)], f"{tmp_path}/w", choice)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    result = run([str(source)], f"{tmp_path}/w", choice, skip_bad_lines=True)
    assert (result.skipped, result.tally.documents) == (1, 30)


def test_unsupported_beam_options_are_one_sentence_errors(
    tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["a"])
    encoding = EncodeOptions(choice)
    with pytest.raises(ConfigError, match="--nope: neither this program nor Apache Beam has such a flag"):
        featurize_with_beam([source], f"{tmp_path}/w", encoding, OPTIONS, ["--nope", "1"], make)
    with pytest.raises(ConfigError, match=r"--input - \(standard input\) cannot be read by Beam's workers"):
        run(["-"], f"{tmp_path}/w", choice)
    with pytest.raises(ConfigError, match="--input none cannot be read"):
        run(["none"], f"{tmp_path}/w", choice)

    def refuse(*rest: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(featurize_beam, "_create", refuse)
    with pytest.raises(StorageError, match=r"Cannot write .*w-0000.-of-00003.*No space left on device"):
        run([source], f"{tmp_path}/w", choice)

    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(ConfigError, match=r"\(--direct_running_mode\) require the apache-beam package"):
        run([source], f"{tmp_path}/w", choice)


def test_a_dataset_is_divided_by_rows(tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets", reason="--dataset-name needs the datasets package")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    source = write_lines(tmp_path / "folder" / "test.jsonl", hard_documents(80))
    expected = featurize([source], f"{tmp_path}/here", EncodeOptions(choice), OPTIONS, 1, quiet())
    result = run([f"hf://{tmp_path}/folder:test"], f"{tmp_path}/beam", choice)
    assert rows_of(result.shards) == rows_of(expected.shards) and result.tally == expected.tally
    assert np.all([WindowFile(path).rows for path in result.shards])
