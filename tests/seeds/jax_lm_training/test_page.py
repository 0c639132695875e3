"""The commands of docs/seeds/jax_lm_training.md: windows, training, metrics, token files, and JAX."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.jax_lm_training.jax_lm import log_style as style
from examples.jax_lm_training.jax_lm import train
from megatron.checkpoint.record import Progress
from megatron.data.datasets.row_dataset import RowDataset
from megatron.data.datasets.sample import Sample
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import WindowFile
from megatron.inference.loaded_model import open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.observe.metrics_file import read_records, read_steps
from megatron.observe.report import Pace, Report, ReportOutputs
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.programs import forking_python
from tests.helpers.projects.jax_lm_page import PageRun
from tests.helpers.ranks import run_ranks
from tests.train.samples import WORKLOAD, Outcome, optim_config, report_config

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("jax-lm-training")]

BEFORE, STRIDE = 1, 15  # special tokens before a window's text; tokens between the beginnings of windows
TYPES = {"input_ids": "int64", "attention_mask": "float32", "labels": "int64"}


def test_004_1_windows_hold_every_token(jax_lm: PageRun) -> None:
    path = jax_lm.folder / "dataset" / "wikitext.train-00000-of-00001"
    tokenizer = build_tokenizer(
        TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(jax_lm.folder / "data" / "tr-tokenizer.json"))
    )
    lines = (jax_lm.folder / "data" / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rows = Dataset.from_parquet(f"{path.parent}/wikitext.train*", cache_dir=str(jax_lm.folder / "cache"))
    assert {name: feature.feature.dtype for name, feature in rows.features.items()} == TYPES
    with WindowFile(path) as file:
        windows = next(file.batches(1000, group=0))
    assert windows.input_ids.tolist() == list(rows["input_ids"])
    ids, kept = windows.input_ids, windows.attention_mask == 1
    assert ((windows.labels == ids) == kept).all() and (windows.labels[~kept] == -100).all()
    row = 0
    for text in texts:
        wanted = tokenizer.encode(text)
        found: list[int] = []
        while len(found) < len(wanted):
            part = ids[row][kept[row]][BEFORE:-1].tolist()
            begin = row_begin(len(found), found, part)
            found = found[:begin] + part
            row += 1
        assert found == wanted
    assert row == len(ids)
    exclamations = sum(tokenizer.encode(text).count(0) for text in texts)
    assert tokenizer.decode([0]) == "!" and exclamations >= len(texts)
    assert (ids[kept] == 0).sum() >= exclamations
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert f"Read {len(texts)} documents with {tokens} tokens; 0 empty documents and 0 bad lines" in jax_lm.err
    assert f"Wrote {len(ids)} windows of 32 positions: {tokens} tokens, " in jax_lm.err
    assert "Dropped 0 tokens" in jax_lm.err


def row_begin(length: int, found: list[int], part: list[int]) -> int:
    """Where a window's text begins in its document: a stride after the one before, with which it overlaps."""
    if not found:
        return 0
    starts = [start for start in range(0, length, STRIDE) if found[start:] == part[: length - start]]
    return starts[-1]


def test_one_worker_writes_the_same_bytes(jax_lm: PageRun) -> None:
    line = (
        "tools/corpus/featurize.py --tokenizer-model data/tr-tokenizer.json --input data/train.jsonl "
        "--min-sequence-length 8 --max-sequence-length 32 --num-special-token-reserved 2 --ignore-label -100 --stride "
        "15 --output-path one/wikitext.train --num-workers 1"
    )
    subprocess.run([forking_python(), *line.split()], cwd=jax_lm.folder, check=True, capture_output=True, timeout=120)
    one, two = (Path(jax_lm.folder, folder, "wikitext.train-00000-of-00001") for folder in ("one", "dataset"))
    assert one.read_bytes() == two.read_bytes()
    assert np.frombuffer(two.read_bytes()[:4], np.uint8).tobytes() == b"PAR1"


FIGURES = r"epoch: (\d+) step: (\d+)/(\d+) loss: (\d+\.\d{4}) ppl: (\d+\.\d\d)"
TRAIN_LINE = re.compile(rf"\[TRAIN\] {FIGURES} ETA \d+:\d\d:\d\d")
EVAL_LINE = re.compile(rf"\[EVAL\] {FIGURES}")
BATCH, STEPS, EPOCH_STEPS, INTERRUPTED_AT = 4, 24, 12, 7


