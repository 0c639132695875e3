"""The samples that training read, shown afterwards: the same tokens, whatever their order comes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.record import Progress
from megatron.config import parse
from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from megatron.train.build import open_run
from tests.data.datasets.masked.corpora import write_sentences
from tests.data.datasets.masked.corpora import write_vocabulary as write_masked_vocabulary
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus
from tests.helpers.vocabulary import write_vocabulary
from tests.train.samples import Outcome, optim_config
from tools import sample_idxs_to_text as tool
from tools.runs.sample_order import samples_of_logged_steps, samples_of_steps

Rows = list[list[int]]


def consume(flags: Sequence[str], steps: int) -> list[Rows]:
    """Takes the batches of some steps as training does, without training on them; saves; gives each step's tokens."""
    seen = []
    with open_run(parse(list(flags))) as (run, callbacks):
        run.report.started(run.progress)
        for _ in range(steps):
            callbacks.before_step(run)
            batches = run.train_batches()
            seen.append(
                [row for one in batches for row in np.concatenate([one.tokens, one.labels[:, -1:]], axis=1).tolist()]
            )
            run.progress = run.progress.after(len(seen[-1]), len(seen[-1]) * 32)
            run.report.step(run.progress, Outcome(sample_count=len(seen[-1])), 0.1, 0.1)
        callbacks.trained(run)
    return seen


def consume_twice(rank: int, first: Sequence[str], second: Sequence[str]) -> tuple[list[Rows], list[Rows]]:
    return consume(first, 5), consume(second, 2)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyCorpus, TinyCorpus]:
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
    return write_tiny_corpus(folders[0]), write_tiny_corpus(folders[1], documents=40, seed=9)


