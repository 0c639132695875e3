"""The length of training, the schedules of learning rate and weight decay, and curriculum learning."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.machine import Machine
from megatron.config.objective.loss import CAUSAL, MASKED, MULTITASK
from megatron.config.rules.rule import notice, request_rule, resolved_rule, run_rule
from megatron.config.run_sections import ResolvedSections, RunSections
from megatron.config.schedule import annealing_samples, schedule
from megatron.config.sections.curriculum import FIXED_DISCRETE
from megatron.config.sections.optim import OptimConfig


@request_rule
def _length(run: RunSections) -> Iterator[str]:
    optim, finetuning = run.optim, run.finetuning
    if run.evaluation.eval_only:
        return
    if finetuning.epochs is None and optim.train_iters is None and not optim.is_counted_in_samples:
        yield "--train-iters, --train-samples, --train-tokens or --epochs is required: the length of training."
    if optim.lr is None:
        yield "--lr is required: the peak learning rate, for example 1.5e-4."
    if optim.train_iters is not None and optim.train_samples is not None:
        yield (
            f"--train-iters {optim.train_iters} cannot be combined with --train-samples {optim.train_samples}. Drop "
            "one of them."
        )


@request_rule
def _epochs(run: RunSections) -> Iterator[str]:
    optim, epochs = run.optim, run.finetuning.epochs
    if epochs is None or run.evaluation.eval_only:
        return
    lengths = {
        "--train-iters": optim.train_iters,
        "--train-samples": optim.train_samples,
        "--train-tokens": optim.train_tokens,
    }
    for name, value in lengths.items():
        if value is not None:
            yield f"--epochs {epochs} cannot be combined with {name} {value}. Drop one of them."
    if optim.curriculum_learning:
        yield (
            f"--epochs {epochs} cannot be combined with --curriculum-learning, which truncates samples. Use "
            "--train-iters, or drop --curriculum-learning."
        )
    in_steps = {"--lr-warmup-iters": optim.lr_warmup_iters, "--lr-decay-iters": optim.lr_decay_iters}
    for name, value in in_steps.items():
        if value:
            other = "--lr-warmup-fraction or --lr-warmup-samples" if "warmup" in name else "--lr-decay-samples"
            yield f"{name} {value} cannot be combined with --epochs, which counts samples. Use {other}."


@run_rule
def _learning_rate(run: RunSections) -> Iterator[str]:
    optim = run.optim
    if optim.lr is not None and optim.min_lr > optim.lr:
        yield f"--min-lr {optim.min_lr} is more than --lr {optim.lr}. Lower --min-lr."
    if optim.override_lr_scheduler and optim.use_checkpoint_lr_scheduler:
        yield (
            "--override-lr-scheduler contradicts --use-checkpoint-lr-scheduler: the first uses the schedule of the "
            "command line, the second that of the checkpoint. Drop one of them."
        )
    if optim.lr is not None and optim.lr_warmup_init > optim.lr:
        yield f"--lr-warmup-init {optim.lr_warmup_init} is more than --lr {optim.lr}. Lower it."


@run_rule
def _weight_decay(run: RunSections) -> Iterator[str]:
    optim = run.optim
    ends = {"--start-weight-decay": optim.start_weight_decay, "--end-weight-decay": optim.end_weight_decay}
    style = f"--weight-decay-incr-style {optim.weight_decay_incr_style}"
    for name, value in ends.items():
        if optim.weight_decay_incr_style != "constant" and value is None:
            yield f"{style} requires {name}."
        if optim.weight_decay_incr_style == "constant" and value is not None:
            yield (
                f"{name} {value} cannot be combined with {style}. Use --weight-decay, or --weight-decay-incr-style "
                "linear or cosine."
            )


@run_rule
def _annealing(run: RunSections) -> Iterator[str]:
    optim = run.optim
    unit, other = ("samples", "iters") if optim.is_counted_in_samples else ("iters", "samples")
    is_of_epochs = optim.train_iters is None and optim.train_samples is None and optim.train_tokens is None
    if is_of_epochs:
        unit, other = "samples", "iters"
    lengths = {"iters": optim.lr_wsd_decay_iters, "samples": optim.lr_wsd_decay_samples}
    if optim.lr_decay_style != "WSD":
        for name, value in lengths.items():
            if value is not None:
                yield (
                    f"--lr-wsd-decay-{name} {value} requires --lr-decay-style WSD, not {optim.lr_decay_style}. Change "
                    "the style, or drop the length."
                )
        return
    if lengths[other] is not None:
        yield (
            f"--lr-wsd-decay-{other} {lengths[other]} cannot be combined with a run measured in {unit}. Use "
            f"--lr-wsd-decay-{unit}."
        )
    elif lengths[unit] is None:
        yield (
            f"--lr-decay-style WSD requires --lr-wsd-decay-{unit}, the length of the decay at the end, typically a "
            "tenth of the run."
        )


@run_rule
def _units(run: RunSections) -> Iterator[str]:
    """The schedule must be measured in the unit of the run's length, or in tokens."""
    optim = run.optim
    by_samples = optim.is_counted_in_samples
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    length = optim.train_samples if by_samples else optim.train_iters
    if not by_samples and (length is None or length < 1):
        return
    measure = "tokens" if by_samples and length is None else unit
    foreign_decay = optim.lr_decay_iters if by_samples else optim.lr_decay_samples
    foreign_warmup = optim.lr_warmup_iters if by_samples else optim.lr_warmup_samples
    if foreign_decay is not None:
        yield (
            f"--lr-decay-{other} {foreign_decay} cannot be combined with --train-{measure}. Use --lr-decay-{measure}."
        )
    if foreign_warmup:
        yield (
            f"--lr-warmup-{other} {foreign_warmup} cannot be combined with --train-{measure}. Use "
            f"--lr-warmup-{measure}."
        )
    if optim.rampup_batch_size is not None and not by_samples:
        shown = " ".join(map(str, optim.rampup_batch_size))
        yield f"--rampup-batch-size {shown} cannot be combined with --train-iters. Use --train-samples."
    warmup = optim.lr_warmup_samples if by_samples else optim.lr_warmup_iters
    given_decay = optim.lr_decay_samples if by_samples else optim.lr_decay_iters
    # The warmup has one length; a decay in tokens overrides others, as upstream.
    warmups = {
        "--lr-warmup-fraction": optim.lr_warmup_fraction,
        f"--lr-warmup-{unit}": warmup or None,
        "--lr-warmup-tokens": optim.lr_warmup_tokens,
    }
    given = [f"{name} {value}" for name, value in warmups.items() if value is not None]
    if len(given) > 1:
        yield f"{given[0]} cannot be combined with {given[1]}. Drop one of them."
    if length is None or optim.lr_decay_tokens is not None:
        return  # in tokens: compared once the sequence length is known
    decay, source = (given_decay, f"--lr-decay-{unit}") if given_decay else (length, f"--train-{unit}")
    if warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than {source} {decay}, the length of the decay, which includes "
            f"warmup. Use a shorter warmup or a longer --lr-decay-{unit}."
        )


