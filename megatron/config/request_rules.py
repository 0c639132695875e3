"""Rules for a request only, not for a resolved run: modes that exclude each other, flags that need each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from megatron.config.flags.blends import shown_split
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.sections.control import ControlConfig
from megatron.config.sections.data import (
    SENTENCEPIECE_TOKENIZERS,
    TOKENIZERS,
    WORDPIECE_TOKENIZERS,
    DataConfig,
)
from megatron.config.sections.optim import OptimRequest


def request_problems(
    provenance: Mapping[str, str],
    optim: OptimRequest,
    data: DataConfig,
    control: ControlConfig,
    finetuning: FinetuningConfig,
    distillation: DistillationConfig,
) -> Iterator[str]:
    """One sentence for every broken rule between flags that were given."""
    yield from _teacher_problems(distillation, control)
    yield from _length_problems(optim, control, finetuning)
    yield from _data_problems(data, provenance)
    yield from _tokenizer_problems(data)
    if control.load is None:
        by_itself = control.finetune and not control.reset_iteration
        asks = {"--eval-only": control.eval_only, "--finetune": by_itself, "--reset-iteration": control.reset_iteration}
        for name, is_asked in asks.items():
            if is_asked:
                yield f"{name} needs --load, the folder of the checkpoint to take the weights from."


def _teacher_problems(distillation: DistillationConfig, control: ControlConfig) -> Iterator[str]:
    teacher, save = distillation.load_teacher, control.save
    if teacher is not None and save is not None and os.path.realpath(teacher) == os.path.realpath(save):
        yield (
            f"--load-teacher {teacher} is the folder to which this run saves (--save {save}), so after a resume its "
            "newest checkpoint, the student's own, would be the teacher. Save to another folder, or name one of the "
            "teacher's checkpoints."
        )


def _length_problems(optim: OptimRequest, control: ControlConfig, finetuning: FinetuningConfig) -> Iterator[str]:
    if control.eval_only:
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
            f"--epochs {epochs} does not go with --curriculum-learning, which uses a part of each sample only. Give "
            "--train-iters, or drop --curriculum-learning."
        )
    in_steps = {"--lr-warmup-iters": optim.lr_warmup_iters, "--lr-decay-iters": optim.lr_decay_iters}
    for name, value in in_steps.items():
        if value:
            other = "--lr-warmup-fraction or --lr-warmup-samples" if "warmup" in name else "--lr-decay-samples"
            yield f"{name} {value} does not go with --epochs, which counts samples. Use {other}."


def _data_problems(data: DataConfig, provenance: Mapping[str, str]) -> Iterator[str]:
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
                f"--split {shown_split(data.split)} does not go with {modes[0][0]}, which already says what to train "
                "on. Drop --split."
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
            yield f"--vocab-file is required by --tokenizer-type {kind}: a vocab.txt with one token a line."
    elif kind in SENTENCEPIECE_TOKENIZERS:
        if data.tokenizer_name_or_path is None and data.vocab_file is None:
            yield f"--tokenizer-model is required by --tokenizer-type {kind}: a SentencePiece .model file."
    elif data.tokenizer_name_or_path is None and kind in TOKENIZERS:
        yield f"--tokenizer-name-or-path is required by --tokenizer-type {kind}: a folder or a hub name."
