"""What fine-tuning does unless asked otherwise, and how little it may be asked."""

from __future__ import annotations

import pytest

from megatron.config.objective.finetuning import FinetuningConfig
from megatron.errors import ConfigError


def test_every_weight_is_trained_and_no_example_is_packed_by_default() -> None:
    section = FinetuningConfig()
    assert (section.freeze, section.pack_examples, section.epochs, section.chat_template) == ((), False, None, None)


def test_a_run_has_at_least_one_epoch() -> None:
    with pytest.raises(ConfigError, match=r"--epochs 0 is out of range\. It must be at least 1\."):
        FinetuningConfig(epochs=0)


def test_a_probability_is_at_most_one() -> None:
    with pytest.raises(ConfigError, match=r"--copy-prompt-probability 1\.5 is out of range\. It must be at most 1\."):
        FinetuningConfig(copy_prompt_probability=1.5)
