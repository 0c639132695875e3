"""`sft.py` leaves frozen layers bit-identical, lowers the validation loss, and transformers loads the
result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.gpt2_all_in import sft
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.loaded_model import open_checkpoint
from megatron.observe.metrics_file import read_records
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import load_chat_template
from tests.helpers.ranks import run_ranks
from tests.seeds.conftest import FineTuning
from tools import checkpoints

pytestmark = pytest.mark.xdist_group("fine-tuning scenarios")  # one worker, so that the network is trained once


@dataclass(frozen=True)
class Tuned:
    """What `sft.py` made of the network that `fine_tuning` pretrained."""

    base: FineTuning
    run: Path


def _sft(rank: int, words: list[str]) -> int:
    return sft.main(words)


@pytest.fixture(scope="module")
def tuned(fine_tuning: FineTuning, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The last of two layers and the final norm, trained on the pairs."""
    run = tmp_path_factory.mktemp("sft") / "run"
    words = [
        *("--model", str(fine_tuning.base), "--data", str(fine_tuning.folder / "train.jsonl"), "--layers", "1"),
        *("--epochs", "30", "--lr", "2e-2", "--output", str(run), "--batch-size", "8", "--global-batch-size", "8"),
        *("--chat-template", "dsgpt2", "--keep-last", "4"),
    ]
    assert run_ranks(_sft, 1, words) == [0]
    return Tuned(fine_tuning, run)


def test_002_7_frozen_layers_are_bit_identical(tuned: Tuned) -> None:
    before, after = tuned.base.weights(tuned.base.base), tuned.base.weights(tuned.run / "ckpt")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    trained = ("decoder.layers.1.", "decoder.final_layernorm.")
    assert changed == {name for name in after if name.startswith(trained)} and len(changed) == 14


def test_the_validation_loss_falls_and_the_best_checkpoint_is_named_and_loads(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [entry for entry in read_records(tuned.run) if entry["kind"] == "evaluation"]
    losses = {entry["iteration"]: entry["lm_loss"] for entry in records if entry["group"] == "valid"}
    assert losses[max(losses)] < losses[min(losses)] - 0.5
    assert checkpoints.main(["list", str(tuned.run / "ckpt"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    rated = [entry for entry in listed if entry["validation_loss"] is not None]  # those that were evaluated as well
    best = min(rated, key=lambda entry: float(entry["validation_loss"]))
    assert best["validation_loss"] == min(losses[entry["step"]] for entry in rated)
    assert open_checkpoint(best["path"], {}, ParallelMesh.single()).step == best["step"]


def test_transformers_loads_it_and_answers_as_our_network_does(tuned: Tuned) -> None:
    transformers = pytest.importorskip("transformers", reason="the export is checked against transformers")
    (exported,) = (tuned.run / "hf").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer, template = tuned.base.tokenizer(), load_chat_template("dsgpt2", None)
    question, answer = tuned.base.pairs[0]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids, is_answer = template.example_ids(messages, tokenizer)
    with torch.no_grad():
        predicted = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    places = [place for place, counts in enumerate(is_answer) if counts]
    right = sum(predicted[place - 1] == ids[place] for place in places)
    assert right / len(places) > 0.6, "one layer has learned most of the answer"


def test_a_model_without_layers_to_freeze_or_without_a_checkpoint_is_refused(
    fine_tuning: FineTuning, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--layers 2 of the 2 layers of .* leaves nothing to freeze"):
        sft.main(["--model", str(fine_tuning.base), "--dev", "--layers", "2"])
    with pytest.raises(ConfigError, match="Give either --data FILE, the chat pairs, or --dev"):
        sft.main(["--model", str(fine_tuning.base)])
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        sft.main(["--model", str(tmp_path), "--dev"])
