"""The command line of dsGPT2's `ds_trainer.py`, as flags of the trainer.

Source: jisngprk/dsGPT2, README.md and arguments.py; the preferred optimizer settings are from its ds_config files.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.program import Program
from megatron.config.program_flags import ProgramFlags
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.observe.console import LineStyle

PRETRAIN, FINETUNE = "pretrain", "finetune"
_MODELS: Mapping[str, tuple[str, int]] = types.MappingProxyType(
    {"112m": ("dsgpt2-112m", 128), "112m_half": ("dsgpt2-112m-half", 64), "345m": ("dsgpt2-345m", 64)}
)  # preset and context in tokens
_NOT_FOR_TRAINING = "for generation; does nothing here, as in dsGPT2 (tools/serve.py and tools/generate_samples_gpt.py)"


def _unused(default: Any, *spelled: str) -> Any:
    return flag(default, _NOT_FOR_TRAINING, spelled=spelled)


@dataclass(frozen=True)
class DsGpt2Flags(ProgramFlags):
    """Flags of ds_trainer.py; DeepSpeed's flags, `--seed`, `--local_rank` and `--distributed-backend` are the
    trainer's.
    """

    config_train: str = flag(
        help="JSON file that names the database and the collections with the documents, or the q and a, to train on",
        spelled=("--config_train",),
        path=PathUse.SMALL_FILE,
    )
    model_select: str = flag(
        "112m",
        "size of the network; flags such as --num-layers change it",
        choices=tuple(_MODELS),
        spelled=("--model_select",),
    )
    vocab_load_dir: str = flag(
        "./vocab", "folder of all vocabularies", spelled=("--vocab_load_dir",), path=PathUse.FOLDER
    )
    vocab_id_dir: str = flag(
        "vocab_50257",
        "folder of the vocabulary in it, which holds one *-vocab.json and one *-merges.txt",
        spelled=("--vocab_id_dir",),
    )
    enable_padding: bool = flag(
        True, "samples are always padded, and padding is never learned", spelled=("--enable_padding",)
    )
    enable_bos: bool = flag(True, "questions and answers always begin with <s>", spelled=("--enable_bos",))
    enable_eos: bool = flag(
        True, "questions and answers always end with </s>, documents with end-of-document", spelled=("--enable_eos",)
    )
    truncated_len: int | None = flag(
        None, "tokens of a sample; the network's context if unset", at_least=1, spelled=("--truncated_len",)
    )
    train_mode: str = flag(
        PRETRAIN, "documents, or questions and answers", choices=(PRETRAIN, FINETUNE), spelled=("--train_mode",)
    )
    alpha: float = flag(0.0, "finetune: probability that an answer is replaced by its question", at_least=0, at_most=1)
    ckpt_dir: str = flag("./checkpoints", "folder of all workspaces", spelled=("--ckpt_dir",), path=PathUse.FOLDER)
    workspace: str = flag("test0", "folder in it that checkpoints are written to")
    workspace_finetune: str = flag(
        "test0", "finetune: folder in it of the network to begin with", spelled=("--workspace_finetune",)
    )
    restart: bool = flag(False, "continue from the newest checkpoint in the workspace, or from --ckpt_id")
    load_dir: str | None = flag(
        None,
        "folder of checkpoints to restart from, if it is not the workspace",
        spelled=("--load_dir",),
        path=PathUse.FOLDER,
    )
    ckpt_id: str | None = flag(None, "checkpoint to restart from, such as epoch0-step2000", spelled=("--ckpt_id",))
    ckpt_id_finetune: str | None = flag(
        None, "checkpoint in --workspace_finetune; the newest if unset", spelled=("--ckpt_id_finetune",)
    )
    train_iters: int = flag(100_000, "steps of training", at_least=1, spelled=("--train_iters",))
    tr_ratio: float = flag(
        0.99,
        "share of the documents for training; the others are held out",
        above=0,
        at_most=1,
        spelled=("--tr_ratio",),
    )
    loss_type: str = flag("lm_loss", "the loss", choices=("lm_loss",), spelled=("--loss_type",))
    wandb_dir: str = flag("", "Weights & Biases project; nothing is sent if empty", spelled=("--wandb_dir",))
    ckpt_save_steps: int = flag(2000, "steps between checkpoints", at_least=1, spelled=("--ckpt_save_steps",))
    eval_batch_size: int = flag(
        128, "does nothing: an evaluation takes --eval-iters global batches", at_least=1, spelled=("--eval_batch_size",)
    )
    use_cpu: bool = flag(False, _NOT_FOR_TRAINING, spelled=("--use_cpu",))
    gpu_id: int = _unused(0, "--gpu_id")
    min_length: int = _unused(100, "--min_length")
    max_length: int = _unused(120, "--max_length")
    do_sample: bool = flag(True, _NOT_FOR_TRAINING, spelled=("--do_sample",))
    top_k: int = _unused(30, "--top_k")
    top_p: float = _unused(1.0, "--top_p")
    temperature: float = _unused(0.9)
    repetition_penalty: float = _unused(1.2, "--repetition_penalty")
    num_beams: int = _unused(1, "--num_beams")
    port: int = _unused(4000)

    def problems(self) -> Iterator[str]:
        for name, token in (("enable_bos", "<s>"), ("enable_eos", "</s>")):
            if not getattr(self, name):
                yield (
                    f"--{name} false: chats are always written with {token}, which generation and serving rely on. "
                    "Drop the flag; --chat-template takes a file with another layout."
                )
        if self.alpha and self.train_mode != FINETUNE:
            yield (
                f"--alpha {self.alpha:g} replaces answers by questions, and documents have neither. Drop it, or give "
                f"--train_mode {FINETUNE}."
            )
        if self.ckpt_id is not None and not self.restart:
            yield (
                f"--ckpt_id {self.ckpt_id} is where a restart begins, and this is none. Give --restart True, or drop "
                "--ckpt_id."
            )
        context = _MODELS.get(self.model_select, ("", 0))[1]
        if context and self.truncated_len is not None and self.truncated_len > context:
            yield (
                f"--truncated_len {self.truncated_len} is more than the {context} tokens that --model_select "
                f"{self.model_select} reads. Use at most {context}."
            )

    @property
    def program(self) -> Program:
        """dsGPT2's defaults, which presets, files and flags override, and its log style."""
        defaults = {
            "loss.loss_mean": "samples",
            "optim.lr": 1e-3 if self.train_mode == FINETUNE else 3.5e-4,
            "optim.lr_decay_style": "linear",
            "optim.lr_warmup_fraction": 0.01,
            "optim.adam_beta1": 0.95,
            "optim.adam_beta2": 0.999,
            "optim.weight_decay": 1e-5,
            "optim.clip_grad": 0.25,
            "optim.micro_batch_size": 1,
            "random.seed": 123,
            "report.log_style": "dsgpt2",
            "report.log_interval": 1,
            "evaluation.eval_interval": 100,
            "evaluation.eval_iters": 1,
        }
        return Program(defaults=defaults, log_styles={"dsgpt2": _line_style})

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line.

        Raises:
            ConfigError: the folder of the vocabulary does not hold one vocabulary.
        """
        preset, context = _MODELS[self.model_select]
        train = 100 * self.tr_ratio
        arguments = ["--model-preset", preset, "--seq-length", str(self.truncated_len or context)]
        arguments += [
            "--vocab-file",
            self._vocabulary("*-vocab.json"),
            "--merge-file",
            self._vocabulary("*-merges.txt"),
        ]
        arguments += ["--data-path", self.config_train, "--split", f"{train:.10g},{100 - train:.10g},0"]
        arguments += ["--train-iters", str(self.train_iters), "--save", self._folder(self.workspace)]
        arguments += ["--save-interval", str(self.ckpt_save_steps), "--checkpoint-link", "epoch{epoch}-step{step}"]
        if self.wandb_dir:
            arguments += ["--wandb-project", self.wandb_dir]
        if self.train_mode == FINETUNE:
            arguments += ["--chat-template", "dsgpt2", "--loss-on-targets-only"]
            arguments += ["--copy-prompt-probability", f"{self.alpha:g}"] if self.alpha else []
        return arguments + self._start()

    def _start(self) -> list[str]:
        """The flags of the initial weights: none, a checkpoint of this run, or of another one.

        Repeating the command of an interrupted fine-tuning continues it.
        """
        if self.restart and (self.train_mode == PRETRAIN or self.ckpt_id is not None):
            source = Path(self.load_dir or self._folder(self.workspace))
            return ["--load", str(source / (self.ckpt_id or ""))]
        if self.train_mode == FINETUNE:
            source = Path(self.load_dir or self._folder(self.workspace_finetune))
            return ["--finetune", "--load", str(source / (self.ckpt_id_finetune or ""))]
        return []

    def _folder(self, workspace: str) -> str:
        return str(Path(self.ckpt_dir) / workspace)

    def _vocabulary(self, pattern: str) -> str:
        folder = Path(self.vocab_load_dir) / self.vocab_id_dir
        found = sorted(folder.glob(pattern))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise ConfigError(
                f"{folder} must hold one file {pattern}; it holds {names}. Train a vocabulary there with "
                f"tools/train_tokenizer.py --output-prefix {folder}/NAME --special-tokens dsgpt2, or correct "
                "--vocab_load_dir and --vocab_id_dir."
            )
        return str(found[0])


def _line_style() -> LineStyle:
    from examples.dsgpt2 import log_style

    return log_style
