"""What a real run says of itself, in its first lines, its records and its profile. Two pipeline stages share it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from megatron.parallel.schedule.building import idle_share
from tests.helpers.tiny_run import train, write_tiny_corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps on two stages with compiled blocks, the third of which was profiled on both."""
    folder = tmp_path_factory.mktemp("watched")
    flags = write_tiny_corpus(folder).flags(
        *("--profile", "--compile", "--compile-backend", "aot_eager", "--cuda-graphs", "auto"),
        run_dir=folder / "run",
        pipeline_model_parallel_size=2,
        micro_batch_size=1,
        train_iters=4,
        eval_iters=0,
        peak_tflops=0.5,
        profile_steps="2,3",
        profile_ranks=(0, 1),
        tensorboard_dir=folder / "tensorboard",
    )
    assert train(flags, 2) == (0, "")
    return folder / "run"


def test_the_summary_says_what_was_built(run: Path) -> None:
    lines = (run / "log.txt").read_text().splitlines()
    lines = lines[lines.index("-" * 80) :]  # after warnings, as of a builder that is not compiled
    assert lines[1:14] == [
        "model        47.0K parameters (embeddings 21.5K, 46%): 2 layers, hidden 32, 2 heads, vocabulary 640, float32",
        lines[2],
        "             stage 0   [0]",
        "             stage 1   [1]",
        "step         4 samples x 32 = 128 tokens, 4 micro-batches of 1 per replica",
        "pipeline     1f1b: 20.0% idle if all passes take equally long, 36.6% as these chunks cost; "
        "activations of 2 1 micro-batches by stage",
        "length       4 steps, 512 tokens",
        "data         tiny_text_document 100.0% (0.14 epochs)",
        lines[9],
        "start        step 0, new weights",
        f"run folder   {run}: log.txt, metrics.jsonl, config.json",
        "checkpoints  none are written (--save)",
        f"also to      TensorBoard {run.parent / 'tensorboard'}",
    ]
    # The first stage has 20,480 + 1,024 parameters of embeddings and 12,704 of a block; 16 bytes each.
    assert lines[2].startswith("layout       2 ranks = 2 pp x 1 dp x 1 tp, ZeRO stage 1; 534 KiB per rank for weights")
    assert lines[9].startswith("kernels      ") and "; blocks compiled (aot_eager)" in lines[9]
    assert lines[9].endswith("; gradient accumulation not fused: blocks are compiled; no CUDA graphs: there is no GPU")
    assert lines[15] == f"steps 3 to 3 are profiled on rank 0, 1, into {run / 'profile'}"


def test_each_step_records_what_it_waited_for(run: Path) -> None:
    records = read_steps(run)
    assert list(records) == [1, 2, 3, 4]
    for record in records.values():
        # A block of 24 h^2 FLOPs and attention to 16 tokens on each stage; on the second, a head of 640 rows as well.
        assert record["bubble_ratio"] == idle_share("1f1b", 2, 1, 4, (26_624, 26_624 + 2 * 640 * 32))
        assert 0 < record["transfer_seconds"] < record["communication_seconds"] < record["seconds_per_iteration"]
        assert 0 <= record["data_wait_seconds"] < record["seconds_per_iteration"]
        assert 0 < record["model_flops_utilization_ratio"] < 1
        assert record["memory_bytes"] > 2**26
    assert records[1]["eta_seconds"] > 0 and records[4]["eta_seconds"] == 0


def test_a_batch_that_grows_and_ignored_flags_are_named_and_an_evaluation_has_no_length(tmp_path: Path) -> None:
    corpus, run = write_tiny_corpus(tmp_path), tmp_path / "run"
    sizes = {
        "train_samples": 8,
        "train_iters": None,
        "micro_batch_size": 1,
        "save": tmp_path / "save",
        "save_interval": 9,
    }
    ramp = ("--rampup-batch-size", "2", "2", "4", "--use-tutel", "--valid-num-workers", "3")
    assert train(corpus.flags(*ramp, run_dir=run, eval_iters=0, **sizes)) == (0, "")
    lines = (run / "log.txt").read_text().splitlines()
    assert "ignored      --use-tutel, --valid-num-workers 3 (docs/reference/flags.md says why)" in lines
    assert "step         2 samples x 32 = 64 tokens, 2 micro-batches of 1 per replica, growing to 4 samples" in lines
    loaded = ("--eval-only", "--load", str(tmp_path / "save"))
    assert train(corpus.flags(*loaded, run_dir=tmp_path / "evaluated", eval_iters=1, micro_batch_size=1)) == (0, "")
    labels = [line.split()[0] for line in (tmp_path / "evaluated" / "log.txt").read_text().splitlines() if line.strip()]
    assert "start" in labels and "step" not in labels and "length" not in labels
