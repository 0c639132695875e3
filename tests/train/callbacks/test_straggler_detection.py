"""The report on the slowest rank: two ranks of a run, one of which is slow, say so without waiting for each other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.watch.limits import WatchLimits
from megatron.train.callbacks import straggler_detection
from megatron.train.watchdog import Watch
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus


def run_with_a_slow_rank(rank: int, corpus: TinyCorpus, folder: str) -> None:
    """A run of which rank 1 needs longer for each step, with a report every third step."""
    import pretrain_gpt

    straggler_detection.INTERVAL_STEPS = 3
    WatchLimits.beat_seconds = property(lambda limits: 0.3)  # type: ignore[assignment]
    real = Watch.trained

    def trained(watch: Watch, data_seconds: float, computing_seconds: float) -> None:
        real(watch, data_seconds, computing_seconds + 5.0 * rank)
        watch.enter("data")
        if rank == 0:  # what both say of this step has arrived before the next one can be reported
            until = time.monotonic() + 60
            while min(entry.get("pace", [0])[0] for entry in watch.ranks()) < watch._pace.steps:
                assert time.monotonic() < until
                time.sleep(0.02)

    Watch.trained = trained  # type: ignore[method-assign]
    flags = corpus.flags("--hang-timeout-seconds", "60", folder=Path(folder), train_iters=12)
    assert pretrain_gpt.train(flags) == 0


@pytest.mark.full
def test_a_slow_rank_is_shown_and_named(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path)
    run_ranks(run_with_a_slow_rank, 2, corpus, str(tmp_path / "run"))
    events: list[dict[str, Any]] = [
        json.loads(line) for path in tmp_path.rglob("events.jsonl") for line in path.read_text().splitlines()
    ]
    texts = [event["text"] for event in events if event["kind"] == "slowest_rank"]
    assert len(texts) == 4 and all(text.startswith("rank 1 on ") and ": computation " in text for text in texts)
    assert all(f"slowest of 2 ranks in {count} of {count} reports" in text for count, text in enumerate(texts, 1))
    assert [event["iteration"] for event in events if event["kind"] == "straggler"] == [9]