@notice
def _decay_in_tokens(run: RunSections) -> Iterator[str]:
    # Not refused, as scripts of the forks pass both.
    optim = run.optim
    for name, value in (("--lr-decay-iters", optim.lr_decay_iters), ("--lr-decay-samples", optim.lr_decay_samples)):
        if value is not None and optim.lr_decay_tokens is not None:
            yield f"{name} {value} is overridden by --lr-decay-tokens {optim.lr_decay_tokens}."


@resolved_rule
def _first_step(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    optim, samples, batch = config.optim, config.optim.train_samples, config.optim.global_batch_size
    if samples is not None and optim.train_iters == 0:
        yield (
            f"--train-samples {samples} is less than the first global batch (--global-batch-size {batch}). Train at "
            f"least {batch} samples, or use a smaller batch."
        )


@resolved_rule
def _annealing_within(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    optim = config.optim
    course, samples = schedule(optim), annealing_samples(optim)
    most = int(course.decay_samples - course.warmup_samples)
    if optim.train_iters > 0 and samples > max(0, most):
        by_steps = optim.lr_wsd_decay_iters is not None
        unit, size = ("iters", optim.global_batch_size) if by_steps else ("samples", 1)
        yield (
            f"--lr-wsd-decay-{unit} {samples // size} is longer than the rest of the run after warmup, "
            f"{most // size:,} {unit}. Use {max(1, most // size // 10)}, a tenth."
        )


@resolved_rule
def _warmup_in_tokens(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    optim = config.optim
    if optim.lr_warmup_tokens is None and optim.lr_decay_tokens is None and optim.train_tokens is None:
        return  # `_units` has compared them
    yield from warmup_problems(optim)


def warmup_problems(optim: OptimConfig) -> Iterator[str]:
    """The warmup of a run of known length must be shorter than the decay, which includes it."""
    course, length = schedule(optim), optim.tokens_per_sample
    if optim.train_iters > 0 and course.warmup_samples >= course.decay_samples:
        yield (
            f"Learning-rate warmup takes {round(course.warmup_samples * length)} tokens, but must be shorter than the "
            f"decay of {round(course.decay_samples * length)} tokens, which includes it (--seq-length {length}). Use a "
            "shorter warmup or a longer --lr-decay-tokens."
        )


@run_rule
def _unused_curriculum_flags(run: RunSections) -> Iterator[str]:
    optim = run.optim
    values = {
        "--curriculum-min-length": optim.curriculum_min_length,
        "--curriculum-max-length": optim.curriculum_max_length,
        "--curriculum-steps": optim.curriculum_steps,
        "--curriculum-lengths": " ".join(map(str, optim.curriculum_lengths)),
        "--curriculum-max-steps": " ".join(map(str, optim.curriculum_max_steps)),
    }
    for name, value in values.items():
        if value and not optim.curriculum_learning:
            yield f"{name} {value} has no effect without --curriculum-learning. Add it, or drop {name}."


@run_rule
def _growing_lengths(run: RunSections) -> Iterator[str]:
    optim = run.optim
    if not optim.curriculum_learning or optim.curriculum_schedule == FIXED_DISCRETE:
        return
    schedule = f"--curriculum-schedule {optim.curriculum_schedule}"
    if optim.curriculum_min_length is None:
        yield f"--curriculum-min-length is required by {schedule}: the sequence length at the first step."
    elif optim.curriculum_min_length < optim.curriculum_length_step:
        yield (
            f"--curriculum-min-length {optim.curriculum_min_length} is less than --curriculum-length-step "
            f"{optim.curriculum_length_step}. Use at least {optim.curriculum_length_step}, or smaller steps."
        )
    if optim.curriculum_steps is None:
        yield f"--curriculum-steps is required by {schedule}: the number of steps to the full length."
    low, high = optim.curriculum_min_length, optim.curriculum_max_length
    if low is not None and high is not None and low > high:
        yield f"--curriculum-min-length {low} is more than --curriculum-max-length {high}. Swap them."


@run_rule
def _listed_lengths(run: RunSections) -> Iterator[str]:
    optim = run.optim
    if not optim.curriculum_learning or optim.curriculum_schedule != FIXED_DISCRETE:
        return
    lengths, ends = optim.curriculum_lengths, optim.curriculum_max_steps
    if not lengths or len(ends) != len(lengths) - 1:
        yield (
            f"--curriculum-schedule {FIXED_DISCRETE} has {len(lengths)} --curriculum-lengths and {len(ends)} "
            "--curriculum-max-steps. Every length except the final one requires its last step."
        )
    for name, values in (("--curriculum-lengths", lengths), ("--curriculum-max-steps", ends)):
        if sorted(set(values)) != list(values):
            yield f"{name} {' '.join(map(str, values))} must be in ascending order, without duplicates."


@run_rule
def _curriculum_of_samples(run: RunSections) -> Iterator[str]:
    optim, loss, sequence_length = run.optim, run.loss, run.data.seq_length
    if not optim.curriculum_learning:
        return
    lengths = {
        "--curriculum-min-length": optim.curriculum_min_length,
        "--curriculum-max-length": optim.curriculum_max_length,
        "--curriculum-lengths": max(optim.curriculum_lengths, default=None),
    }
    for name, length in lengths.items():
        if length is not None and length > sequence_length > 0:
            yield f"{name} {length} is more than --seq-length {sequence_length}. Use at most that."
    if loss.objective == MASKED:
        yield "--curriculum-learning cannot be combined with --objective masked, which masks whole samples. Drop it."
    if loss.objective == MULTITASK or (loss.objective == CAUSAL and loss.loss_on_targets_only):
        option = f"--objective {MULTITASK}" if loss.objective == MULTITASK else "--loss-on-targets-only"
        yield (
            f"--curriculum-learning cannot be combined with {option}: it truncates samples, whose targets are at the "
            "end. Drop one of them."
        )
