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


REFUSALS = [
    # the network
    (
        "--num-attention-heads 5",
        "",
        r"--hidden-size 64 cannot be divided among --num-attention-heads 5.*use --hidden-size 65",
    ),
    ("--max-position-embeddings 16", "", r"--max-position-embeddings 16 is less than --seq-length 32"),
    ("", "--max-position-embeddings", r"--max-position-embeddings is required: rows of the learned"),
    (
        "--rope-layer-pattern 1 2 --position-embedding-type rope",
        "",
        r"--rope-layer-pattern 2 is unknown.*one of: 0, 1",
    ),
    ("--fp16 --bf16", "", r"--fp16 and --bf16 are both given"),
    ("--pad-vocab-size-to 5121", "", r"5121 is not divisible by 128.*--pad-vocab-size-to 5248"),
    (
        "--pad-vocab-size-to 5121 --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2",
        "",
        "5121 is not divisible by 2",
    ),
    ("--recompute-activations --recompute-granularity full", "", "--recompute-activations means selective"),
    ("--hidden-dropout 1", "", r"--hidden-dropout 1.0 is out of range\. It must be less than 1"),
    ("--seed 0", "", r"--seed 0 is out of range\. It must be at least 1"),
    # the layout
    (
        "--tensor-model-parallel-size 8",
        "",
        r"4 attention heads cannot be split over 8 ranks.*use one of 1, 2, 4 ranks, or 8 heads",
    ),
    (
        "--ffn-hidden-size 101 --tensor-model-parallel-size 2",
        "",
        r"--ffn-hidden-size 101 cannot be split.*use --ffn-hidden-size 102",
    ),
    (
        "--num-experts 4 --moe-ffn-hidden-size 101 --ffn-hidden-size 99 --tensor-model-parallel-size 2",
        "",
        r"--moe-ffn-hidden-size 101 cannot be split.*use --moe-ffn-hidden-size 102",
    ),
    (
        "--num-experts 4 --moe-shared-expert-intermediate-size 7 --tensor-model-parallel-size 2",
        "",
        r"--moe-shared-expert-intermediate-size 7 cannot be split",
    ),
    (
        "--num-experts 4 --moe-layer-pattern 1 0 --moe-ffn-hidden-size 8 --ffn-hidden-size 9 "
        "--tensor-model-parallel-size 2",
        "",
        r"--ffn-hidden-size 9 cannot be split",
    ),
    ("--pipeline-model-parallel-size 5", "", r"4 layers cannot fill 5 pipeline stages.*use at most 4 stages"),
    (
        "--pipeline-model-parallel-size 2 --zero-stage 3",
        "",
        r"--zero-stage 3 cannot be used with --pipeline.*Use --zero-stage 0, 1 or 2",
    ),
    (
        "--pp-partition-method uniform",
        "",
        r"--pp-partition-method uniform is not supported: .*Use type:transformer",
    ),
    ("--zero-stage 4", "", r"--zero-stage 4 is unknown\. Use one of: 0, 1, 2, 3"),
    ("--distributed-backend mpi", "", r"--distributed-backend mpi is unknown\. Use one of: nccl, gloo"),
    # the optimizer, schedule and batches
    ("", "--micro-batch-size --global-batch-size", "--micro-batch-size is required"),
    ("--train-iters 0", "", r"--train-iters 0 is out of range\. It must be at least 1\. --eval-only evaluates"),
    ("", "--lr", "--lr is required"),
    ("", "--train-iters", "--train-iters, --train-samples, --train-tokens or --epochs is required"),
    ("--train-samples 100", "", r"--train-iters 10 and --train-samples 100 are both given"),
    (
        "--train-tokens 99 --lr-decay-iters 5",
        "--train-iters",
        r"5 cannot be combined with --train-tokens.*decay-tokens",
    ),
    ("--train-tokens 99 --lr-warmup-iters 5", "--train-iters", r"-iters 5 cannot be combined with --train-tokens"),
    ("--lr-warmup-tokens 9 --lr-warmup-iters 5", "", r"--lr-warmup-iters 5 and --lr-warmup-tokens 9 are both given"),
    ("--lr-warmup-tokens 9 --lr-warmup-fraction .1", "", r"-fraction 0.1 and --lr-warmup-tokens 9 are both given"),
    (
        "--start-weight-decay 0.1",
        "",
        r"--start-weight-decay 0.1 cannot be combined with --weight-decay-incr-style constant",
    ),
    (
        "--end-weight-decay 0.1",
        "",
        r"--end-weight-decay 0.1 cannot be combined with --weight-decay-incr-style constant",
    ),
    (
        "--weight-decay-incr-style linear --end-weight-decay 1",
        "",
        r"--weight-decay-incr-style linear needs --start-weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 1",
        "",
        r"--weight-decay-incr-style cosine needs --end-weight-decay",
    ),
    ("--min-lr 1", "", r"--min-lr 1.0 is more than --lr 0.001"),
    ("--global-batch-size 7", "", r"--global-batch-size 7 is not a multiple of --micro-batch-size 2. Use 6 or 8"),
    ("--global-batch-size 1", "", r"--global-batch-size 1 is not a multiple of --micro-batch-size 2. Use 2"),
    (
        "--lr-decay-samples 10",
        "",
        r"--lr-decay-samples 10 cannot be combined with --train-iters\. Use --lr-decay-iters",
    ),
    ("--lr-warmup-samples 10", "", r"--lr-warmup-samples 10 cannot be combined with --train-iters"),
    ("--rampup-batch-size 2 2 10", "", r"--rampup-batch-size 2 2 10 cannot be combined with --train-iters"),
    (
        "--train-samples 99 --lr-decay-iters 5",
        "--train-iters",
        r"--lr-decay-iters 5 cannot be combined with --train-samples",
    ),
    (
        "--train-samples 99 --lr-warmup-iters 5",
        "--train-iters",
        r"--lr-warmup-iters 5 cannot be combined with --train-samples",
    ),
    (
        "--lr-warmup-fraction .1 --lr-warmup-iters 2",
        "",
        r"--lr-warmup-fraction 0.1 and --lr-warmup-iters 2 are both given",
    ),
    ("--lr-warmup-iters 10", "", r"--lr-warmup-iters 10 is not less than --train-iters 10"),
    ("--lr-warmup-iters 5 --lr-decay-iters 5", "", r"--lr-warmup-iters 5 is not less than --lr-decay-iters 5"),
    (
        "--lr-warmup-samples 99 --train-samples 99",
        "--train-iters",
        r"--lr-warmup-samples 99 is not less than --train-samples 99",
    ),
    (
        "--override-lr-scheduler --use-checkpoint-lr-scheduler",
        "",
        r"--use-checkpoint-lr-scheduler contradict each other",
    ),
    ("--rampup-batch-size 0 2 10 --train-samples 99", "--train-iters", r"2 10: start and increment must be positive"),
    (
        "--rampup-batch-size 2 4 10 --train-samples 99",
        "--train-iters",
        r"to --global-batch-size 8 is 6, which is not a multiple of the increment 4",
    ),
    ("--rampup-batch-size 10 2 10 --train-samples 99", "--train-iters", r"starts above --global-batch-size 8"),
    ("--rampup-batch-size 1 7 10 --train-samples 99", "--train-iters", r"must be multiples of --micro-batch-size 2"),
    (
        "--rampup-batch-size 2 2 10 --train-samples 99",
        "--train-iters --global-batch-size",
        r"needs --global-batch-size",
    ),
    # the data
    ("", "--data-path", "--data-path is required"),
    ("--split 1,2,3,4", "", r"--split 1,2,3,4 must be up to three shares"),
    ("--split 1,-1", "", r"--split 1,-1 must be up to three shares, none negative"),
    ("--split a,b", "", r"--split a,b is not a list of numbers"),
    ("--data-path 1 a 2", "", r"--data-path 1 a 2 has 3 words"),
    ("--data-path a 2 b 3", "", r'--data-path a 2 b 3: "a" must be a positive weight'),
    ("--train-data-path a", "", r"--data-path and --train-data-path are both given"),
    ("--train-data-path a --split 9,1,0", "--data-path", r"--split 9,1,0 cannot be combined with --train-data-path"),
    ("--valid-data-path a", "--data-path", r"--valid-data-path is given without --train-data-path"),
    ('--valid-weighted-split-paths "A: 1 0:1 a"', "--data-path", r"is given without --train-weighted-split-paths"),
    (
        '--train-weighted-split-paths "A: 1 0:1 a" "B: 1 0:1 b"',
        "--data-path",
        r"--train-weighted-split-paths has 2 groups",
    ),
    ('--train-weighted-split-paths "1 0.5 a"', "--data-path", r"the name and its colon, or the entries, are missing"),
    ('--train-weighted-split-paths "A: 1 0:1"', "--data-path", r'the entry "1 0:1" has 2 words, not 3'),
    ('--train-weighted-split-paths "A: x 0:1 a"', "--data-path", r'the weight "x" is not a positive number'),
    ('--train-weighted-split-paths "A: 1 1:0 a"', "--data-path", r'the range "1:0" must be START:STOP'),
    ("", "--vocab-file", r"--vocab-file is required by --tokenizer-type GPT2BPETokenizer"),
    ("", "--merge-file", r"--merge-file is required by --tokenizer-type GPT2BPETokenizer"),
    (
        "--tokenizer-type PretrainedFromHF",
        "",
        r"--tokenizer-name-or-path is required by --tokenizer-type PretrainedFromHF",
    ),
    (
        "--tokenizer-type BertWordPieceCase",
        "--vocab-file",
        r"--vocab-file is required by --tokenizer-type BertWordPieceCase",
    ),
    (
        "--tokenizer-type Llama2Tokenizer",
        "--vocab-file",
        r"--tokenizer-model is required by --tokenizer-type Llama2Tokenizer",
    ),
    (
        "--tokenizer-type TikTokenizer",
        "",
        r"--tokenizer-type TikTokenizer is unknown. Use one of: GPT2BPETokenizer",
    ),
    ("--data-impl fasta", "", r"--data-impl fasta is unknown. Use one of: lazy, cached, mmap, infer"),
    # control
    ("--save out --save-interval -1", "", r"--save-interval -1 is out of range"),
    ("--skip-train-iteration-range 5-2", "", r"--skip-train-iteration-range 5-2 is not a range of steps"),
    ("--skip-train-iteration-range x", "", r"--skip-train-iteration-range x is not a range of steps"),
    ("--from-scratch --finetune --load x", "", r"--from-scratch and --finetune contradict"),
    ("--from-scratch --eval-only --load x", "", r"--from-scratch and --eval-only contradict"),
    ("--finetune", "", r"--finetune needs --load"),
    ("--eval-only", "", r"--eval-only needs --load"),
    ("--ckpt-step 5", "", r"--ckpt-step 5 needs --load"),
    ("--load-tag newest --load x", "", r"--load-tag newest names no step.*use --ckpt-step 500"),
    ("--load-tag global_step7 --ckpt-step 8 --load x", "", r"global_step7 and --ckpt-step 8 name two steps"),
    ("--exit-on-missing-checkpoint", "", r"--exit-on-missing-checkpoint needs --load"),
]


