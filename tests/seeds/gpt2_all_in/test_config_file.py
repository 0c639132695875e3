"""A configuration file makes a named run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.gpt2_all_in import train
from megatron.config import RunConfig
from tests.helpers.projects.all_in_one import losses

NAME = re.compile(r"[a-z]+_[a-z]+-\d{8}")


def test_002_1_a_config_file_makes_a_named_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--train-iters", "24", "--log-interval", "8", "--eval-interval", "12", "--save-interval", "12"]
    assert train.main(["--config", "cpu.json", *flags, "--tensorboard-log-interval", "8"]) == 0
    (run,) = Path("logs").glob("[a-z]*")
    assert NAME.fullmatch(run.name)
    assert losses(run)[-1] < losses(run)[0] - 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Step")]
    assert [line.partition(" | ")[0] for line in lines] == ["Step: 8", "Step: 16", "Step: 24"]
    assert all(re.fullmatch(r"Step: \d+ \| Loss: \d\.\d{3}", line) for line in lines)
    assert sorted(path.name for path in (run / "ckpt").glob("iter_*")) == ["iter_0000012", "iter_0000024"]
    resolved = RunConfig.from_json(json.loads((run / "config.json").read_text()))
    assert (resolved.model.vocab_size, resolved.model.ffn_hidden_size, resolved.optim.train_iters) == (2048, 256, 24)
    scalars = _scalars(run / "tb")
    assert scalars["loss_train"][0] == 8 and scalars["loss_valid"] == [12, 24]
    assert train.main(["--config", "cpu.json", "--train-iters", "1", "--eval-iters", "0"]) == 0
    assert len(list(Path("logs").glob("[a-z]*"))) == 2, "a second run of the same hour has its own name"


def _scalars(folder: Path) -> dict[str, list[int]]:
    """The steps at which each tag has a value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: sorted({event.step for event in events.Scalars(tag)}) for tag in events.Tags()["scalars"]}
