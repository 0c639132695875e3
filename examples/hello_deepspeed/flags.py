"""The flags of HelloDeepSpeed's two programs, and the experiment folders that they make and continue.

    {checkpoint_dir}/bert_pretrain.{YYYY}.{MM}.{DD}.{HH}.{MM}.{SS}.{uuid8}/
        hparams.json        the program's own flags
        githash.log         the commit of the source code
        gitdiff.log         what was changed since
        tb_dir/             TensorBoard
        checkpoints/        one folder for each --checkpoint_every iterations, and for the last one

Source: microsoft/DeepSpeedExamples, training/HelloDeepSpeed/train_bert.py and train_bert_ds.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.flags.command_line import value_from_file
from megatron.config.flags.fields import flag, flags_of
from megatron.config.flags.paths import PathUse
from megatron.config.flags.program import Program, RunFileNames
from megatron.config.program_flags import ProgramFlags, arguments_of
from megatron.errors import ConfigError
from megatron.files.settings import read_json

if TYPE_CHECKING:
    from megatron.observe.console import LineStyle

EXPERIMENT = "{experiment}"
HPARAMS = "hparams.json"
RUN_FILES = RunFileNames("githash.log", "gitdiff.log", HPARAMS, commit_is_alone=True)
_NUM_ITERATIONS = 10_000
_PREPARED = "prepared"
# What a continued experiment may change; everything else comes from hparams.json.
_MAY_CHANGE = ("checkpoint_every", "log_every", "local_rank", "num_iterations", "dtype")
_PLACES = ("checkpoint_dir", "load_checkpoint_dir")


@dataclass(frozen=True)
class HelloDeepSpeedFlags(ProgramFlags):
    """The flags of train_bert.py."""

    checkpoint_dir: str | None = flag(
        None, "parent folder of the new experiment folder", spelled=("--checkpoint_dir",), path=PathUse.FOLDER
    )
    load_checkpoint_dir: str | None = flag(
        None,
        "experiment folder to continue; its hparams.json gives the flags",
        spelled=("--load_checkpoint_dir",),
        path=PathUse.FOLDER,
    )
    dataset: str | None = flag(
        None,
        "a text file with a paragraph on each line, jsonl or Parquet with a column text, a folder of these, or the "
        "name of a dataset of the hub; if unset, the texts that come with Python",
        path=PathUse.FILE_OR_FOLDER,
    )
    mask_prob: float = flag(0.15, "share of the tokens to be predicted", above=0.0, below=1.0, spelled=("--mask_prob",))
    random_replace_prob: float = flag(
        0.1, "share of these that become a random token", at_least=0.0, at_most=1.0, spelled=("--random_replace_prob",)
    )
    unmask_replace_prob: float = flag(
        0.1, "share of these that stay as they are", at_least=0.0, at_most=1.0, spelled=("--unmask_replace_prob",)
    )
    max_seq_length: int = flag(
        512, "tokens of a sample; longer texts are cut", at_least=8, spelled=("--max_seq_length",)
    )
    tokenizer: str | None = flag(
        None,
        "tokenizer.json, a folder that holds one, or a hub name such as roberta-base; if unset, byte-level BPE with "
        "RoBERTa's special tokens is trained on the dataset",
        path=PathUse.FILE_OR_FOLDER,
    )
    num_layers: int = flag(6, "encoder layers", at_least=1, spelled=("--num_layers",))
    num_heads: int = flag(8, "attention heads", at_least=1, spelled=("--num_heads",))
    ff_dim: int = flag(512, "width of the feed-forward layers", at_least=1, spelled=("--ff_dim",))
    h_dim: int = flag(256, "width of the network", at_least=1, spelled=("--h_dim",))
    dropout: float = flag(0.1, "probability of dropout", at_least=0.0, below=1.0)
    batch_size: int = flag(8, "samples of an iteration on each process", at_least=1, spelled=("--batch_size",))
    num_iterations: int | None = flag(
        None,
        "iterations in all, 10000 if unset; for a continued experiment, the larger of this and its own number",
        at_least=1,
        spelled=("--num_iterations",),
    )
    checkpoint_every: int = flag(
        1000,
        "iterations between checkpoints; the last one is always saved",
        at_least=1,
        spelled=("--checkpoint_every",),
    )
    log_every: int = flag(10, "iterations between log lines", at_least=1, spelled=("--log_every",))
    local_rank: int = flag(
        -1, "number of the GPU to train on; -1 leaves the choice to the program", at_least=-1, spelled=("--local_rank",)
    )

    def complete(self) -> None:
        if self.dataset is not None and os.path.exists(self.dataset):
            self.set_derived("dataset", os.path.abspath(self.dataset))  # an experiment can be continued from any folder

    def problems(self) -> Iterator[str]:
        if (self.checkpoint_dir is None) == (self.load_checkpoint_dir is None):
            given = "both are given" if self.checkpoint_dir else "neither is given"
            yield (
                f"exactly one of --checkpoint_dir (a new experiment) and --load_checkpoint_dir (one to continue) is "
                f"needed, and {given}."
            )
        if self.h_dim % self.num_heads:
            yield f"--h_dim {self.h_dim} cannot be divided among {self.num_heads} heads (--num_heads)."
        if self.random_replace_prob + self.unmask_replace_prob > 1.0:
            yield (
                f"--random_replace_prob {self.random_replace_prob} and --unmask_replace_prob "
                f"{self.unmask_replace_prob} sum to more than 1, all of the tokens to be predicted. Lower one of them."
            )

    @property
    def prepared(self) -> Path:
        """The folder of the dataset's tokens and of its tokenizer, shared by experiments on the same data."""
        parent = self.checkpoint_dir or Path(str(self.load_checkpoint_dir)).parent
        digest = hashlib.sha256(json.dumps([self.dataset, self.tokenizer]).encode()).hexdigest()[:12]
        return Path(parent) / _PREPARED / digest

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line, of a new experiment or of one that is `continued`."""
        folder = self.load_checkpoint_dir or str(Path(str(self.checkpoint_dir)) / EXPERIMENT)
        checkpoints = str(Path(folder) / "checkpoints")
        values: dict[str, Any] = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.h_dim,
            "--num-attention-heads": self.num_heads,
            "--ffn-hidden-size": self.ff_dim,
            "--seq-length": self.max_seq_length,
            "--max-position-embeddings": self.max_seq_length,
            "--hidden-dropout": self.dropout,
            "--attention-dropout": self.dropout,
            "--masked-samples": "documents",
            "--mask-prob": self.mask_prob,
            "--random-replace-prob": self.random_replace_prob,
            "--unmask-replace-prob": self.unmask_replace_prob,
            "--micro-batch-size": self.batch_size,
            "--train-iters": self.num_iterations or _NUM_ITERATIONS,
            "--save-interval": self.checkpoint_every,
            "--log-interval": self.log_every,
            "--tokenizer-type": "HFTokenizer",
            "--tokenizer-name-or-path": self.tokenizer or self.prepared / "tokenizer.json",
            "--data-path": self.prepared / "train_text_document",
            "--save": checkpoints,
            "--run-dir": folder,
            "--tensorboard-dir": Path(folder) / "tb_dir",
            "--run-files": "hello_deepspeed",
            "--log-style": "hello_deepspeed",
            "--program-flags": json.dumps(self.hparams()),
        }
        if self.load_checkpoint_dir is not None:
            values["--load"] = checkpoints
        if self.local_rank >= 0:
            values["--local-rank"] = self.local_rank
        return arguments_of(values)

    @property
    def program(self) -> Program:
        """The network of RoBERTa, Adam at a constant rate, and all data for training; a flag or a file wins."""
        defaults: dict[str, Any] = {
            "model.bidirectional": True,
            "model.token_types": 1,
            "model.masked_lm_head": True,
            "model.embed_layernorm": True,
            "model.norm_placement": "post",
            "model.activation_function": "gelu",
            "optim.lr": 1.0e-4,
            "optim.lr_decay_style": "constant",
            "optim.weight_decay": 0.0,
            "optim.clip_grad": 0.0,
            "evaluation.eval_iters": 0,
            "data.split": "100,0,0",
        }
        return Program(
            fixed={"loss.objective": "masked"},
            defaults=defaults,
            log_styles={"hello_deepspeed": _line_style},
            run_files={"hello_deepspeed": RUN_FILES},
        )

    def hparams(self) -> dict[str, Any]:
        """The content of hparams.json."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if name not in _PLACES}
        return {**found, "num_iterations": self.num_iterations or _NUM_ITERATIONS}


