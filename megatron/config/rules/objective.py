"""Objectives: the loss, masking, fine-tuning, distillation and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.flags.fields import flags_of
from megatron.config.objective.loss import CAUSAL, MASKED, MULTITASK, PREFIX, SAMPLES
from megatron.config.objective.masking import SENTENCES, MaskingConfig
from megatron.config.rules.rule import notice, request_rule, run_rule
from megatron.config.rules.sequence import sharing_flags
from megatron.config.run_sections import ReadFlags, RunSections


@run_rule
def _loss(run: RunSections) -> Iterator[str]:
    loss = run.loss
    if loss.reweight_loss_based_on_position_frequency and loss.objective != PREFIX:
        yield (
            f"--reweight-loss-based-on-position-frequency requires --objective prefix, not {loss.objective}. Drop the "
            "flag."
        )
    if loss.loss_mean == SAMPLES and loss.objective not in (CAUSAL, MULTITASK):
        yield (
            f"--loss-mean samples cannot be combined with --objective {loss.objective}. Drop it, or use --objective "
            f"{CAUSAL} or {MULTITASK}."
        )


@run_rule
def _masking(run: RunSections) -> Iterator[str]:
    masking = run.masking
    shares = masking.random_replace_prob + masking.unmask_replace_prob
    if shares > 1:
        yield (
            f"--random-replace-prob {masking.random_replace_prob} and --unmask-replace-prob "
            f"{masking.unmask_replace_prob} sum to {shares:g}, but must not exceed 1. Lower one of them."
        )
    if masking.masking_ngrams > 1 and masking.masked_samples != SENTENCES:
        yield (
            f"--masking-ngrams {masking.masking_ngrams} requires --masked-samples {SENTENCES}; "
            f"{masking.masked_samples} masks single words. Drop the flag."
        )


@run_rule
def _examples(run: RunSections) -> Iterator[str]:
    finetuning = run.finetuning
    if finetuning.copy_prompt_probability and finetuning.pack_examples:
        yield (
            f"--copy-prompt-probability {finetuning.copy_prompt_probability:g} cannot be combined with "
            "--pack-examples, which puts several examples into a sample. Drop one of them."
        )


@run_rule
def _teacher(run: RunSections) -> Iterator[str]:
    distillation = run.distillation
    if distillation.is_on and distillation.load_teacher is None:
        name = "--kd" if distillation.kd else "--mos"
        yield f"{name} requires --load-teacher, the checkpoint of the teacher."
    if distillation.load_teacher is not None and not distillation.is_on:
        yield (
            f"--load-teacher {distillation.load_teacher} has no effect without --kd or --mos. Add --kd, or drop "
            "--load-teacher."
        )
    if distillation.is_on and distillation.kd_alpha_ce == distillation.kd_beta_ce == 0:
        yield "--kd-alpha-ce and --kd-beta-ce are both 0. At least one of them must be positive."


@run_rule
def _both_sides(run: RunSections) -> Iterator[str]:
    model, loss = run.model, run.loss
    if loss.objective == MASKED and not model.bidirectional:
        yield "--objective masked requires --bidirectional. Add it, or use pretrain_bert.py."
    if model.bidirectional and loss.objective != MASKED:
        yield (
            f"--bidirectional cannot be combined with --objective {loss.objective}: tokens would attend to the ones "
            "they predict. Use --objective masked, or pretrain_bert.py."
        )


@request_rule
def _masked_samples(run: RunSections) -> Iterator[str]:
    model, loss, masking, sequence_length = run.model, run.loss, run.masking, run.data.seq_length
    too_short = masking.too_short(sequence_length) if loss.objective == MASKED else ""
    if too_short:
        yield too_short
    if loss.objective == MASKED and model.sentence_order_head and masking.masked_samples != SENTENCES:
        yield (
            f"--sentence-order-head cannot be combined with --masked-samples {masking.masked_samples}, whose samples "
            "are not pairs of segments. Add --bert-no-binary-head."
        )


@request_rule
def _flags_of_other_objectives(run: RunSections) -> Iterator[str]:
    loss, documents, finetuning = run.loss, run.documents, run.finetuning
    distillation, evaluation = run.distillation, run.evaluation
    causal_only = {
        "--reset-position-ids": documents.reset_position_ids,
        "--reset-attention-mask": documents.reset_attention_mask,
        "--eod-mask-loss": documents.eod_mask_loss,
        "--loss-on-targets-only": loss.loss_on_targets_only,
        "--pack-examples": finetuning.pack_examples,
        "--mos" if distillation.mos else "--kd": distillation.is_on,
        "--eval-tasks": evaluation.eval_tasks is not None,
        "--sample-prompts": evaluation.sample_prompts is not None,
    }
    for option, is_set in causal_only.items():
        if is_set and loss.objective == MASKED:
            yield f"{option} cannot be combined with --objective {MASKED}. Drop it."


@notice
def _unused_masking_flags(run: ReadFlags) -> Iterator[str]:
    loss, masking, values = run.loss, run.masking, run.values
    for flag in flags_of(MaskingConfig):
        value = values.get(f"masking.{flag.field}", flag.default)
        if value == flag.default:
            continue
        if loss.objective != MASKED:
            yield f"{flag.positive_name} {value} has no effect without --objective {MASKED}."
        elif flag.field == "short_seq_prob" and masking.masked_samples != SENTENCES:
            yield f"{flag.positive_name} {value} has no effect without --masked-samples {SENTENCES}."


@request_rule
def _multi_token_prediction(run: RunSections) -> Iterator[str]:
    model, parallel, optim, length = run.model, run.parallel, run.optim, run.data.seq_length
    if not model.mtp_num_layers > 0:
        return
    option = f"--mtp-num-layers {model.mtp_num_layers}"
    shortest = min([length, *optim.curriculum_lengths, optim.curriculum_min_length or length])
    if model.mtp_num_layers >= shortest:
        sample = f"--seq-length {length}" if shortest == length else f"the curriculum's shortest length {shortest}"
        yield (
            f"{option} is too large for {sample}: its last block would have no token to predict. Use at most "
            f"{shortest - 1}, or longer samples."
        )
    if run.loss.objective != CAUSAL:
        yield (
            f"{option} cannot be combined with --objective {run.loss.objective}, which lets tokens attend to later "
            f"ones. Use --objective {CAUSAL}, or drop --mtp-num-layers."
        )
    distillation = run.distillation
    if distillation.is_on:
        flag = "--mos" if distillation.mos else "--kd"
        yield f"{option} cannot be combined with {flag}: the teacher only predicts the next token. Drop one of them."
    if parallel.sequence_size > 1:
        yield (
            f"{option} cannot be combined with {sharing_flags(parallel)}: a rank would need tokens of other ranks. Use "
            "--tensor-model-parallel-size with --sequence-parallel for long samples, or drop --mtp-num-layers."
        )
