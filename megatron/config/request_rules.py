"""Rules for a request only, not for a resolved run: modes that exclude each other, flags that need each other
(including the flags of masked language modelling), and flags that decide where numbers are held or which are computed,
in forms that this program does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.flags.blends import shown_split
from megatron.config.flags.fields import flags_of
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.objective.masking import SENTENCES, MaskingConfig
from megatron.config.pipeline_rules import chunks_per_rank, schedule_name
from megatron.config.sections.checkpoints import LoadingConfig, SavingConfig
from megatron.config.sections.computation import KernelConfig, PrecisionConfig, RecomputeConfig
from megatron.config.sections.data import (
    NULL_TOKENIZER,
    SENTENCEPIECE_TOKENIZERS,
    TOKENIZERS,
    WORDPIECE_TOKENIZERS,
    DataConfig,
    DocumentConfig,
)
from megatron.config.sections.evaluation import EvaluationConfig
from megatron.config.sections.model import ModelRequest
from megatron.config.sections.optim import OptimRequest
from megatron.config.sections.parallel import ParallelRequest
from megatron.config.sections.pipelines import SPLIT_SCHEDULES

_LEGACY = "legacy."


def checkpoint_problems(
    loading: LoadingConfig, saving: SavingConfig, evaluation: EvaluationConfig, distillation: DistillationConfig
) -> Iterator[str]:
    """What is contradictory about the checkpoints that a run reads and writes."""
    teacher, save = distillation.load_teacher, saving.save
    if teacher is not None and save is not None and os.path.realpath(teacher) == os.path.realpath(save):
        yield (
            f"--load-teacher {teacher} is the folder to which this run saves (--save {save}), so after a resume its "
            "newest checkpoint, the student's own, would be the teacher. Save to another folder, or name one of the "
            "teacher's checkpoints."
        )
    if loading.from_scratch and evaluation.eval_only:
        yield (
            "--from-scratch and --eval-only contradict each other: there would be no weights to evaluate. Drop one "
            "of them."
        )
    if loading.load is None:
        asks = {
            "--eval-only": evaluation.eval_only,
            "--finetune": loading.finetune and not loading.reset_iteration,
            "--reset-iteration": loading.reset_iteration,
        }
        for name, is_asked in asks.items():
            if is_asked:
                yield f"{name} needs --load, the folder of the checkpoint to take the weights from."


def length_problems(optim: OptimRequest, evaluation: EvaluationConfig, finetuning: FinetuningConfig) -> Iterator[str]:
    """What is missing or given twice about the length of training and its learning rate."""
    if evaluation.eval_only:
        return
    if finetuning.epochs is not None:
        yield from _epochs_problems(optim, finetuning.epochs)
    elif optim.train_iters is None and not optim.is_counted_in_samples:
        yield "--train-iters, --train-samples, --train-tokens or --epochs is required: how long to train."
    if optim.lr is None:
        yield "--lr is required: the peak learning rate, for example 1.5e-4."
    if optim.train_iters is not None and optim.train_samples is not None:
        yield (
            f"--train-iters {optim.train_iters} and --train-samples {optim.train_samples} are both given. Only "
            "one of them can set the length of a run; drop the other."
        )


def _epochs_problems(optim: OptimRequest, epochs: int) -> Iterator[str]:
    lengths = {
        "--train-iters": optim.train_iters,
        "--train-samples": optim.train_samples,
        "--train-tokens": optim.train_tokens,
    }
    for name, value in lengths.items():
        if value is not None:
            yield f"--epochs {epochs} and {name} {value} are both given. A run has one length; drop one of them."
    if optim.curriculum_learning:
        yield (
            f"--epochs {epochs} cannot be combined with --curriculum-learning, which uses a part of each sample only. "
            "Give --train-iters, or drop --curriculum-learning."
        )
    in_steps = {"--lr-warmup-iters": optim.lr_warmup_iters, "--lr-decay-iters": optim.lr_decay_iters}
    for name, value in in_steps.items():
        if value:
            other = "--lr-warmup-fraction or --lr-warmup-samples" if "warmup" in name else "--lr-decay-samples"
            yield f"{name} {value} cannot be combined with --epochs, which counts samples. Use {other}."


def compile_problems(
    kernels: KernelConfig, model: ModelRequest, parallel: ParallelRequest, optim: OptimRequest
) -> Iterator[str]:
    """What cannot be combined with --compile, on any machine."""
    if not kernels.compile:
        return
    if parallel.zero_stage == 3:
        yield (
            "--compile cannot be combined with --zero-stage 3, whose hooks fetch the weights of each layer inside the "
            "block. Use --zero-stage 2, or drop --compile."
        )
    if model.num_experts > 1:
        reason = "the host reads how many tokens an expert gets, in the middle of the block"
        if model.drops_tokens:
            reason = "routers record by the number of their layer, so no two blocks could share a program"
        yield f"--compile cannot be combined with --num-experts {model.num_experts}: {reason}. Drop --compile."
    schedule = schedule_name(parallel, model.num_layers)
    chunks = parallel.pipeline_model_parallel_size * chunks_per_rank(parallel, model.num_layers)
    if schedule in SPLIT_SCHEDULES and chunks > 1:
        yield (
            f"--compile cannot be combined with the pipeline schedule {schedule}: the program of a block computes the "
            "gradients of weights together with those of inputs, which this schedule separates. Use "
            f"--pipeline-schedule {SPLIT_SCHEDULES[schedule]}, or drop --compile."
        )
    if optim.curriculum_learning:
        yield (
            "--compile cannot be combined with --curriculum-learning: every length would be compiled anew. Drop one "
            "of them."
        )


def data_problems(data: DataConfig, provenance: Mapping[str, str]) -> Iterator[str]:
    """What is missing or contradictory about the data and the files of the tokenizer."""
    yield from _source_problems(data, provenance)
    yield from _tokenizer_problems(data)


def _source_problems(data: DataConfig, provenance: Mapping[str, str]) -> Iterator[str]:
    splits = ("train", "valid", "test")
    weighted = [f"--{split}-weighted-split-paths" for split in splits if getattr(data, f"{split}_weighted_split_paths")]
    separate = [f"--{split}-data-path" for split in splits if getattr(data, f"{split}_data_path")]
    modes = [names for names in (["--data-path"] if data.data_path else [], weighted, separate) if names]
    if not modes:
        yield "--data-path is required: the prefix of the token files that tools/preprocess_data.py wrote."
    if len(modes) > 1:
        yield (
            f"{' and '.join(names[0] for names in modes)} are both given. They name the data in different ways; keep "
            "one of them."
        )
    if len(modes) == 1 and not data.data_path:
        if provenance.get("data.split", "default") != "default":
            yield (
                f"--split {shown_split(data.split)} cannot be combined with {modes[0][0]}, which already says what to "
                "train on. Drop --split."
            )
        training = ("--train-weighted-split-paths", "--train-data-path")
        if modes[0][0] not in training:
            yield (
                f"{modes[0][0]} is given without {training[0] if modes[0] is weighted else training[1]}: there is "
                "nothing to train on."
            )


def _tokenizer_problems(data: DataConfig) -> Iterator[str]:
    kind = data.tokenizer_type
    if kind == "GPT2BPETokenizer":
        for name, value in (("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file)):
            if value is None:
                yield f"{name} is required by --tokenizer-type GPT2BPETokenizer: its vocabulary has two files."
    elif kind in WORDPIECE_TOKENIZERS:
        if data.vocab_file is None:
            yield f"--vocab-file is required by --tokenizer-type {kind}: a vocab.txt with one token per line."
    elif kind in SENTENCEPIECE_TOKENIZERS:
        if data.tokenizer_name_or_path is None and data.vocab_file is None:
            yield f"--tokenizer-model is required by --tokenizer-type {kind}: a SentencePiece .model file."
    elif kind == NULL_TOKENIZER and data.tokenizer_name_or_path is None:
        yield f"--vocab-size is required by --tokenizer-type {kind}: the number of its ids."
    elif data.tokenizer_name_or_path is None and kind in TOKENIZERS:
        yield f"--tokenizer-name-or-path is required by --tokenizer-type {kind}: a folder or a hub name."


def placement_problems(
    values: Mapping[str, Any],
    model: ModelRequest,
    parallel: ParallelRequest,
    recompute: RecomputeConfig,
    precision: PrecisionConfig,
) -> Iterator[str]:
    """One sentence for every flag that asks for what is not done here.

    Args:
        values: destination -> value of everything that was given; `legacy.` in front of the flags without a field.
    """
    asked = {name.removeprefix(_LEGACY): value for name, value in values.items() if name.startswith(_LEGACY)}
    yield from _recompute_problems(model, parallel, recompute)
    yield from _float8_problems(model, precision)
    stages = parallel.pipeline_model_parallel_size
    if asked.get("no_pipeline_parallel") and stages > 1:
        yield (
            f"--no-pipeline-parallel contradicts --pipeline-model-parallel-size {stages}. Use "
            "--pipeline-model-parallel-size 1, or drop --no-pipeline-parallel."
        )
    if asked.get("enable_expert_tensor_parallelism") and not parallel.splits_each_expert:
        yield (
            f"--enable-expert-tensor-parallelism contradicts --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_parallel_size}, with which experts are whole. Drop one of them."
        )
    if asked.get("use_distributed_optimizer") and parallel.zero_stage == 0:
        yield (
            "--use-distributed-optimizer contradicts --zero-stage 0, with which every rank holds the whole state of "
            "the optimizer. Use --zero-stage 1, or drop --use-distributed-optimizer."
        )
    if asked.get("accumulate_allreduce_grads_in_fp32") and precision.fp16 and parallel.zero_stage == 3:
        yield (
            "--accumulate-allreduce-grads-in-fp32 is refused with --fp16 and --zero-stage 3, where gradients are "
            "accumulated in float16. Use --bf16 or a lower --zero-stage, which accumulate them in float32, or drop the "
            "flag."
        )


def _recompute_problems(model: ModelRequest, parallel: ParallelRequest, recompute: RecomputeConfig) -> Iterator[str]:
    ranks, chunk = parallel.tensor_model_parallel_size, recompute.checkpoint_num_layers
    if recompute.checkpoint_activations and chunk > 1:
        yield (
            f"--checkpoint-num-layers {chunk} is refused: each block is recomputed on its own, and its input is kept. "
            "Use --checkpoint-num-layers 1; --sequence-parallel splits what is kept over tensor-parallel ranks."
        )
    is_split = recompute.distributes_saved and not parallel.splits_sequence
    if is_split and model.hidden_size % ranks:
        yield (
            f"--distribute-saved-activations cannot split --hidden-size {model.hidden_size} over "
            f"--tensor-model-parallel-size {ranks}. Use a width that is a multiple of {ranks}, or drop it."
        )


def _float8_problems(model: ModelRequest, precision: PrecisionConfig) -> Iterator[str]:
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and not precision.float8_blocks(model.num_layers):
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} leave none of --num-layers "
            f"{model.num_layers} to --fp8-format {precision.fp8_format}. Use smaller numbers, or drop --fp8-format."
        )


def masked_problems(
    model: ModelRequest, loss: LossConfig, masking: MaskingConfig, sequence_length: int
) -> Iterator[str]:
    """What the heads need from the samples, and what masking needs from their length."""
    too_short = masking.too_short(sequence_length) if loss.objective == MASKED else ""
    if too_short:
        yield too_short
    if loss.objective == MASKED and model.sentence_order_head and masking.masked_samples != SENTENCES:
        yield (
            f"--sentence-order-head cannot be combined with --masked-samples {masking.masked_samples}: only samples of "
            "sentences have two segments whose order can be predicted. Add --bert-no-binary-head."
        )


def foreign_problems(
    loss: LossConfig,
    documents: DocumentConfig,
    finetuning: FinetuningConfig,
    distillation: DistillationConfig,
    evaluation: EvaluationConfig,
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
