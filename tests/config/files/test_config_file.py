"""`--config FILE`: the same fields by name; the command line wins; mistakes name file and key."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.errors import ConfigError
from tests.config.command_lines import small, words


def test_flat_json(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps({"clip_grad": 2, "adam-beta2": 0.95, "bf16": True, "data_path": ["1", "a"], "save": None})
    )
    config = small(f"--config {file} --adam-beta2 0.9", drop="--data-path")
    assert (config.optim.clip_grad, config.optim.adam_beta2, config.precision.bf16) == (2.0, 0.9, True)
    assert config.data.data_path == ("1", "a") and config.saving.save is None
    assert config.provenance["optim.clip_grad"] == "file" and config.provenance["optim.adam_beta2"] == "given"


def test_a_switch_in_the_file_is_overridden_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"checkpoint_activations": true, "no_exit_on_signal": true, "no-save-optim": true}')
    assert small(f"--config {file}").stopping.exit_on_signal is False
    config = small(f"--config {file} --no-checkpoint-activations --exit-on-signal --no-save-optim false")
    assert (
        not config.recompute.checkpoint_activations
        and config.stopping.exit_on_signal
        and not config.saving.no_save_optim
    )


def test_yaml_by_section(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text("optim:\n  lr: 1e-4\n  weight_decay: 0.1\nzero-stage: 2\ndata:\n  split: 90,10\n")
    config = small(f"--config {file}", drop="--lr")
    assert (config.optim.lr, config.optim.weight_decay, config.parallel.zero_stage) == (1e-4, 0.1, 2)
    assert config.data.split == "90,10"
    file.write_text("")
    assert small(f"--config {file}").optim.lr == 1e-3


def test_a_written_config_repeats_the_run(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    first = small("--train-samples 64 --bf16 --rampup-batch-size 2 2 8", drop="--train-iters")
    machine, facts = Machine("cpu", 1, False, True), TokenizerFacts(100, 99, "f")
    written = resolve(first, machine, facts)
    file.write_text(json.dumps(written.to_json()))
    again = resolve(parse(["--config", str(file)]), machine, facts)
    assert (again.model, again.parallel, again.optim, again.data) == (
        written.model, written.parallel, written.optim, written.data,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"clip_gard": 1}', r'a\.json: the key "clip_gard" is unknown\. Did you mean "clip_grad"\?'),
        ("a.json", '{"zzz": 1}', r'a\.json: the key "zzz" is unknown\. Keys are the flags of --help'),
        ("a.json", '{"clip_grad": "much"}', r"""a\.json: "clip_grad" must be a number, not 'much'\."""),
        ("a.json", '{"save_interval": 1.5}', r'a\.json: "save_interval" must be an integer, not 1\.5\.'),
        ("a.json", '{"save_interval": true}', r'a\.json: "save_interval" must be an integer, not True\.'),
        ("a.json", '{"bf16": "yes"}', r"""a\.json: "bf16" must be true or false, not 'yes'\."""),
        ("a.json", '{"save": 3}', r'a\.json: "save" must be a string, not 3\.'),
        ("a.json", '{"zero_stage": 9}', r'a\.json: "zero_stage" must be one of 0, 1, 2, 3, not 9\.'),
        ("a.json", '{"rampup_batch_size": [1, 2]}', r'"rampup_batch_size" must be a list of 3 values, got 2\.'),
        ("a.json", '{"clip_grad": -1}', r"--clip-grad -1\.0 is out of range"),
        ("a.json", '{"mos": true}', r"--mos requires --load-teacher"),
        ("a.json", '{"clip_grad": 1, "clip_grad": 2}', r'a\.json has the key "clip_grad" twice'),
        ("a.json", '{"clip_grad": 1, "clip-grad": 2}', r'a\.json: "clip-grad" sets the same flag as another key'),
        ("a.json", '{"optim": {"lr": 1}, "lr": 2}', r'a\.json: "lr" sets the same flag as another key'),
        ("a.json", '{"clip_grad": NaN}', r'a\.json: "clip_grad" must be a number, not nan'),
        ("a.json", '{"save_interval": Infinity}', r'a\.json: "save_interval" must be an integer, not inf'),
        ("a.json", '{"model": 3}', r'a\.json: the key "model" is unknown'),
        ("a.json", "[" * 100_000, r"a\.json has values more than 32 levels deep"),
        ("a.json", "{", r"a\.json is not JSON"),
        ("a.json", "[1]", r"a\.json must contain .* not list"),
        ("a.yaml", "a: [", r"a\.yaml is not YAML"),
        ("a.yaml", "just words", r"a\.yaml must contain .* not str"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(f"--config {file}")
    assert len(caught.value.problems) == 1


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config none.json cannot be read: No such file"):
        small("--config none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.json is not UTF-8 text"):
        small(f"--config {tmp_path}/bytes.json")


def test_yaml_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("lr: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="YAML requires PyYAML"):
        small(f"--config {tmp_path}/a.yaml")


def test_the_file_may_hold_what_is_required(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    pairs = words()
    file.write_text(json.dumps({pairs[i][2:]: _number(pairs[i + 1]) for i in range(0, len(pairs), 2)}))
    assert parse(["--config", str(file)]).optim == small().optim


def _number(word: str) -> object:
    try:
        return json.loads(word)
    except ValueError:
        return word