@dataclass(frozen=True)
class HelloDeepSpeedEngineFlags(HelloDeepSpeedFlags):
    """The flags of train_bert_ds.py."""

    dtype: str = flag("bf16", "dtype of the computation", choices=("fp32", "bf16", "fp16"))

    @property
    def program(self) -> Program:
        """As in train_bert.py, with the optimizer's state divided among the processes."""
        program = super().program
        return dataclasses.replace(program, defaults={**program.defaults, "parallel.zero_stage": 1})

    def trainer_arguments(self) -> list[str]:
        """As of train_bert.py, with the precision."""
        return super().trainer_arguments() + ([] if self.dtype == "fp32" else [f"--{self.dtype}"])


def continued(flags: HelloDeepSpeedFlags) -> HelloDeepSpeedFlags:
    """The flags of the experiment in --load_checkpoint_dir, with the larger of both numbers of iterations.

    Flags of a new experiment are returned as they are.

    Raises:
        ConfigError: the folder holds no experiment, or a given flag contradicts it.
    """
    if flags.load_checkpoint_dir is None:
        return flags
    path = Path(flags.load_checkpoint_dir) / HPARAMS
    if not path.is_file():
        raise ConfigError(
            f"--load_checkpoint_dir {flags.load_checkpoint_dir} holds no {HPARAMS}. Give the folder of one experiment, "
            "not the --checkpoint_dir that it was made in."
        )
    saved = read_json(str(path), str(path))
    if not isinstance(saved, dict):
        raise ConfigError(f"{path} holds a {type(saved).__name__}, not the flags of an experiment by name.")
    known = {entry.field: entry for entry in flags_of(type(flags)) if entry.field not in _PLACES}
    unknown = sorted(set(saved) - set(known))
    if unknown:
        raise ConfigError(
            f"{path} holds {', '.join(unknown)}, which is not a flag of this program. Use the program that made the "
            "experiment, or a copy that was not edited."
        )
    problems = []
    taken: dict[str, Any] = {}
    for name, entry in saved.items():
        try:
            value = None if entry is known[name].default is None else value_from_file(known[name], entry)
        except ConfigError as failure:
            problems.append(f'{path}: "{name}" {failure.problems[0]}')
            continue
        requested = getattr(flags, name)
        if name not in flags.given:
            taken[name] = value
        elif name not in _MAY_CHANGE and requested != value:
            problems.append(
                f"--{name} {requested} was given, but the experiment in {flags.load_checkpoint_dir} has {value}. Drop "
                "the flag, or start a new experiment with --checkpoint_dir."
            )
        elif name == "num_iterations":
            taken[name] = max(requested, value)
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(flags, **taken)


def _line_style() -> LineStyle:
    from examples.hello_deepspeed import log_style

    return log_style
