"""Rules for requests of masked language modelling: flags that do not go with it, and parts that need each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.flags.fields import flags_of
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.objective.masking import SENTENCES, MaskingConfig
from megatron.config.sections.control import ControlConfig
from megatron.config.sections.documents import DocumentConfig
from megatron.config.sections.model import ModelRequest


def masked_problems(
    model: ModelRequest, loss: LossConfig, masking: MaskingConfig, sequence_length: int
) -> Iterator[str]:
    """What the heads need of the samples, and the masking of their length."""
    too_short = masking.too_short(sequence_length) if loss.objective == MASKED else ""
    if too_short:
        yield too_short
    if loss.objective == MASKED and model.sentence_order_head and masking.masked_samples != SENTENCES:
        yield (
            f"--sentence-order-head does not go with --masked-samples {masking.masked_samples}: only samples of "
            "sentences have two segments whose order can be told. Add --bert-no-binary-head."
        )


def foreign_problems(
    loss: LossConfig,
    documents: DocumentConfig,
    finetuning: FinetuningConfig,
    distillation: DistillationConfig,
    control: ControlConfig,
) -> Iterator[str]:
    """One sentence for every flag of other objectives."""
    of_running_text = "is for text in which documents follow each other, and the objective is masked"
    of_examples = "is for prompts with answers, and the objective is masked"
    asked = {
        "--reset-position-ids": (documents.reset_position_ids, of_running_text),
        "--reset-attention-mask": (documents.reset_attention_mask, of_running_text),
        "--eod-mask-loss": (documents.eod_mask_loss, of_running_text),
        "--loss-on-targets-only": (loss.loss_on_targets_only, of_examples),
        "--pack-examples": (finetuning.pack_examples, of_examples),
        "--mos" if distillation.mos else "--kd": (
            distillation.is_on,
            "compares predictions of next tokens, which an encoder does not make",
        ),
        "--eval-tasks": (
            control.eval_tasks is not None,
            "scores continuations of a text, which an encoder does not have",
        ),
        "--sample-prompts": (
            control.sample_prompts is not None,
            "asks for continuations of a text, which an encoder does not have",
        ),
    }
    for option, (is_asked, reason) in asked.items():
        if is_asked and loss.objective == MASKED:
            yield f"{option} {reason}. Drop it."


def masking_notices(loss: LossConfig, masking: MaskingConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every flag of masking that was set and changes nothing.

    Args:
        values: what was set, by "section.field".
    """
    for flag in flags_of(MaskingConfig):
        value = values.get(f"masking.{flag.field}", flag.default)
        if value == flag.default:
            continue
        if loss.objective != MASKED:
            yield f"{flag.positive_name} {value} has no effect without --objective {MASKED}."
        elif flag.field == "short_seq_prob" and masking.masked_samples != SENTENCES:
            yield f"{flag.positive_name} {value} has no effect without --masked-samples {SENTENCES}."
