"""Beam's options of jax-lm-training that only set the number of processes."""

from __future__ import annotations

import os

import pytest

from tools.corpus.featurize import workers_without_beam


def test_options_of_beam_that_only_count_processes_need_no_beam() -> None:
    pytest.importorskip("tokenizers")
    mode, count = "--direct_running_mode", "--direct_num_workers"
    cores = len(os.sched_getaffinity(0))
    assert workers_without_beam([mode, "multi_processing", count, "0"]) in (cores, None)
    assert workers_without_beam([f"{mode}=multi_processing", f"{count}=3"]) in (3, None)
    assert workers_without_beam([mode, "in_memory"]) in (1, None)
    assert workers_without_beam([]) is None
    assert workers_without_beam(["--project", "mine", mode, "multi_processing"]) is None
    assert workers_without_beam([count, "many"]) in (1, None)