def test_004_2_train_lm(jax_lm: PageRun) -> None:
    lines = jax_lm.log("artifacts")
    trained = [found.groups() for found in map(TRAIN_LINE.fullmatch, lines) if found]
    evaluated = [found.groups() for found in map(EVAL_LINE.fullmatch, lines) if found]
    assert [(int(epoch), int(step)) for epoch, step, *_ in trained] == [
        (int(step > EPOCH_STEPS), step) for step in range(2, STEPS + 1, 2)
    ]
    assert [int(step) for _, step, *_ in evaluated] == [6, 12, 18, 24]
    assert {int(steps) for _, _, steps, *_ in trained + evaluated} == {STEPS}
    for *_, loss, ppl in trained + evaluated:
        assert float(ppl) == pytest.approx(math.exp(float(loss)), rel=1e-4, abs=0.01)
    assert lines.count("save checkpoint to artifacts/") == 6  # every 4 steps; 12 and 24 also end an epoch
    assert sorted(path.name for path in (jax_lm.folder / "artifacts").glob("iter_*")) == [
        "iter_0000016", "iter_0000020", "iter_0000024",
    ]  # fmt: skip
    whole, parts = (read_steps(jax_lm.folder / save / "run") for save in ("artifacts", "twin"))
    assert sorted(whole) == sorted(parts) == list(range(1, STEPS + 1))
    # Two processes up to the interruption; then one, which restored the checkpoint.
    assert [parts[step]["lm_loss"] for step in parts] == pytest.approx(
        [whole[step]["lm_loss"] for step in parts], rel=1e-5
    )
    assert whole[1]["learning_rate"] == 3e-3
    assert whole[STEPS]["learning_rate"] == pytest.approx(3e-3 / STEPS)
    assert f"resumed twin/iter_{INTERRUPTED_AT:07d}: iteration {INTERRUPTED_AT}" in jax_lm.err


def test_the_loss_is_the_mean_over_real_tokens(jax_lm: PageRun) -> None:
    tokenizer = {"data.tokenizer_name_or_path": str(jax_lm.folder / "data" / "tr-tokenizer.json")}
    loaded = open_checkpoint(str(jax_lm.folder / "artifacts"), tokenizer, ParallelMesh.single())
    with WindowFile(jax_lm.folder / "dataset" / "wikitext.test-00000-of-00001") as file:
        windows = next(file.batches(1000, group=0))
    ids = torch.from_numpy(windows.input_ids)
    with torch.inference_mode():
        context = StepSettings().context(torch.zeros(len(ids), dtype=torch.int64), first_sample=0)
        scores = loaded.model(ids, context)[..., : loaded.vocab_size].float().log_softmax(-1)  # [b, s, v]
    nats, tokens = 0.0, 0
    for row in range(len(ids)):
        for place in range(1, ids.shape[1]):
            if windows.attention_mask[row, place] and windows.labels[row, place] != -100:
                nats -= float(scores[row, place - 1, ids[row, place]])
                tokens += 1
    records = read_records(jax_lm.folder / "artifacts" / "run" / "metrics.jsonl")
    (loss,) = [one["lm_loss"] for one in records if one["kind"] == "evaluation" and one["iteration"] == STEPS]
    assert loss == pytest.approx(nats / tokens, rel=1e-4)
    assert (windows.attention_mask == 0).any(), "without padding, the mean over all positions would be the same"


def test_a_restored_run_reads_only_what_follows(jax_lm: PageRun, tmp_path: Path) -> None:
    words = [
        *("--train-dataset-paths", str(jax_lm.folder / "dataset/wikitext.train**"), "--eval-dataset-paths"),
        *(str(jax_lm.folder / "dataset/wikitext.test**"), "--model-save-dir", str(tmp_path / "rest")),
        *("--tokenizer-model", str(jax_lm.folder / "data/tr-tokenizer.json"), "--batch-size", "4", "--num-epochs", "2"),
        *("--max-sequence-length", "32", "--max-position-embeddings", "32", "--learning-rate", "3e-3"),
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--attention-dropout", "0"),
        *("--restore-checkpoint-path", str(jax_lm.folder / "twin" / "iter_0000020"), "--eval-iters", "0"),
    ]
    ((code, read),) = run_ranks(restore, 1, words)
    assert code == 0
    assert sorted(read) == list(range(20 * BATCH, STEPS * BATCH))


