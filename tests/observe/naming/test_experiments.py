"""Checks the form of an experiment's name."""

from __future__ import annotations

import time

from megatron.observe.naming.experiments import experiment_name


def test_a_name_has_the_second_of_its_start_and_eight_digits() -> None:
    name = experiment_name(lambda digits: digits[10], time.strptime("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S"))
    assert name == "bert_pretrain.2026.01.02.03.04.05.aaaaaaaa"
