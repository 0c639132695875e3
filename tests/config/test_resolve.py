"""What the machine and the tokenizer decide, and what they make impossible."""

from __future__ import annotations

import typing

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, check_resume, parse, resolve
from megatron.config.resolve import resolve_epochs, resolve_optim
from megatron.config.schedule import LearningRateSchedule, is_done, planned_iterations, schedule
from megatron.errors import ConfigError
from tests.config.command_lines import small


def resolved(
    text: str = "", drop: str = "", *, world: int = 1, device: str = "cpu", fp16: bool = False, vocabulary: int = 1000
) -> RunConfig:
    """The small command line, resolved on a machine of `world` processes."""
    machine = Machine(device, world, supports_fp16=fp16, supports_bf16=True)
    return resolve(small(text, drop), machine, TokenizerFacts(vocabulary, vocabulary - 1, "f"))


def test_layout_batch_and_vocabulary() -> None:
    config = resolved("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", world=8)
    assert (config.parallel.world_size, config.parallel.data_parallel_size) == (8, 2)
    assert config.parallel.effective_zero_stage == 1 and config.parallel.distributed_backend == "gloo"
    assert (config.model.vocab_size, config.model.padded_vocab_size) == (1000, 1024)
    assert resolved(drop="--global-batch-size", world=3).optim.global_batch_size == 6
    assert resolved() == resolved()


def test_without_a_micro_batch_a_replica_takes_its_share_at_once() -> None:
    for world, share in ((1, 8), (2, 4), (8, 1)):
        assert resolved(drop="--micro-batch-size", world=world).optim.micro_batch_size == share
    ramp = "--train-samples 100 --rampup-batch-size 4 2 12"
    assert resolved(ramp, drop="--micro-batch-size --train-iters", world=2).optim.micro_batch_size == 1
    with pytest.raises(ConfigError, match=r"a global batch of 8 .* is not divisible by 3 data-parallel replicas"):
        resolved(drop="--micro-batch-size", world=3)


@pytest.mark.parametrize(
    ("text", "vocabulary", "padded"),
    [
        ("", 1000, 1024),
        ("", 1024, 1024),
        ("--tensor-model-parallel-size 2", 50257, 50432),
        ("--make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2", 5121, 5122),
        ("--pad-vocab-size-to 1280", 1000, 1280),
    ],
)
def test_padded_vocabulary(text: str, vocabulary: int, padded: int) -> None:
    assert resolved(text, world=2, vocabulary=vocabulary).model.padded_vocab_size == padded


def test_eight_bits_need_hardware_or_emulation() -> None:
    facts, hybrid = TokenizerFacts(1000, 9, "f"), "--bf16 --fp8-format hybrid"
    for machine in (Machine("cpu", 1, False, True), Machine("cuda", 1, True, True)):
        where = machine.device_type
        with pytest.raises(ConfigError, match=rf"--fp8-format hybrid .* \({where}\).* 8.9 or later.*--fp8-emulation"):
            resolve(small(hybrid), machine, facts)
        assert resolve(small(f"{hybrid} --fp8-emulation"), machine, facts).notices == ()
    hopper = Machine("cuda", 1, True, True, supports_fp8=True)
    (notice,) = resolve(small(f"{hybrid} --num-experts 4"), hopper, facts).notices
    assert "experts (--num-experts 4) stay in bf16" in notice


def test_all_problems_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("--fp16 --pad-vocab-size-to 128 --tensor-model-parallel-size 2", world=3)
    assert len(caught.value.problems) == 3


def test_backend() -> None:
    asked = resolved("--distributed-backend nccl")
    assert asked.parallel.distributed_backend == "gloo"
    assert asked.notices == ("--distributed-backend nccl requires CUDA, which is not available: gloo is used.",)
    assert resolved(device="cuda").parallel.distributed_backend == "nccl"
    assert resolved("--distributed-backend gloo", device="cuda").parallel.distributed_backend == "gloo"


def test_compiled_blocks_on_a_gpu_have_no_dropout_inside_of_fused_attention() -> None:
    for text in ("--compile --attention-dropout 0", "--compile --no-fused-attention", "--attention-dropout 0.1"):
        assert resolved(text, device="cuda").kernels.compile == text.startswith("--compile")
    assert resolved("--compile --attention-dropout 0.1").kernels.compile
    with pytest.raises(
        ConfigError, match=r"--compile cannot be combined with --attention-dropout 0\.1 on a GPU.*--no-fused"
    ):
        resolved("--compile --attention-dropout 0.1", device="cuda")


