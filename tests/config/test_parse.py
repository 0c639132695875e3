"""From a command line to a `RunRequest`: values, provenance, and every refusal of a combination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import Program, RunRequest, parse
from megatron.config.parse import field_flags
from megatron.errors import ConfigError
from tests.config.command_lines import small, words


def test_values_and_provenance() -> None:
    config = small("--bf16 --clip-grad 0.5")
    assert (config.model.num_layers, config.optim.clip_grad, config.precision.dtype_name) == (4, 0.5, "bfloat16")
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (256, 16)
    assert config.parallel.zero_stage == 1 and config.data.split == "969, 30, 1" and config.stopping.exit_on_signal
    assert config.was_given("optim.clip_grad") and not config.was_given("optim.weight_decay")
    assert config.notices == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_input_gives_a_config_or_a_config_error(data: st.DataObject) -> None:
    options = st.sampled_from(sorted(text for one in field_flags().values() for text in one.spellings))
    values = st.sampled_from(
        ["0", "1", "2", "-1", "1e-3", "nan", "x", "", "1:2", "a=b", "-", "9" * 40, "0.5", "true", "fp"]
    )
    drawn = data.draw(st.lists(st.one_of(options, values, st.text(max_size=4)), max_size=12))
    try:
        config = parse([*words(), *(word for word in drawn if word not in ("-h", "--help"))])
    except ConfigError as failure:
        assert failure.problems and all(text.strip() for text in failure.problems)
    else:
        assert RunRequest.from_json(json.loads(json.dumps(config.to_json()))).to_json() == config.to_json()


def test_without_flags_only_flags_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse([])
    assert all(" is required" in text or " are required" in text for text in caught.value.problems)


def test_a_program_decides_a_value_of_its_own() -> None:
    program = Program(fixed={"loss.objective": "prefix"})
    for more in ([], ["--objective", "prefix"]):
        request = parse([*words(), *more], program=program)
        assert request.loss.objective == "prefix" and request.was_given("loss.objective")
    with pytest.raises(
        ConfigError, match="--objective causal was requested, but this program requires --objective pref"
    ):
        parse([*words(), "--objective", "causal"], program=program)


def test_a_file_may_not_disagree_with_the_program(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"objective": "causal"}')
    flags = [*words(), "--config", str(tmp_path / "run.json")]
    with pytest.raises(ConfigError, match="but this program requires --objective multitask"):
        parse(flags, program=Program(fixed={"loss.objective": "multitask"}))
    assert parse(flags).loss.objective == "causal"


def test_a_programs_defaults_give_way_to_files_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"clip-grad": 0.5, "weight-decay": 0.3}))
    defaults = {"optim.clip_grad": 0.0, "optim.weight_decay": 0.2, "optim.adam_beta2": 0.98, "report.log_interval": 7}
    line = words(f"--config {path} --weight-decay 0.4")
    request = parse(line, program=Program(defaults=defaults))
    optim = request.optim
    assert (optim.clip_grad, optim.weight_decay, optim.adam_beta2, request.report.log_interval) == (0.5, 0.4, 0.98, 7)
    assert not request.was_given("optim.adam_beta2")


def test_a_programs_default_gives_way_to_an_alternative() -> None:
    request = parse(words("--fp16"), program=Program(defaults={"finetuning.epochs": 5, "precision.bf16": True}))
    assert (request.finetuning.epochs, request.precision.dtype_name) == (None, "float16")
    request = parse(words(drop="--train-iters"), program=Program(defaults={"finetuning.epochs": 5}))
    assert request.finetuning.epochs == 5


def test_a_deepspeed_file_wins_over_a_programs_default(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 0.25}))
    request = parse(words(f"--deepspeed_config {path}"), program=Program(defaults={"optim.clip_grad": 0.0}))
    assert request.optim.clip_grad == 0.25
