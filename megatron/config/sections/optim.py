"""Optimization: optimizer, learning-rate schedule, batch sizes, and the length of training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import derived, flag
from megatron.config.sections.curriculum import CurriculumFields
from megatron.config.sections.optimizers import OptimizerFields

_MOST_RAMP_UP_STEPS = 1_000_000  # planning the length of a run iterates over them


@dataclass(frozen=True)
class OptimRequest(OptimizerFields, CurriculumFields):
    """Optimizer, schedule, batch sizes, curriculum and the length of training, as requested."""

    micro_batch_size: int | None = flag(
        None,
        "batch size per model replica and forward pass; the replica's share of --global-batch-size if unset",
        at_least=1,
    )
    global_batch_size: int | None = flag(
        None, "samples per training step; micro-batch size x data-parallel size if unset", at_least=1
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None, "batch size ramp-up: START INCREMENT SAMPLES, where SAMPLES is the length of the ramp-up"
    )
    train_iters: int | None = flag(
        None,
        "number of training steps",
        at_least=1,
        remedy="--eval-only evaluates without training.",
    )
    train_samples: int | None = flag(None, "number of training samples, instead of --train-iters", at_least=1)
    train_tokens: int | None = flag(
        None,
        "number of training tokens; the run ends with the step that reaches it, or at an earlier limit",
        at_least=1,
    )
    lr: float | None = flag(None, "peak learning rate", at_least=0)
    min_lr: float = flag(0.0, "minimum learning rate of the schedule", at_least=0)
    lr_decay_style: str = flag(
        "linear",
        "learning-rate decay after warmup; WSD stays at the peak and decays at the end, exponential decays to half the "
        "peak (GPT-NeoX)",
        choices=("constant", "linear", "cosine", "inverse-square-root", "exponential", "WSD"),
        synonyms={"wsd": "WSD", "inverse_square_root": "inverse-square-root"},
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "decay function of the annealing phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of the annealing phase of WSD", at_least=1)
    lr_wsd_decay_samples: int | None = flag(None, "samples of the annealing phase of WSD", at_least=1)
    lr_warmup_init: float = flag(0.0, "initial learning rate of the warmup", at_least=0)
    lr_decay_iters: int | None = flag(
        None, "steps over which the learning rate decays, warmup included; --train-iters if unset", at_least=1
    )
    lr_decay_samples: int | None = flag(
        None, "samples over which the learning rate decays, warmup included; --train-samples if unset", at_least=1
    )
    lr_decay_tokens: int | None = flag(
        None, "tokens over which the learning rate decays, warmup included; --train-tokens if unset", at_least=1
    )
    lr_warmup_fraction: float | None = flag(None, "warmup as a fraction of the decay", at_least=0, below=1)
    lr_warmup_iters: int = flag(0, "steps of linear learning-rate warmup", at_least=0)
    lr_warmup_samples: int = flag(0, "samples of linear learning-rate warmup", at_least=0)
    lr_warmup_tokens: int | None = flag(None, "tokens of linear learning-rate warmup", at_least=0)
    override_lr_scheduler: bool = flag(
        False,
        "on resume, use the learning-rate schedule of the command line (the default)",
        spelled=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        "on resume, use the learning-rate schedule of the checkpoint",
        spelled=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    weight_decay: float = flag(0.01, "weight decay (decoupled); biases and norms are not decayed", at_least=0)
    start_weight_decay: float | None = flag(None, "initial weight decay of --weight-decay-incr-style", at_least=0)
    end_weight_decay: float | None = flag(None, "final weight decay of --weight-decay-incr-style", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant",
        "schedule from --start-weight-decay to --end-weight-decay over the run",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = flag(1.0, "clip gradients to this global L2 norm; 0 disables clipping", at_least=0)

    @property
    def given_iters(self) -> int | None:
        return self.train_iters

    @property
    def decays_in_tokens(self) -> bool:
        """True if the decay of the learning rate is measured in tokens."""
        if self.lr_decay_tokens is not None or not self.is_counted_in_samples:
            return self.lr_decay_tokens is not None
        return self.lr_decay_samples is None and self.train_samples is None

    @property
    def warms_up_in_tokens(self) -> bool:
        if self.lr_warmup_tokens is not None or self.lr_warmup_fraction is None:
            return self.lr_warmup_tokens is not None
        return self.decays_in_tokens

    @property
    def is_limited_by_data(self) -> bool:
        """True if a number of samples or tokens ends the run, False if a number of steps does."""
        return self.train_samples is not None or self.train_tokens is not None

    @property
    def is_counted_in_samples(self) -> bool:
        """True if the run is measured in samples instead of steps; tokens are samples x sequence length."""
        return self.train_samples is not None or (self.train_tokens is not None and self.given_iters is None)


@dataclass(frozen=True)
class OptimConfig(OptimRequest):
    """The resolved optimization section; a run that only evaluates has no training steps."""

    micro_batch_size: int = flag(help="batch size per model replica and forward pass", at_least=1)
    global_batch_size: int = flag(help="samples per training step", at_least=1)
    train_iters: int = flag(help="number of training steps", at_least=0)
    lr: float = flag(help="peak learning rate", at_least=0)
    tokens_per_sample: int = derived("tokens per sample, which convert tokens to samples", default=1)
    most_iters: int | None = derived("steps of --train-iters if --train-tokens may end the run earlier", default=None)

    @property
    def given_iters(self) -> int | None:
        """The value of --train-iters; `train_iters` is the planned number of steps."""
        return self.most_iters if self.train_tokens is not None else self.train_iters

    def length_of_step(self, step: int) -> int:
        """Tokens of each sample in step number `step`, counted from 1."""
        return self.length_at(step, self.tokens_per_sample)

    def last_step_of_length(self, step: int) -> int | None:
        """The last step with the length of step number `step`; None if the length stays."""
        return self.last_step_with_length(step, self.tokens_per_sample)