def restore(rank: int, words: Sequence[str]) -> tuple[int, list[int]]:
    """Continues a run; returns its exit code and the number of each sample that is read."""
    read: list[int] = []
    original = RowDataset.read

    def recorded(dataset: RowDataset, sample: int) -> Sample:
        read.append(sample)
        return original(dataset, sample)

    RowDataset.read = recorded  # type: ignore[method-assign]
    return train.main(list(words)), read


def test_the_remaining_time_is_right_after_the_third_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow start, steps of a second that vary by a third, and evaluations and saves in between."""
    now, steps, interval = 0.0, 2000, 100
    report = Report(
        report_config(log_interval=interval),
        optim_config(train_iters=steps),
        WORKLOAD,
        ReportOutputs(style),
        pace=Pace(lambda: now),
    )
    report.started(Progress())
    lines_at = []
    for step in range(1, steps + 1):
        now += (60.0 if step == 1 else 1.0) * (1.0 + 0.3 * math.sin(step))
        report.step(Progress(step, 8 * step, 128 * step), Outcome(), 0.1, 1.0)
        if step % interval == 0:
            lines_at.append(now)
            now += 7.0  # evaluates and saves
    for began_at, line in list(zip(lines_at, capsys.readouterr().out.splitlines(), strict=True))[2:-1]:
        hours, minutes, seconds = map(int, line.rpartition("ETA ")[2].split(":"))
        assert 3600 * hours + 60 * minutes + seconds == pytest.approx(now - began_at, rel=0.15)


def test_004_3_parquet_and_token_files(jax_lm: PageRun) -> None:
    folder = jax_lm.folder
    tokenizer = build_tokenizer(
        TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(folder / "data" / "tr-tokenizer.json"))
    )
    texts = [json.loads(line)["text"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    documents = IndexedDataset(str(folder / "data" / "train_text_document"))
    assert [documents[number].tolist() for number in range(len(documents))] == [tokenizer.encode(one) for one in texts]
    for ending in ("bin", "idx"):
        first, again = (folder / "data" / f"{name}_text_document.{ending}" for name in ("train", "again"))
        assert first.read_bytes() == again.read_bytes()
    with (
        WindowFile(folder / "dataset" / "wikitext.train-00000-of-00001") as first_windows,
        WindowFile(folder / "dataset" / "again.train-00000-of-00001") as again_windows,
    ):
        before, after = next(first_windows.batches(1000, group=0)), next(again_windows.batches(1000, group=0))
        assert first_windows.facts == again_windows.facts
    for column in ("input_ids", "attention_mask", "labels"):
        assert (getattr(before, column) == getattr(after, column)).all()


def test_004_4_metrics(jax_lm: PageRun) -> None:
    folder = jax_lm.folder
    steps = read_steps(folder / "artifacts" / "run")
    events = EventAccumulator(str(folder / "artifacts" / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("lm-loss-training/lm loss")}
    assert shown == pytest.approx({step: record["lm_loss"] for step, record in steps.items()}, rel=1e-6)
    offline = list(folder.glob(".wandb/wandb/offline-run-*/run-*.wandb"))
    assert len(offline) == 1, "only the third run asked for Weights & Biases"
    assert not list(folder.glob("wandb")) and not list((folder / "artifacts").rglob("*.wandb"))
    assert b"lm-loss-validation/valid" in offline[0].read_bytes()


def test_004_5_torch_compared_with_jax(jax_lm: PageRun) -> None:
    records = [json.loads(line) for line in jax_lm.out.splitlines() if line.startswith('{"benchmark"')]
    figures = {record["figure"]: record["value"] for record in records}
    assert all(record["steps"] == 6 and record["model"] == "tiny" for record in records)
    for side in ("ours", "jax"):
        assert figures[f"{side}_tokens_per_second"] > 0 and figures[f"{side}_step"] > 0
    assert figures["ours_final_loss"] == pytest.approx(figures["jax_final_loss"], abs=2e-4)
    assert figures["largest_difference_of_losses"] < 100  # 1e-6 nats
    assert figures["ours_final_loss"] < 6.24, "nothing was learnt: the loss is that of equal probabilities, ln 512"
