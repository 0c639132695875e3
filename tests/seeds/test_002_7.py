"""Scenario 002.7: fine-tuning leaves frozen layers bit-identical, lowers the validation loss, and transformers loads
the result.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
import torch

from megatron.inference.loading import open_checkpoint
from megatron.observe.metrics_file import read_records
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import load_chat_template
from tests.seeds.conftest import FineTuning
from tools import checkpoints, export_hf

pytestmark = pytest.mark.xdist_group("fine-tuning scenarios")  # one worker, so that the network is trained once


def test_frozen_layers_are_bit_identical(fine_tuning: FineTuning) -> None:
    before, after = fine_tuning.weights(fine_tuning.base), fine_tuning.weights(fine_tuning.tuned)
    frozen = {name for pattern in fine_tuning.frozen for name in fnmatch.filter(before, pattern)}
    assert len(frozen) == 13
    assert {name for name in after if torch.equal(before[name], after[name])} == frozen


def test_the_validation_loss_falls_and_the_best_checkpoint_is_named_and_loads(
    fine_tuning: FineTuning, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [entry for entry in read_records(fine_tuning.run) if entry["kind"] == "evaluation"]
    losses = {entry["iteration"]: entry["lm_loss"] for entry in records if entry["group"] == "valid"}
    assert losses[120] < losses[10] / 2
    assert checkpoints.main(["list", str(fine_tuning.tuned), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    best = min(listed, key=lambda entry: float(entry["validation_loss"]))
    assert best["validation_loss"] == min(losses[step] for step in (40, 80, 120))
    assert open_checkpoint(best["path"], {}, ParallelMesh.single()).step == best["step"]


def test_transformers_loads_it_and_answers(fine_tuning: FineTuning, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the export is checked against transformers")
    assert export_hf.main(["--load", str(fine_tuning.tuned), "--output", str(tmp_path / "exported")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    tokenizer, template = fine_tuning.tokenizer(), load_chat_template("dsgpt2", None)
    question, answer = fine_tuning.pairs[0]
    prompt = template.prompt_ids([{"role": "user", "content": question}], tokenizer)
    end = template.example_ids(
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenizer
    )[0]
    written = model.generate(torch.tensor([prompt]), max_new_tokens=len(end) - len(prompt), do_sample=False)
    assert written[0].tolist() == end
