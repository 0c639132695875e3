"""What the machine and the tokenizer decide, and what they make impossible."""

from __future__ import annotations

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, check_resume, resolve
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


def test_a_request_is_completed_for_a_known_batch() -> None:
    request = small("--train-samples 20 --rampup-batch-size 2 2 8", drop="--train-iters").optim
    assert resolve_optim(request, 8, 32).train_iters == planned_iterations(resolve_optim(request, 8, 32)) == 4
    assert resolve_optim(small("--train-iters 7").optim, 16, 32).train_iters == 7


def test_a_vocabulary_may_leave_out_tokens_that_the_data_do_not_contain() -> None:
    config = resolve(small("--vocab-size 999"), Machine("cpu", 1, False, True), TokenizerFacts(1000, 3, "f"))
    assert config.model.vocab_size == 999
    assert any("--vocab-size 999 excludes 1 of the tokenizer's 1000 tokens" in text for text in config.notices)


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


def test_a_resume_with_more_epochs_says_so_once() -> None:
    one, two = (resolve_epochs(resolved(f"--epochs {count}", drop="--train-iters"), 10) for count in (1, 2))
    assert check_resume(one.to_json(), two).notices == ("--epochs changed from 1 in the checkpoint to 2.",)
