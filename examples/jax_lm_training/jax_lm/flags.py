"""The command line of jax-lm-training's `python -m jax_lm.train`.

Source: codertimo/jax-lm-training, README.md and jax_lm/train.py.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.program import Program
from megatron.config.program_flags import ProgramFlags, arguments_of

if TYPE_CHECKING:
    from megatron.observe.console import LineStyle

_PRESETS: Mapping[str, str] = types.MappingProxyType(
    {
        "distilgpt2": "gpt2-82m",
        "gpt2": "gpt2-124m",
        "gpt2-medium": "gpt2-355m",
        "gpt2-large": "gpt2-774m",
        "gpt2-xl": "gpt2-1.5b",
    }
)
_PRECISION: Mapping[str, list[str]] = types.MappingProxyType(
    {"float32": [], "float16": ["--fp16"], "bfloat16": ["--bf16"]}
)
_EPOCHS = 5
_CHECKPOINT = re.compile(r"iter_0*(\d+)")


@dataclass(frozen=True)
class JaxLmFlags(ProgramFlags):
    """Flags of `jax_lm/train.py`."""

    model_config_name: str = flag("distilgpt2", f"the network: {', '.join(_PRESETS)}, or a name of --model-preset")
    train_dataset_paths: str = flag(
        "dataset/wikitext.train**", "quoted pattern of the Parquet windows to train on", path=PathUse.PREFIX
    )
    eval_dataset_paths: str = flag(
        "dataset/wikitext.test**", "quoted pattern of the windows to evaluate on", path=PathUse.PREFIX
    )
    tokenizer_model: str = flag(
        "gpt2",
        "tokenizer of the windows: a folder, or a name on the Hugging Face hub",
        spelled=("--tokenizer-name-or-path",),
        path=PathUse.FILE_OR_FOLDER,
    )
    batch_size: int = flag(16, "samples per step over all devices", at_least=1)
    random_seed: int = flag(0, "seed of weights, dropout and order", at_least=0)
    max_sequence_length: int = flag(256, "tokens of a window", at_least=1)
    num_epochs: int | None = flag(
        None, f"passes over the training data; {_EPOCHS} unless another length is given", at_least=1
    )
    learning_rate: float = flag(3e-5, "rate of the first step; it falls linearly to 0", at_least=0)
    weight_decay_rate: float = flag(0.01, "decoupled weight decay; biases and norms have none", at_least=0)
    adamw_beta1: float = flag(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adamw_beta2: float = flag(0.98, "decay of Adam's second moment", at_least=0, below=1)
    adamw_eps: float = flag(1e-8, "Adam's epsilon", above=0)
    dtype: str = flag("float32", "precision of the computation", choices=tuple(_PRECISION))
    wandb_username: str | None = flag(None, "user or team at Weights & Biases, with --wandb-project")
    wandb_project: str | None = flag(None, "Weights & Biases project; nothing is sent if unset")
    wandb_run_dir: str | None = flag(None, "folder for Weights & Biases files", path=PathUse.FOLDER)
    logging_frequency: int = flag(100, "steps between log lines", at_least=1)
    eval_frequency: int = flag(5000, "steps between evaluations; each epoch also ends with one", at_least=1)
    save_frequency: int = flag(5000, "steps between checkpoints; each epoch also ends with one", at_least=1)
    model_save_dir: str = flag("artifacts/", "folder of the metrics and the newest 3 checkpoints", path=PathUse.FOLDER)
    restore_checkpoint_path: str | None = flag(
        None,
        "continue from a folder of checkpoints, at its newest, or from one of them (artifacts/iter_0005000)",
        path=PathUse.FOLDER,
    )

    def problems(self) -> Iterator[str]:
        if self.wandb_project is None:
            for name, value in (("username", self.wandb_username), ("run-dir", self.wandb_run_dir)):
                if value is not None:
                    yield (
                        f"--wandb-{name} {value} has no effect without --wandb-project. Name the project, or drop "
                        f"--wandb-{name}: nothing is sent unless a project is given."
                    )

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line that is equivalent to these flags."""
        pairs = {
            "model-preset": _PRESETS.get(self.model_config_name, self.model_config_name),
            "train-data-path": self.train_dataset_paths,
            "valid-data-path": self.eval_dataset_paths,
            "tokenizer-name-or-path": self.tokenizer_model,
            "global-batch-size": self.batch_size,
            "seed": self.random_seed + 1,  # the trainer's begin with 1
            "seq-length": self.max_sequence_length,
            "epochs": self.num_epochs,
            "lr": self.learning_rate,
            "weight-decay": self.weight_decay_rate,
            "adam-beta1": self.adamw_beta1,
            "adam-beta2": self.adamw_beta2,
            "adam-eps": self.adamw_eps,
            "wandb-project": self.wandb_project,
            "wandb-entity": self.wandb_username,
            "wandb-save-dir": self.wandb_run_dir,
            "log-interval": self.logging_frequency,
            "eval-interval": self.eval_frequency,
            "save-interval": self.save_frequency,
            "save": self.model_save_dir,
            **self._restored(),
        }
        return [*arguments_of({f"--{name}": value for name, value in pairs.items()}), *_PRECISION[self.dtype]]

    @property
    def program(self) -> Program:
        """The program's defaults and its log style."""
        folder = PurePath(self.model_save_dir)
        defaults = {
            "data.tokenizer_type": "PretrainedFromHF",
            "finetuning.epochs": _EPOCHS,
            "optim.clip_grad": 0.0,
            "saving.keep_last": 3,
            "report.log_style": "jax_lm",
            "evaluation.full_validation": True,
            "evaluation.eval_each_epoch": True,
            "saving.save_each_epoch": True,
            "report.run_dir": str(folder / "run"),
            "report.tensorboard_dir": str(folder / "tensorboard"),
        }
        return Program(defaults=defaults, log_styles={"jax_lm": _line_style})

    def _restored(self) -> dict[str, Any]:
        """The folder to load from and, if a single checkpoint was named, its step."""
        if self.restore_checkpoint_path is None:
            return {}
        path = PurePath(self.restore_checkpoint_path)
        named = _CHECKPOINT.fullmatch(path.name)
        return {"load": path} if named is None else {"load": path.parent, "ckpt-step": int(named.group(1))}


def _line_style() -> LineStyle:
    from examples.jax_lm_training.jax_lm import log_style

    return log_style
