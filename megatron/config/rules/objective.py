"""Objectives: the loss, masking, examples, a teacher and multi-token prediction."""

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
            "--reweight-loss-based-on-position-frequency is for --objective prefix, where random prefixes hide "
            f"some positions more often than others; this is --objective {loss.objective}. Drop the flag."
        )
    if loss.loss_mean == SAMPLES and loss.objective not in (CAUSAL, MULTITASK):
        yield (
            f"--loss-mean samples is for --objective {CAUSAL} and {MULTITASK}; --objective {loss.objective} "
            "normalizes its loss in its own way. Drop --loss-mean."
        )


@run_rule
def _masking(run: RunSections) -> Iterator[str]:
    masking = run.masking
    shares = masking.random_replace_prob + masking.unmask_replace_prob
    if shares > 1:
        yield (
            f"--random-replace-prob {masking.random_replace_prob} and --unmask-replace-prob "
            f"{masking.unmask_replace_prob} sum to {shares:g}. They are shares of the tokens to be predicted; lower "
            "one of them."
        )
    if masking.masking_ngrams > 1 and masking.masked_samples != SENTENCES:
        yield (
            f"--masking-ngrams {masking.masking_ngrams} is for --masked-samples {SENTENCES}; with "
            f"{masking.masked_samples} every word is chosen separately. Drop the flag."
        )


@run_rule
def _examples(run: RunSections) -> Iterator[str]:
    finetuning = run.finetuning
    if finetuning.copy_prompt_probability and finetuning.pack_examples:
        yield (
            f"--copy-prompt-probability {finetuning.copy_prompt_probability:g} draws whole samples, and with "
            "--pack-examples a sample is filled with several examples. Drop one of the two."
        )


@run_rule
def _teacher(run: RunSections) -> Iterator[str]:
    distillation = run.distillation
    if distillation.is_on and distillation.load_teacher is None:
        name = "--kd" if distillation.kd else "--mos"
        yield f"{name} needs --load-teacher, the folder of the checkpoint of the teacher."
    if distillation.load_teacher is not None and not distillation.is_on:
        yield (
            f"--load-teacher {distillation.load_teacher} is given without --kd or --mos, so nothing would be learned "
            "from the teacher. Add --kd, or drop --load-teacher."
        )
    if distillation.is_on and distillation.kd_alpha_ce == distillation.kd_beta_ce == 0:
        yield "--kd-alpha-ce 0 and --kd-beta-ce 0 leave nothing to minimize. Make at least one of them positive."


@run_rule
def _both_sides(run: RunSections) -> Iterator[str]:
    model, loss = run.model, run.loss
    if loss.objective == MASKED and not model.bidirectional:
        yield (
            "--objective masked needs --bidirectional: a masked token is predicted from the tokens on both sides. "
            "Add it, or use pretrain_bert.py."
        )
    if model.bidirectional and loss.objective != MASKED:
        yield (
            f"--bidirectional cannot be combined with --objective {loss.objective}: a token would see the one it "
            "predicts. Use --objective masked, or pretrain_bert.py."
        )


@request_rule
def _masked_samples(run: RunSections) -> Iterator[str]:
    model, loss, masking, sequence_length = run.model, run.loss, run.masking, run.data.seq_length
    too_short = masking.too_short(sequence_length) if loss.objective == MASKED else ""
    if too_short:
        yield too_short
    if loss.objective == MASKED and model.sentence_order_head and masking.masked_samples != SENTENCES:
        yield (
            f"--sentence-order-head cannot be combined with --masked-samples {masking.masked_samples}: only samples of "
            "sentences have two segments whose order can be predicted. Add --bert-no-binary-head."
        )


@request_rule
def _flags_of_other_objectives(run: RunSections) -> Iterator[str]:
    loss, documents, finetuning = run.loss, run.documents, run.finetuning
    distillation, evaluation = run.distillation, run.evaluation
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
            evaluation.eval_tasks is not None,
            "scores continuations of a text, which an encoder does not have",
        ),
        "--sample-prompts": (
            evaluation.sample_prompts is not None,
            "asks for continuations of a text, which an encoder does not have",
        ),
    }
    for option, (is_asked, reason) in asked.items():
        if is_asked and loss.objective == MASKED:
            yield f"{option} {reason}. Drop it."


@notice
def _idle_masking(run: ReadFlags) -> Iterator[str]:
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
    asked = f"--mtp-num-layers {model.mtp_num_layers}"
    shortest = min([length, *optim.curriculum_lengths, optim.curriculum_min_length or length])
    if model.mtp_num_layers >= shortest:
        sample = (
            f"--seq-length {length}" if shortest == length else f"the curriculum, whose first samples have {shortest}"
        )
        yield (
            f"{asked} does not go with {sample}: the last of its blocks would have no token to predict. Use at most "
            f"{shortest - 1}, or longer samples."
        )
    if run.loss.objective != CAUSAL:
        yield (
            f"{asked} does not go with --objective {run.loss.objective}, where tokens may have seen the ones after the "
            f"next. Use --objective {CAUSAL}, or drop --mtp-num-layers."
        )
    distillation = run.distillation
    if distillation.is_on:
        teaches = "--mos" if distillation.mos else "--kd"
        yield f"{asked} does not go with {teaches}: a teacher predicts the next token alone. Drop one of them."
    if parallel.sequence_size > 1:
        yield (
            f"{asked} does not go with {sharing_flags(parallel)}: a rank would need tokens that other ranks have. Use "
            "--tensor-model-parallel-size with --sequence-parallel for long samples, or drop --mtp-num-layers."
        )
