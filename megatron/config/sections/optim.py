"""How the weights are updated: optimizer, learning rate, batch sizes, length of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import derived, flag
from megatron.config.sections.curriculum import CurriculumFields
from megatron.config.sections.optimizers import OptimizerFields

_MOST_RAMP_UP_STEPS = 1_000_000  # each is counted where the length of a run is planned


@dataclass(frozen=True)
class OptimRequest(OptimizerFields, CurriculumFields):
    """Optimizer, schedule, batch sizes, curriculum and the length of training, as they were asked for."""

    micro_batch_size: int | None = flag(
        None,
        "samples per forward pass of one model replica; all of its share of --global-batch-size if unset",
        at_least=1,
    )
    global_batch_size: int | None = flag(
        None, "samples per step over all replicas; micro batch x replicas if unset", at_least=1
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None, "start, increment, samples: the global batch grows from start to its full size over this many samples"
    )
    train_iters: int | None = flag(
        None,
        "steps to train",
        at_least=1,
        remedy="--eval-only evaluates without training.",
    )
    train_samples: int | None = flag(None, "samples to train, instead of --train-iters", at_least=1)
    train_tokens: int | None = flag(
        None,
        "tokens to train; the run ends at the step that reaches them, or earlier if another limit does",
        at_least=1,
    )
    lr: float | None = flag(None, "peak learning rate", at_least=0)
    min_lr: float = flag(0.0, "lowest learning rate of the schedule", at_least=0)
    lr_decay_style: str = flag(
        "linear",
        "shape of the schedule after warm-up; WSD stays at the peak and decays at the end, exponential halves the rate "
        "over the decay, and no further (GPT-NeoX)",
        choices=("constant", "linear", "cosine", "inverse-square-root", "exponential", "WSD"),
        synonyms={"wsd": "WSD", "inverse_square_root": "inverse-square-root"},
    )
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of the decay at the end of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "length of that decay in steps", at_least=1)
    lr_wsd_decay_samples: int | None = flag(None, "length of that decay in samples", at_least=1)
    lr_warmup_init: float = flag(0.0, "learning rate at which the warm-up begins", at_least=0)
    lr_decay_iters: int | None = flag(None, "length of the decay in steps; --train-iters if unset", at_least=1)
    lr_decay_samples: int | None = flag(None, "length of the decay in samples; --train-samples if unset", at_least=1)
    lr_decay_tokens: int | None = flag(None, "length of the decay in tokens; --train-tokens if unset", at_least=1)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of the decay", at_least=0, below=1)
    lr_warmup_iters: int = flag(0, "warm-up in steps", at_least=0)
    lr_warmup_samples: int = flag(0, "warm-up in samples", at_least=0)
    lr_warmup_tokens: int | None = flag(None, "warm-up in tokens", at_least=0)
    override_lr_scheduler: bool = flag(
        False,
        "on resume, use the schedule of the command line (the default)",
        spelled=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        "on resume, use the schedule of the checkpoint",
        spelled=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    weight_decay: float = flag(0.01, "decoupled weight decay of matrices; biases and norms have none", at_least=0)
    start_weight_decay: float | None = flag(None, "weight decay of the first step", at_least=0)
    end_weight_decay: float | None = flag(None, "weight decay of the last step", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant",
        "how the weight decay goes from --start-weight-decay to --end-weight-decay over the run",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = flag(1.0, "global gradient norm is clipped to this; 0 clips nothing", at_least=0)

    def problems(self) -> Iterator[str]:
        if self.micro_batch_size is None and self.global_batch_size is None:
            yield "--micro-batch-size is required: samples per forward pass of one model replica."
        if self.lr is not None and self.min_lr > self.lr:
            yield (
                f"--min-lr {self.min_lr} is more than --lr {self.lr}. The schedule falls from --lr to --min-lr; lower "
                "--min-lr."
            )
        if self.override_lr_scheduler and self.use_checkpoint_lr_scheduler:
            yield (
                "--override-lr-scheduler and --use-checkpoint-lr-scheduler contradict each other. Drop one of them: "
                "the first takes the schedule from the command line, the second from the checkpoint."
            )
        micro, batch = self.micro_batch_size, self.global_batch_size
        if batch is not None and micro and batch % micro:
            lower = batch // micro * micro
            yield (
                f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro}. "
                f"Use {f'{lower} or ' if lower else ''}{lower + micro}."
            )
        if self.lr is not None and self.lr_warmup_init > self.lr:
            yield (
                f"--lr-warmup-init {self.lr_warmup_init} is more than --lr {self.lr}, to which the warm-up rises. "
                "Lower it."
            )
        yield from self._weight_decay_problems()
        yield from self._annealing_problems()
        yield from self._rampup_problems()
        yield from self._schedule_problems()
        yield from self.curriculum_problems()

    def _weight_decay_problems(self) -> Iterator[str]:
        ends = {"--start-weight-decay": self.start_weight_decay, "--end-weight-decay": self.end_weight_decay}
        style = f"--weight-decay-incr-style {self.weight_decay_incr_style}"
        for name, value in ends.items():
            if self.weight_decay_incr_style != "constant" and value is None:
                yield f"{style} needs {name}, the weight decay at one end of the run."
            if self.weight_decay_incr_style == "constant" and value is not None:
                yield (
                    f"{name} {value} cannot be combined with {style}. Use --weight-decay, or --weight-decay-incr-style "
                    "linear or cosine."
                )

    def _annealing_problems(self) -> Iterator[str]:
        unit, other = ("samples", "iters") if self.is_counted_in_samples else ("iters", "samples")
        is_of_epochs = self.train_iters is None and self.train_samples is None and self.train_tokens is None
        if is_of_epochs:
            unit, other = "samples", "iters"
        lengths = {"iters": self.lr_wsd_decay_iters, "samples": self.lr_wsd_decay_samples}
        if self.lr_decay_style != "WSD":
            for name, value in lengths.items():
                if value is not None:
                    yield (
                        f"--lr-wsd-decay-{name} {value} needs --lr-decay-style WSD, and it is {self.lr_decay_style}. "
                        "Change the style, or drop the length."
                    )
            return
        if lengths[other] is not None:
            yield (
                f"--lr-wsd-decay-{other} {lengths[other]} cannot be combined with a run that is counted in {unit}. Use "
                f"--lr-wsd-decay-{unit}."
            )
        elif lengths[unit] is None:
            yield (
                f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of the decay at the end. A tenth of the "
                "run is usual."
            )

    def _rampup_problems(self) -> Iterator[str]:
        if self.rampup_batch_size is None:
            return
        start, increment, samples = self.rampup_batch_size
        given = f"--rampup-batch-size {start} {increment} {samples}"
        if start <= 0 or increment <= 0 or samples < 0:
            yield f"{given}: start and increment must be positive and samples not negative."
            return
        if samples // start > _MOST_RAMP_UP_STEPS:
            yield (
                f"{given} could take {samples // start} steps. Give at most {start * _MOST_RAMP_UP_STEPS} samples, "
                "or a larger start."
            )
            return
        if self.global_batch_size is None:
            yield f"{given} needs --global-batch-size, the size the batch grows to."
        elif start > self.global_batch_size:
            yield f"{given} starts above --global-batch-size {self.global_batch_size}. Start at or below it."
        elif (self.global_batch_size - start) % increment:
            yield (
                f"{given}: from {start} to --global-batch-size {self.global_batch_size} is "
                f"{self.global_batch_size - start}, which is not a multiple of the increment {increment}. Use an "
                "increment that divides it."
            )
        if self.micro_batch_size and (start % self.micro_batch_size or increment % self.micro_batch_size):
            yield (
                f"{given}: start and increment must be multiples of --micro-batch-size {self.micro_batch_size}, or "
                "some step could not be split into micro-batches."
            )

    def _schedule_problems(self) -> Iterator[str]:
        """Rules of a run whose length is known; the schedule is counted in the unit of the length, or in tokens."""
        by_samples = self.is_counted_in_samples
        unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
        length = self.train_samples if by_samples else self.train_iters
        if not by_samples and (length is None or length < 1):
            return
        measure = "tokens" if by_samples and length is None else unit
        foreign_decay = self.lr_decay_iters if by_samples else self.lr_decay_samples
        foreign_warmup = self.lr_warmup_iters if by_samples else self.lr_warmup_samples
        if foreign_decay is not None:
            yield (
                f"--lr-decay-{other} {foreign_decay} cannot be combined with --train-{measure}. Use "
                f"--lr-decay-{measure}."
            )
        if foreign_warmup:
            yield (
                f"--lr-warmup-{other} {foreign_warmup} cannot be combined with --train-{measure}. Use "
                f"--lr-warmup-{measure}."
            )
        if self.rampup_batch_size is not None and not by_samples:
            shown = " ".join(map(str, self.rampup_batch_size))
            yield f"--rampup-batch-size {shown} cannot be combined with --train-iters. Use --train-samples."
        warmup = self.lr_warmup_samples if by_samples else self.lr_warmup_iters
        given_decay = self.lr_decay_samples if by_samples else self.lr_decay_iters
        yield from self._repeated_problems(unit, warmup)
        if length is None or self.lr_decay_tokens is not None:
            return  # in tokens: compared where the sequence length is known
        decay, source = (given_decay, f"--lr-decay-{unit}") if given_decay else (length, f"--train-{unit}")
        if warmup >= decay:
            yield (
                f"--lr-warmup-{unit} {warmup} is not less than {source} {decay}, the length of the decay that contains "
                f"it. Use a shorter warm-up or a longer --lr-decay-{unit}."
            )

    def _repeated_problems(self, unit: str, warmup: int) -> Iterator[str]:
        """The warm-up has one length; of the decay's lengths, one in tokens wins, as upstream."""
        warmups = {
            "--lr-warmup-fraction": self.lr_warmup_fraction,
            f"--lr-warmup-{unit}": warmup or None,
            "--lr-warmup-tokens": self.lr_warmup_tokens,
        }
        given = [f"{name} {value}" for name, value in warmups.items() if value is not None]
        if len(given) > 1:
            yield f"{' and '.join(given[:2])} are both given. The warm-up has one length; drop one of them."

    @property
    def given_iters(self) -> int | None:
        """The steps of --train-iters."""
        return self.train_iters

    @property
    def decays_in_tokens(self) -> bool:
        """Whether the decay of the learning rate is measured in tokens."""
        if self.lr_decay_tokens is not None or not self.is_counted_in_samples:
            return self.lr_decay_tokens is not None
        return self.lr_decay_samples is None and self.train_samples is None

    @property
    def warms_up_in_tokens(self) -> bool:
        """Whether its warm-up is."""
        if self.lr_warmup_tokens is not None or self.lr_warmup_fraction is None:
            return self.lr_warmup_tokens is not None
        return self.decays_in_tokens

    @property
    def is_limited_by_data(self) -> bool:
        """Whether a number of samples or tokens ends the run; otherwise a number of steps does."""
        return self.train_samples is not None or self.train_tokens is not None

    @property
    def is_counted_in_samples(self) -> bool:
        """Whether samples, not steps, measure the run; tokens are samples x sequence length."""
        return self.train_samples is not None or (self.train_tokens is not None and self.given_iters is None)


@dataclass(frozen=True)
class OptimConfig(OptimRequest):
    """The same with every number that training needs; a run that only evaluates plans no step."""

    micro_batch_size: int = flag(help="samples per forward pass of one model replica", at_least=1)
    global_batch_size: int = flag(help="samples per step over all replicas", at_least=1)
    train_iters: int = flag(help="steps to train", at_least=0)
    lr: float = flag(help="peak learning rate", at_least=0)
    tokens_per_sample: int = derived("tokens of a sample, by which numbers of tokens are divided", default=1)
    most_iters: int | None = derived("steps of --train-iters if --train-tokens may end the run before", default=None)

    @property
    def given_iters(self) -> int | None:
        """The steps of --train-iters; `train_iters` are the planned steps."""
        return self.most_iters if self.train_tokens is not None else self.train_iters

    def length_of_step(self, step: int) -> int:
        """Tokens of each sample in step number `step`, counted from 1."""
        return self.length_at(step, self.tokens_per_sample)

    def last_step_of_length(self, step: int) -> int | None:
        """The last step with the length of step number `step`; None if the length stays."""
        return self.last_step_with_length(step, self.tokens_per_sample)
