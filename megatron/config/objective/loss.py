"""What is minimized: which tokens count, what they may attend to, and what is added to the plain cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection

CAUSAL = "causal"
PREFIX = "prefix"
MULTITASK = "multitask"
MASKED = "masked"
TOKENS = "tokens"
SAMPLES = "samples"


@dataclass(frozen=True)
class LossConfig(ConfigSection):
    """The training loss. Logged and evaluated losses are always the plain cross-entropy."""

    objective: str = flag(
        CAUSAL,
        "what is learned: causal predicts every next token, prefix attends to a random prefix of each sample in both "
        "directions, multitask to the inputs of packed pairs PREFIX_inputs_document and PREFIX_targets_document, "
        "masked predicts masked tokens from both sides",
        choices=(CAUSAL, PREFIX, MULTITASK, MASKED),
        resume=RUN_MUST_MATCH,
    )
    loss_on_targets_only: bool = flag(
        False, "no loss on prompts, prefixes and inputs, only on what answers them", resume=RUN_MUST_MATCH
    )
    reweight_loss_based_on_position_frequency: bool = flag(
        False,
        "with --objective prefix, give a position more weight the more rarely random prefixes leave it to be predicted",
        resume=RUN_MUST_MATCH,
    )
    z_loss_coeff: float = flag(
        0.0,
        "coefficient of the z-loss, which adds the squared logarithm of the softmax denominator",
        at_least=0,
        spelled=("--z-loss",),
    )
    label_smoothing: float = flag(
        0.0, "share of the target probability that is spread evenly over the vocabulary", at_least=0, below=1
    )
    loss_mean: str = flag(
        TOKENS,
        "what is minimized: the mean over all tokens that count, or the mean over samples of the mean over the tokens "
        "of a sample, in which a short answer weighs as much as a long one",
        choices=(TOKENS, SAMPLES),
        resume=RUN_MUST_MATCH,
    )

    @property
    def has_prefixes(self) -> bool:
        """Whether tokens attend to a prefix, or to the inputs of a task, in both directions."""
        return self.objective in (PREFIX, MULTITASK)