@pytest.fixture(scope="module")
def trained(corpora: tuple[TinyCorpus, TinyCorpus], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A blended run with a ramp-up (2, 2, 4, 4, ... samples) that skips step 3, resumed with another blend."""
    first, second = corpora
    folder = tmp_path_factory.mktemp("run")
    settings: dict[str, Any] = {
        "data_path": ("0.7", first.prefix, "0.3", second.prefix),
        "rampup_batch_size": ("2", "2", "8"),
        "train_iters": None, "lr_decay_samples": 40, "train_samples": 40, "skip_train_iteration_range": "3-3",
        "save_interval": 100,
    }  # fmt: skip
    flags = first.flags(folder=folder, **settings)
    settings["data_path"] = ("0.5", second.prefix, "0.5", first.prefix)
    again = first.flags("--change-data-blend", folder=folder, **settings)
    [(seen, resumed)] = run_ranks(consume_twice, 1, flags, again)
    return {"folder": folder, "seen": seen, "resumed": resumed, "flags": flags, "first": first, "second": second}


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert tool.main(list(map(str, words))) == 0
    return capsys.readouterr().out.splitlines()


def tokens_of(capsys: pytest.CaptureFixture[str], *words: str) -> Rows:
    return [json.loads(line)["tokens"] for line in lines(capsys, *words, "--all-tokens")]


def test_the_shown_samples_are_those_of_training(trained: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    seen, resumed = trained["seen"], trained["resumed"]
    assert [len(rows) for rows in (*seen, *resumed)] == [2, 2, 2, 4, 4, 4, 4]  # 2 samples before step 3 are skipped
    in_order = [row for rows in (*seen, *resumed) for row in rows]
    checkpoint = ["--load", str(trained["folder"] / "checkpoints")]
    run = ["--run-dir", str(trained["folder"] / "run")]
    whole = tokens_of(capsys, *checkpoint, "--sample-id-range", "0", "24")
    assert whole[:4] == in_order[:4] and whole[6:] == in_order[4:]
    for step, rows in enumerate([*seen, *resumed], start=1):
        assert tokens_of(capsys, *run, "--start-step", str(step)) == rows
    assert tokens_of(capsys, *run, "--start-step", "2", "--end-step", "3") == whole[2:8]  # with the skipped samples
    assert tokens_of(capsys, *checkpoint, "--start-step", "3", "--end-step", "7") == in_order[4:]


def test_each_sample_names_its_origin(trained: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = ["--load", str(trained["folder"] / "checkpoints")]
    records = list(map(json.loads, lines(capsys, *checkpoint, "--start-sample", "10", "--end-sample", "22")))
    assert [record["sample"] for record in records] == list(range(10, 22))
    assert {record["source"] for record in records} == {trained["first"].prefix, trained["second"].prefix}
    tokenizer = build_tokenizer(parse(trained["flags"]).data)
    for record in records:
        indexed = IndexedDataset(record["source"])
        parts = [indexed.get(piece["sequence"], piece["first"], piece["tokens"]) for piece in record["pieces"]]
        assert tokenizer.decode(np.concatenate(parts)) == record["text"] and sum(map(len, parts)) == 33
        assert "tokens" not in record


def test_the_flags_alone_give_the_order_of_a_new_run(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = trained["first"], trained["second"]
    words = ["--data-path", "0.7", first.prefix, "0.3", second.prefix, "--split", "80,15,5", "--seq-length", "32"]
    words += ["--data-cache-path", str(tmp_path), "--vocab-file", first.vocab_file, "--merge-file", first.merge_file]
    words += ["--train-samples", "40", "--global-batch-size", "4", "--skip-train-iteration-range", "3-3"]
    in_order = [row for rows in trained["seen"] for row in rows]
    assert tokens_of(capsys, *words, "--sample-id-range", "6", "16") == in_order[4:]
    ramp = ["--rampup-batch-size", "2", "2", "8"]
    assert tokens_of(capsys, *words, *ramp, "--start-step", "2", "--end-step", "2") == trained["seen"][1]
    assert tokens_of(capsys, *words, *ramp, "--start-step", "4", "--end-step", "5") == in_order[6:]


def test_the_order_of_a_run_without_checkpoints_comes_from_its_folder(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained["folder"] / "run", run)
    config = json.loads((run / "config.1.json").read_text())
    config["saving"]["save"] = str(tmp_path / "nowhere")
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"exactly once, at step 0 \(its starts: \[0, 5\]\), and has no checkpoint"):
        tool.main(["--run-dir", str(run), "--start-step", "1"])
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in metrics[:6]))
    assert tokens_of(capsys, "--run-dir", str(run), "--start-step", "5") == trained["seen"][4]
    (run / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config.json is not JSON: .* Give the folder of a run"):
        tool.main(["--run-dir", str(run), "--start-step", "1"])


def test_files_that_were_moved(trained: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prefixes = []
    for name, corpus in (("b", trained["second"]), ("a", trained["first"])):
        prefixes.append(str(tmp_path / name))
        for suffix in (".bin", ".idx"):
            shutil.copy(corpus.prefix + suffix, prefixes[-1] + suffix)
    words = ["--load", str(trained["folder"] / "checkpoints"), "--data-path", "0.5", prefixes[0], "0.5", prefixes[1]]
    words += ["--data-cache-path", str(tmp_path / "cache")]
    in_order = [row for rows in (*trained["seen"], *trained["resumed"]) for row in rows]
    assert tokens_of(capsys, *words, "--sample-id-range", "8", "24") == in_order[6:]


def test_plain_lines_and_a_file(trained: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--load", str(trained["folder"] / "checkpoints"), "--sample-id-range", "0", "2"]
    tokenizer = build_tokenizer(parse(trained["flags"]).data)
    rows = trained["seen"][0]
    text = "\n".join(f"{number} {tokenizer.decode(row)}" for number, row in enumerate(rows))
    assert "\n".join(lines(capsys, *words, "--print-text")) == "\n".join(text.splitlines())
    shown = lines(capsys, *words, "--print-tokens")
    assert shown[1] == f"1 [{', '.join(map(str, rows[1][:6]))}, ..., {', '.join(map(str, rows[1][-6:]))}]"
    assert lines(capsys, *words, "--print-tokens", "--all-tokens")[0] == f"0 {rows[0]}"
    file = tmp_path / "out.jsonl"
    assert lines(capsys, *words, "--output-file", str(file)) == []
    assert [json.loads(line)["sample"] for line in file.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load a --run-dir b --start-step 1", "--load a cannot be combined with --run-dir b"),
        ("--load a", "expected exactly one of --sample-id-range"),
        ("--load a --start-sample 1", "expected exactly one of --sample-id-range"),
        ("--load a --start-step 1 --sample-id-range 1 2", "expected exactly one of --sample-id-range"),
        ("--load a --end-step 3", "--end-step 3 requires a --start-step"),
        ("--load a --start-step 4 --end-step 3", "--end-step 3 requires a --start-step of at most 3"),
        ("--sample-id-range 1 2", "--seq-length of the training run is required"),
        (
            "--sample-id-range 1 2 --train-weighted-split-paths-path /nowhere.txt",
            "--train-weighted-split-paths-path /nowhere.txt",
        ),
        ("--seq-length 32 --sample-id-range 1 2", "Give --train-samples"),
        (
            "--seq-length 32 --train-iters 4 --sample-id-range 1 2",
            "--train-iters counts steps.*Give --global-batch-size",
        ),
        ("--seq-length 32 --train-samples 4 --start-step 1", "--start-step counts steps.*Give --global-batch-size"),
    ],
)
def test_wrong_flags(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool.main(words.split())


def test_samples_that_cannot_be_shown(trained: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = ["--load", str(trained["folder"] / "checkpoints")]
    with pytest.raises(DataError, match="Samples 5 to 41 are not within the 40 planned training samples"):
        tool.main([*checkpoint, "--sample-id-range", "5", "41"])
    with pytest.raises(CheckpointError, match="no checkpoint in .*empty"):
        tool.main(["--load", str(tmp_path / "empty"), "--start-step", "1"])
    other = write_vocabulary(tmp_path, 520)
    files = ["--vocab-file", str(other.vocab_file), "--merge-file", str(other.merge_file)]
    with pytest.raises(CheckpointError, match="the run was trained with another tokenizer .* or print ids"):
        tool.main([*checkpoint, "--start-step", "1", *files])
    assert tool.main([*checkpoint, "--start-step", "1", *files, "--print-tokens"]) == 0


def test_steps_to_samples() -> None:
    optim = optim_config(rampup_batch_size=(2, 2, 12), train_samples=100)  # 2 2 4 6 8 8 ...
    assert samples_of_steps(1, 1, optim, ()) == (0, 2)
    assert samples_of_steps(2, 5, optim, ()) == (2, 22)
    assert samples_of_steps(3, 4, optim, ((2, 2),)) == (8, 22)
    assert samples_of_steps(1, 2, optim, (), Progress(step=5, consumed_samples=22)) == (0, 4)
    with pytest.raises(ConfigError, match="had consumed 20 samples at step 5, .* give 22"):
        samples_of_steps(1, 2, optim, (), Progress(step=5, consumed_samples=20))
    logged = {4: {"consumed_samples": 30, "global_batch_size": 8}, 5: {"consumed_samples": 40, "global_batch_size": 8}}
    assert samples_of_logged_steps(4, 5, logged) == (22, 40)
    with pytest.raises(DataError, match="The run logged steps 4 to 5, but not step 3"):
        samples_of_logged_steps(3, 5, logged)
    with pytest.raises(DataError, match="The run logged no step"):
        samples_of_logged_steps(3, 5, {})


def test_masked_samples_are_shown_with_what_they_hide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    indexed, vocabulary = write_sentences(tmp_path / "bert_text_sentence", 20), write_masked_vocabulary(tmp_path)
    words = ["--objective", "masked", "--data-path", indexed.prefix, "--seq-length", "32", "--split", "1,0,0"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary.vocab_file)]
    words += ["--train-samples", "40", "--global-batch-size", "4", "--sample-id-range", "3", "6"]
    records = [json.loads(line) for line in lines(capsys, *words, "--sentence-order-head", "--all-tokens")]
    assert [record["sample"] for record in records] == [3, 4, 5]
    for record in records:
        assert len(record["tokens"]) == 32 and record["text"].startswith("[CLS]") and record["hidden"]
        assert record["text"].count("[SEP]") == 2 and all(0 < place < 32 for place, _ in record["hidden"])
    assert any("[MASK]" in record["text"] for record in records)
    stream = lines(capsys, *words, "--masked-samples", "stream", "--print-tokens")
    assert [line.split()[0] for line in stream] == ["3", "4", "5"]
