"""The commands of docs/seeds/jax_lm_training.md: windows, training, metrics, token files, and JAX."""

from __future__ import annotations

import json
import math
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import WindowFile
from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.projects.jax_lm_page import PageRun

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("jax-lm-training")]


FIGURES = r"epoch: (\d+) step: (\d+)/(\d+) loss: (\d+\.\d{4}) ppl: (\d+\.\d\d)"
TRAIN_LINE = re.compile(rf"\[TRAIN\] {FIGURES} ETA \d+:\d\d:\d\d")
EVAL_LINE = re.compile(rf"\[EVAL\] {FIGURES}")
STEPS, EPOCH_STEPS, INTERRUPTED_AT = 24, 12, 7


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
    assert len(offline) == 1, "only the third run enables Weights & Biases"
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
