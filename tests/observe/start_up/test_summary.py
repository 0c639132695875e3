"""The summary at the start of a run."""

from __future__ import annotations

import dataclasses

from megatron.observe.start_up.summary import Layout, Length, Size, SourceShare, StartSummary

SMALL = StartSummary(
    size=Size(5_300_000, 3_800_000, 5_300_000, 5_300_000, "4 layers, hidden 256"),
    layout=Layout(1, 1, 1, 1, 63 * 2**20),
    length=Length(0, 1000, 8, 8, 4, 256, 2_048_000),
    shares=[SourceShare("text", 1.0, 0.5)],
    start="step 0, new weights",
    kernels="torch for every operation",
    places=[("run folder", "runs/demo")],
)


def test_a_run_on_one_rank() -> None:
    assert SMALL.lines()[1:-1] == [
        "model        5.3M parameters (embeddings 1.5M, 28%): 4 layers, hidden 256",
        "layout       1 rank; 63.0 MiB a rank for weights, gradients and optimizer, plus activations",
        "step         8 samples x 256 = 2.0K tokens, 2 micro-batches of 4 per replica",
        "length       1,000 steps, 2.0M tokens",
        "data         text 100.0% (0.50 epochs)",
        "kernels      torch for every operation",
        "start        step 0, new weights",
        "run folder   runs/demo",
    ]


def test_ignored_flags_take_one_line() -> None:
    lines = dataclasses.replace(SMALL, ignored=["--use-tutel", "--valid-num-workers 3"]).lines()
    assert lines[-2] == "ignored      --use-tutel, --valid-num-workers 3 (docs/reference/flags.md says why)"
    assert len(lines) == len(SMALL.lines()) + 1


def test_the_largest_run_has_sixteen_lines() -> None:
    large = dataclasses.replace(
        SMALL,
        size=Size(235 * 10**9, 234 * 10**9, 22 * 10**9, 10**9, "94 layers"),
        layout=Layout(8, 16, 8, 1, None),
        length=Length(500, 60_000, 256, 1024, 1, 4096, 25 * 10**10),
        shares=[SourceShare(f"source_{number}", weight / 15, 1.0) for number, weight in enumerate([1, 2, 3, 4, 5])],
        places=[("run folder", "r"), ("checkpoints", "c"), ("also to", "TensorBoard t")],
    )
    lines = large.lines()
    assert len(lines) == 16
    assert "235B parameters (22.0B active per token; embeddings 1.0B, 0%; trained 1.0B): 94 layers" in lines[1]
    assert lines[2] == "layout       1024 ranks = 8 pp x 16 dp x 8 tp, ZeRO stage 1"
    assert lines[3] == "             stage 0   [0-7] [8-15] ... [120-127]"
    assert "16 micro-batches of 1 per replica, growing to 1,024 samples" in lines[7]
    assert (
        "source_4 33.3% (1.00 epochs), source_3 26.7% (1.00 epochs), source_2 20.0% (1.00 epochs), 2 others 20.0%"
        in (lines[9])
    )


def test_a_run_that_trains_nothing_has_no_length() -> None:
    evaluated = dataclasses.replace(SMALL, length=Length(1000, 1000, 8, 8, 4, 256, 2_048_000), shares=[])
    labels = [line.split()[0] for line in evaluated.lines()[1:-1]]
    assert labels == ["model", "layout", "kernels", "start", "run"]
