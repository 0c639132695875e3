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


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        small().model.num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "section", "field", "value"),
    [
        ("--kill-switch-file stop", "stopping", "kill_switch_path", "stop"),
        ("--no-log-learnig-rate-to-tensorboard", "report", "log_learning_rate_to_tensorboard", False),
        ("--no-log-learning-rate-to-tensorboard", "report", "log_learning_rate_to_tensorboard", False),
        ("--override-opt_param-scheduler", "optim", "override_lr_scheduler", True),
        ("--use-checkpoint-opt_param-scheduler", "optim", "use_checkpoint_lr_scheduler", True),
        ("--local_rank=3", "parallel", "local_rank", 3),
        ("--local-rank 3", "parallel", "local_rank", 3),
        ("--exit-signal-handler", "stopping", "exit_on_signal", True),
        ("--no-exit-on-signal", "stopping", "exit_on_signal", False),
        ("--no-masked-softmax-fusion", "kernels", "masked_softmax_fusion", False),
        ("--no-bias-gelu-fusion", "model", "bias_gelu_fusion", False),
        ("--recompute-granularity full", "recompute", "checkpoint_activations", True),
        ("--recompute-activations", "recompute", "recompute_granularity", "selective"),
        ("--deepspeed", "parallel", "deepspeed", True),
        ("--split 90,10", "data", "split_shares", (0.9, 0.1, 0.0)),
        ("--split 1/1/2", "data", "split_shares", (0.25, 0.25, 0.5)),
        ("--skip-train-iteration-range 4-7 2-2 6-9", "safety", "skip_ranges", ((2, 2), (4, 9))),
        ("--skip-train-iteration-range 1-2 3-4", "safety", "skip_ranges", ((1, 2), (3, 4))),
        ("--eval-only False", "evaluation", "eval_only", False),
    ],
)
def test_spellings_and_structured_values(text: str, section: str, field: str, value: object) -> None:
    assert getattr(getattr(small(text), section), field) == value


def test_weighted_groups() -> None:
    text = '--train-weighted-split-paths "TRAIN: 0.2 0:0.5 a, 1 0.5:1 b" '
    text += '--valid-weighted-split-paths "V: 1 0:1 c" "W: 2 0:1 d"'
    data = small(text, drop="--data-path").data
    (train,) = data.train_groups
    assert train.name == "TRAIN"
    assert [(one.weight, one.start, one.stop, one.prefix) for one in train.entries] == [
        (0.2, 0, 0.5, "a"),
        (1, 0.5, 1, "b"),
    ]
    assert [group.name for group in data.valid_groups] == ["V", "W"] and data.test_groups == ()


def test_separate_paths_are_whole_files() -> None:
    (group,) = small("--train-data-path 3 a 1 b", drop="--data-path").data.train_groups
    assert [(one.weight, one.start, one.stop, one.prefix) for one in group.entries] == [(3, 0, 1, "a"), (1, 0, 1, "b")]


def test_positions_without_rows_need_no_number_of_rows() -> None:
    for kind in ("rope", "alibi", "none"):
        config = small(f"--position-embedding-type {kind}", drop="--max-position-embeddings")
        assert config.model.max_position_embeddings == 32
        assert not config.was_given("model.max_position_embeddings")
    assert small("--position-embedding-type rope --max-position-embeddings 16").model.max_position_embeddings == 16


def test_groups_that_the_ranks_do_not_divide_are_replicated() -> None:
    assert small("--num-query-groups 1 --tensor-model-parallel-size 4").model.num_query_groups == 1


def test_evaluation_needs_neither_length_nor_rate() -> None:
    assert small("--eval-only --load x", drop="--lr --train-iters").evaluation.eval_only


def test_heads_of_a_given_width_need_not_divide_the_model() -> None:
    assert small("--num-attention-heads 5 --kv-channels 12").model.kv_channels == 12


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


def test_parse_does_not_modify_its_arguments() -> None:
    argv = tuple(words())
    assert parse(argv) == parse(list(argv))


def test_without_flags_only_flags_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse([])
    assert all(" is required" in text or " are required" in text for text in caught.value.problems)


def test_a_split_is_shown_without_spaces() -> None:
    with pytest.raises(ConfigError, match=r"--split 9,1,0 cannot be combined with --train-data-path"):
        small("--split '9, 1, 0' --train-data-path x", drop="--data-path")
    with pytest.raises(ConfigError, match=r"--split 9,1,0,0 must have up to three shares"):
        small("--split '9, 1, 0, 0'")


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


def test_switches_of_single_fusions_ask_for_torch() -> None:
    assert small("").requested_kernels["activation"] == "auto"
    assert small("--no-bias-gelu-fusion").requested_kernels["activation"] == "torch"
    assert small("--no-bias-gelu-fusion --kernels activation=csrc").requested_kernels["activation"] == "csrc"
    assert small("--disable-bias-linear").requested_kernels["activation"] == "auto"  # turns that fusion off by itself


@pytest.mark.parametrize(
    "text",
    ["--data-path a --data-path b", "--config a.json --config b.json", "--window-size 5,0 --window-size 7,0",
     "--num-experts 4 4 8 8 --num-experts 8"],
)  # fmt: skip
def test_a_blend_a_file_of_flags_and_sizes_by_layer_are_given_once(text: str) -> None:
    option = text.split()[0]
    with pytest.raises(ConfigError, match=f"{option} is given twice: .* Give it once"):
        small(text)
