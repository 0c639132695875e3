"""The training loss: which tokens count, what they attend to, and what is added to the cross-entropy."""

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
        "training objective: causal predicts the next token, prefix adds bidirectional attention over a random prefix "
        "of each sample, multitask over the inputs of packed pairs (PREFIX_inputs_document, PREFIX_targets_document), "
        "masked predicts masked tokens with bidirectional attention",
        choices=(CAUSAL, PREFIX, MULTITASK, MASKED),
        resume=RUN_MUST_MATCH,
    )
    loss_on_targets_only: bool = flag(
        False, "compute the loss on targets only, not on prompts, prefixes and inputs", resume=RUN_MUST_MATCH
    )
    reweight_loss_based_on_position_frequency: bool = flag(
        False,
        "with --objective prefix, weight early positions more, as they are predicted less often",
        resume=RUN_MUST_MATCH,
    )
    z_loss_coeff: float = flag(
        0.0,
        "coefficient of the z-loss, the squared logarithm of the softmax denominator",
        at_least=0,
        spelled=("--z-loss",),
    )
    label_smoothing: float = flag(
        0.0, "label smoothing: probability mass spread evenly over the vocabulary", at_least=0, below=1
    )
    loss_mean: str = flag(
        TOKENS,
        "reduction of the loss: the mean over all tokens, or the mean over samples of the mean over the tokens of each "
        "sample, which gives short answers the weight of long ones",
        choices=(TOKENS, SAMPLES),
        resume=RUN_MUST_MATCH,
    )

    @property
    def has_prefixes(self) -> bool:
        """True if attention over a prefix, or over the inputs of a task, is bidirectional."""
        return self.objective in (PREFIX, MULTITASK)