@pytest.mark.parametrize(("text", "drop", "sentence"), REFUSALS)
def test_an_invalid_combination_is_rejected(text: str, drop: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(text, drop)
    assert len(caught.value.problems) == 1, caught.value.problems


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


def test_problems_of_all_sections_are_reported_in_one_error() -> None:
    text = "--num-layers x --zero-stage 3 --pipeline-model-parallel-size 5 --min-lr 1 --split a --keep-best --mos --foo"
    with pytest.raises(ConfigError) as caught:
        small(text)
    said = "\n".join(caught.value.problems)
    for part in ("--num-layers takes", "--zero-stage 3", "--min-lr", "--split a", "--keep-best", "--mos", "--foo"):
        assert part in said
    assert "cannot fill" not in said  # the rule about --num-layers, which has no value, keeps quiet
    assert len(caught.value.problems) == 7


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


@pytest.mark.parametrize(
    ("text", "drop", "problems"),
    [
        ("--lr -1", "", ["--lr -1.0 is out of range. It must be at least 0."]),
        ("--hidden-size -3", "", ["--hidden-size -3 is out of range. It must be at least 1."]),
        (
            "--hidden-size -3 --tensor-model-parallel-size 2",
            "",
            ["--hidden-size -3 is out of range. It must be at least 1."],
        ),
        (
            "--hidden-size 0 --ffn-hidden-size 0",
            "",
            [
                "--hidden-size 0 is out of range. It must be at least 1.",
                "--ffn-hidden-size 0 is out of range. It must be at least 1.",
            ],
        ),
        ("", "--hidden-size", ["--hidden-size is required: width of the model."]),
        ("--hidden-size wide", "", ['--hidden-size takes an integer, not "wide".']),
    ],
)
def test_a_wrong_value_is_reported_once(text: str, drop: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        small(text, drop)
    assert caught.value.problems == problems


def test_without_flags_only_flags_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse([])
    assert all(" is required" in text or " are required" in text for text in caught.value.problems)


def test_a_split_is_shown_without_spaces() -> None:
    with pytest.raises(ConfigError, match=r"--split 9,1,0 cannot be combined with --train-data-path"):
        small("--split '9, 1, 0' --train-data-path x", drop="--data-path")
    with pytest.raises(ConfigError, match=r"--split 9,1,0,0 must be up to three shares"):
        small("--split '9, 1, 0, 0'")


def test_a_program_decides_a_value_of_its_own() -> None:
    program = Program(decided={"loss.objective": "prefix"})
    for more in ([], ["--objective", "prefix"]):
        request = parse([*words(), *more], program=program)
        assert request.loss.objective == "prefix" and request.was_given("loss.objective")
    with pytest.raises(ConfigError, match="--objective causal was requested, but this program is for --objective pref"):
        parse([*words(), "--objective", "causal"], program=program)


def test_a_file_may_not_disagree_with_the_program(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"objective": "causal"}')
    flags = [*words(), "--config", str(tmp_path / "run.json")]
    with pytest.raises(ConfigError, match="but this program is for --objective multitask"):
        parse(flags, program=Program(decided={"loss.objective": "multitask"}))
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
