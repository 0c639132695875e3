"""How the weights are updated: optimizer, learning rate, batch sizes, length of the run."""

from __future__ import annotations

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
