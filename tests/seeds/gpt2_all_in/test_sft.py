"""`sft.py` leaves frozen layers bit-identical and rejects what it cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.gpt2_all_in import sft
from megatron.errors import CheckpointError, ConfigError
from tests.helpers.ranks import run_ranks
from tests.seeds.conftest import FineTuning

pytestmark = pytest.mark.xdist_group("fine-tuning scenarios")  # one worker, so that the network is trained once


def _sft(rank: int, words: list[str]) -> int:
    return sft.main(words)


def test_002_7_frozen_layers_are_bit_identical(fine_tuning: FineTuning, tmp_path: Path) -> None:
    words = [
        *("--model", str(fine_tuning.base), "--data", str(fine_tuning.folder / "train.jsonl"), "--layers", "1"),
        *("--epochs", "3", "--lr", "2e-2", "--output", str(tmp_path / "run"), "--batch-size", "8"),
        *("--global-batch-size", "8", "--chat-template", "dsgpt2", "--keep-last", "4"),
    ]
    assert run_ranks(_sft, 1, words) == [0]
    before, after = fine_tuning.weights(fine_tuning.base), fine_tuning.weights(tmp_path / "run" / "ckpt")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    trained = ("decoder.layers.1.", "decoder.final_layernorm.")
    assert changed == {name for name in after if name.startswith(trained)} and len(changed) == 14


def test_a_model_without_layers_to_freeze_or_without_a_checkpoint_is_refused(
    fine_tuning: FineTuning, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--layers 2 of the 2 layers of .* leaves nothing to freeze"):
        sft.main(["--model", str(fine_tuning.base), "--dev", "--layers", "2"])
    with pytest.raises(ConfigError, match="Give either --data FILE, the chat pairs, or --dev"):
        sft.main(["--model", str(fine_tuning.base)])
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        sft.main(["--model", str(tmp_path), "--dev"])