def test_the_optimizer_leaves_a_gpu_only() -> None:
    here, there = resolved("--cpu-optimizer"), resolved("--cpu-optimizer", device="cuda")
    assert (here.parallel.offloads_optimizer, there.parallel.offloads_optimizer) == (False, True)
    sentence = "--cpu-optimizer has no effect without a GPU: the optimizer state is in host memory already."
    assert here.notices == (sentence,) and there.notices == ()
    assert not resolved(device="cuda").parallel.offloads_optimizer
    with pytest.raises(
        ConfigError, match=r"--cpu-optimizer cannot be combined with --zero-stage 0.* Use --zero-stage 1"
    ):
        resolved("--cpu-optimizer --zero-stage 0", device="cuda")


@pytest.mark.parametrize(("text", "stage", "notices"), [("", 0, 0), ("--bf16", 1, 1), ("--fp16", 1, 1)])
def test_half_precision_has_no_stage_0(text: str, stage: int, notices: int) -> None:
    config = resolved(f"--zero-stage 0 {text}", fp16=True)
    assert (config.parallel.effective_zero_stage, len(config.notices)) == (stage, notices)
    assert config.parallel.zero_stage == 0


@pytest.mark.parametrize(
    "ramp", ["", "--rampup-batch-size 2 2 13", "--rampup-batch-size 8 2 9", "--rampup-batch-size 2 6 0"]
)
@pytest.mark.parametrize("samples", [8, 9, 40, 100, 137])
def test_steps_from_samples_are_the_steps_that_the_loop_takes(ramp: str, samples: int) -> None:
    optim = resolved(f"--train-samples {samples} {ramp}", drop="--train-iters").optim
    assert optim.train_iters == planned_iterations(optim)
    step = consumed = 0
    while not is_done(optim, step, consumed):
        batch = 8
        if ramp:
            start, increment, over = optim.rampup_batch_size or (8, 1, 0)
            steps = (8 - start) // increment
            if consumed <= over and steps and over:
                batch = min(8, start + int(consumed * steps / over) * increment)
        step, consumed = step + 1, consumed + batch
    assert step == optim.train_iters


