"""The line that a run draws on a terminal."""

from __future__ import annotations

import math
import re

import pytest

from megatron import log
from megatron.config import WatchingConfig
from megatron.observe.progress_bar import ProgressBar, Smoothed, has_colour, wants_bar
from tests.train.samples import metrics, report_config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_average_has_no_bias_to_its_start_and_forgets() -> None:
    smoothed = Smoothed(0.5)
    assert smoothed.value is None
    smoothed.add(4.0)
    assert smoothed.value == 4.0
    smoothed.add(math.nan)
    smoothed.add(1.0)
    assert smoothed.value == (0.25 * 4.0 + 0.5 * 1.0) / 0.75


def test_the_line_has_steps_loss_rate_and_remaining_time() -> None:
    shown: list[str] = []
    bar = ProgressBar(shown.append, Clock(), lambda: 100)
    bar.step(metrics(iteration=500, train_iterations=1000, lm_loss=3.25, tokens_per_second=12_400.0, eta_seconds=754.4))
    (line,) = shown
    assert re.fullmatch(r" 50%\|\S+ +\| 500/1,000 \| loss 3.2500 \| 12.4K tokens/s \| 0:12:34 left", line)
    assert len(line) == 99
    bar.step(metrics(iteration=1000, train_iterations=1000, model_flops_utilization_ratio=0.41))
    assert shown[-1].startswith("100%|") and "| MFU 41%" in shown[-1]


def test_a_narrow_terminal_gets_what_fits() -> None:
    shown: list[str] = []
    ProgressBar(shown.append, Clock(), lambda: 30, has_colour=True).step(metrics(eta_seconds=1.0))
    assert len(re.sub(r"\x1b\[\d*m", "", shown[0])) <= 29
    ProgressBar(shown.append, Clock(), lambda: 10).step(metrics(eta_seconds=1e15))
    assert len(shown[1]) <= 9


def test_colour_is_of_the_bar_alone() -> None:
    bars = [ProgressBar(lambda text: None, Clock(), lambda: 80, has_colour=colour) for colour in (False, True)]
    plain, coloured = (bar.text(metrics()) for bar in bars)
    assert "\x1b" not in plain and "|\x1b[32m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain


def test_it_is_drawn_ten_times_a_second_at_most_and_at_the_end() -> None:
    shown: list[str] = []
    clock = Clock()
    bar = ProgressBar(shown.append, clock, lambda: 80)
    for step in range(1, 101):
        clock.now += 0.01
        bar.step(metrics(iteration=step, train_iterations=100))
    assert 9 <= len(shown) <= 12 and "100/100" in shown[-1]


def test_a_run_without_a_finite_loss_is_shown() -> None:
    shown: list[str] = []
    ProgressBar(shown.append, Clock(), lambda: 80).step(metrics(lm_loss=math.nan, seconds_per_iteration=0.0))
    assert "loss nan" in shown[0] and "tokens/s" not in shown[0]


def test_who_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(log, "is_terminal", lambda name: name == "stderr")
    watching, config = WatchingConfig(), report_config()
    assert wants_bar(watching, config) and has_colour()
    assert not wants_bar(WatchingConfig(progress_bar=False), config)
    assert not wants_bar(watching, report_config(log_style="jax_lm"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert wants_bar(watching, config) and not has_colour()
    log.set_level("warning")
    assert not wants_bar(watching, config)
    log.set_level("info")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_bar(watching, config)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(log, "is_terminal", lambda name: name == "stdout")
    assert not wants_bar(watching, config)
