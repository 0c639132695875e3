"""A configuration file makes a named run, or is refused with what is allowed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.gpt2_all_in import train
from examples.gpt2_all_in.flags import PROGRAM, AllInOneFlags, command_line
from megatron.config import RunConfig, parse
from megatron.errors import ConfigError, ExitCode
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
    assert len(list(Path("logs").glob("[a-z]*"))) == 2, "a second run of the same hour has a name of its own"


def _scalars(folder: Path) -> dict[str, list[int]]:
    """The steps at which each tag has a value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: sorted({event.step for event in events.Scalars(tag)}) for tag in events.Tags()["scalars"]}


MISTAKES = {
    "unknown key": ({"model": {"n_layers": 4}}, 'the key "model.n_layers" is unknown. Did you mean "n_layer"?'),
    "wrong type": ({"model": {"n_ctx": 24.5}}, '"model.n_ctx" must be an integer, not 24.5'),
    "text for a switch": ({"trainer": {"bfloat16": "false"}}, "\"trainer.bfloat16\" must be true or false, not"),
    "heads": ({"model": {"n_head": 5, "d_model": 32}}, '"model.n_head" 5 does not divide "model.d_model" 32. Use one '),
    "dataset": ({"dataset": "foo"}, "\"dataset\" must be dev or full, not 'foo'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_002_2_mistakes_name_file_key_and_what_is_allowed(tmp_path: Path, mistake: str) -> None:
    changes, sentence = MISTAKES[mistake]
    path = write(tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        train.main(["--config", str(path)])
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    program = Path(train.__file__)
    words = [sys.executable, str(program), "--config", str(write(tmp_path, {"dataset": "foo"}))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.USAGE and "must be dev or full" in done.stderr


def test_the_width_of_the_feed_forward_layers_follows_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": {"d_model": 64, "n_head": 4}})
    assert parse(command_line(AllInOneFlags(config=str(path)), ()), program=PROGRAM).model.ffn_hidden_size == 256


def write(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({"dataset": "dev", **changes}))
    return path