def test_resolving_twice_changes_nothing() -> None:
    config = resolved("--train-samples 64 --rampup-batch-size 2 2 8 --bf16", drop="--train-iters")
    again = resolve(config, Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f"))
    assert again == config


def test_a_run_that_only_evaluates_plans_no_step() -> None:
    config = resolved("--eval-only --load x --min-lr 1e-5", drop="--lr --train-iters")
    assert (config.optim.train_iters, config.optim.lr) == (0, 1e-5)
    assert is_done(config.optim, 0, 0)


def test_resolved_fields_are_never_none() -> None:
    config = resolved(drop="--global-batch-size")
    assert type(config) is RunConfig
    for section in (config.model, config.parallel, config.optim):
        hints = typing.get_type_hints(type(section))
        for name in ("vocab_size", "distributed_backend", "world_size", "global_batch_size", "train_iters", "lr"):
            assert name not in hints or isinstance(getattr(section, name), hints[name])


def test_a_request_is_completed_for_a_known_batch() -> None:
    request = small("--train-samples 20 --rampup-batch-size 2 2 8", drop="--train-iters").optim
    assert resolve_optim(request, 8, 32).train_iters == planned_iterations(resolve_optim(request, 8, 32)) == 4
    assert resolve_optim(small("--train-iters 7").optim, 16, 32).train_iters == 7


def test_tokens_are_divided_by_the_sequence_length() -> None:
    optim = resolved("--train-tokens 640 --lr-warmup-tokens 64 --lr-decay-tokens 320", drop="--train-iters").optim
    assert (optim.tokens_per_sample, optim.train_iters) == (32, 3)  # 20 samples, 8 a step
    assert schedule(optim) == LearningRateSchedule(2, 10)


@pytest.mark.parametrize(
    "flags",
    ["--lr-decay-tokens 64 --lr-warmup-tokens 64", "--lr-decay-tokens 256 --lr-warmup-iters 1",
     "--lr-warmup-tokens 2560"],
)  # fmt: skip
def test_a_warmup_in_tokens_must_end_before_the_decay(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"takes \d+ tokens, but must be shorter than the decay of \d+ tokens"):
        resolved(flags)


def test_a_warmup_beyond_the_run_is_no_matter_of_wsd() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("--lr-decay-tokens 64 --lr-warmup-tokens 6400")
    assert len(caught.value.problems) == 1


def test_the_decay_of_wsd_must_leave_the_warmup() -> None:
    flags = "--train-iters 100 --lr-decay-style WSD --lr-warmup-iters 10 --lr-wsd-decay-iters"
    assert resolved(f"{flags} 90", drop="--train-iters").optim.lr_wsd_decay_iters == 90
    with pytest.raises(ConfigError, match="--lr-wsd-decay-iters 91 is longer than .* 90 iters. Use 9, a tenth"):
        resolved(f"{flags} 91", drop="--train-iters")


def test_a_network_may_have_more_entries_than_the_tokenizer() -> None:
    config = resolved("--vocab-size 1030")
    assert (config.model.vocab_size, config.model.padded_vocab_size) == (1030, 1152)
    assert resolved("--vocab-size 1000").model.vocab_size == resolved().model.vocab_size == 1000


def test_a_preset_has_the_tokenizers_vocabulary_unless_another_is_given() -> None:
    preset = "--model-preset gpt2-124m --seq-length 1024"
    sizes = "--num-layers --hidden-size --num-attention-heads --max-position-embeddings"
    config = resolved(preset, drop=sizes)
    assert config.model.vocab_size == 1000 and not config.was_given("model.vocab_size")
    (notice,) = config.notices
    assert notice == (
        "--model-preset gpt2-124m was published with a vocabulary of 50257; this network has the tokenizer's 1000 "
        "tokens. Use --vocab-size 50257 for the published network."
    )
    published = resolved(f"{preset} --vocab-size 50257", drop=sizes)
    assert published.model.vocab_size == 50257 and published.notices == ()
    many = resolve(small(preset, sizes), Machine("cpu", 1, False, True), TokenizerFacts(60000, 9, "f"))
    assert many.model.vocab_size == 60000


def test_a_vocabulary_may_leave_out_tokens_that_the_data_do_not_contain() -> None:
    config = resolve(small("--vocab-size 999"), Machine("cpu", 1, False, True), TokenizerFacts(1000, 3, "f"))
    assert config.model.vocab_size == 999
    assert any("--vocab-size 999 excludes 1 of the tokenizer's 1000 tokens" in text for text in config.notices)


def test_a_hang_is_found_before_collectives_time_out() -> None:
    assert resolved().safety.hang_timeout_seconds == 0  # nobody waits for a process that is alone
    assert resolved("--hang-timeout-seconds 20").safety.hang_timeout_seconds == 20
    assert resolved(world=2).safety.hang_timeout_seconds == 300
    assert resolved("--distributed-timeout-minutes 4", world=2).safety.hang_timeout_seconds == 120
    assert resolved("--hang-timeout-seconds 0").safety.hang_timeout_seconds == 0
    with pytest.raises(
        ConfigError, match=r"--hang-timeout-seconds 120 must be less than the 120 seconds .* at most 60"
    ):
        resolved("--hang-timeout-seconds 120 --distributed-timeout-minutes 2")


def test_epochs_end_with_the_step_that_completes_the_last_pass() -> None:
    """Three passes over 10 samples in batches of 4: eight steps, of which the last takes two samples of a fourth."""
    config = resolved("--epochs 3 --lr-warmup-fraction 0.5 --global-batch-size 4", drop="--train-iters")
    assert config.optim.train_iters == 0
    found = resolve_epochs(config, 10)
    assert found.optim.train_iters == 8 == planned_iterations(found.optim)
    assert (found.optim.train_tokens, schedule(found.optim)) == (
        30 * found.data.seq_length,
        LearningRateSchedule(15.0, 30.0),
    )
    assert not is_done(found.optim, 7, 28) and is_done(found.optim, 8, 32)
    plain = resolved()
    assert resolve_epochs(plain, 10) is plain


def test_a_warm_up_longer_than_the_epochs_is_refused() -> None:
    config = resolved("--epochs 2 --lr-warmup-samples 21", drop="--train-iters")
    with pytest.raises(ConfigError, match=r"Learning-rate warmup takes \d+ tokens"):
        resolve_epochs(config, 10)


def test_epochs_replace_the_length_of_a_preset() -> None:
    request = parse(
        ["--model-preset", "laptop", "--epochs", "2", "--data-path", "a", "--vocab-file", "v", "--merge-file", "m"]
    )
    assert request.optim.train_iters is None and request.finetuning.epochs == 2


def test_a_resume_with_more_epochs_says_so_once() -> None:
    one, two = (resolve_epochs(resolved(f"--epochs {count}", drop="--train-iters"), 10) for count in (1, 2))
    assert check_resume(one.to_json(), two).notices == ("--epochs changed from 1 in the checkpoint to 2.",)
