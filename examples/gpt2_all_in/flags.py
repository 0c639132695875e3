"""GPT2-ALL-IN's `train.py --config NAME.json` as flags of the trainer.

A file has three entries: `dataset`, `model` and `trainer`. Their fields and defaults are GPT2-ALL-IN's; unlike
there, a key that is unknown, of another type or out of its bounds is refused, and the width of the feed-forward layers
follows the width of the model.

Source: names and defaults, geroldcsendes/gpt2-all-in `gpt2_ai/config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.config.flags.command_line import nearest, shown_value, value_from_file
from megatron.config.flags.fields import Flag, flag, flags_of
from megatron.config.flags.paths import PathUse
from megatron.config.flags.program import Program
from megatron.config.flags.section import ConfigSection, bound_problems, build_unchecked
from megatron.config.program_flags import ProgramFlags, arguments_of
from megatron.errors import ConfigError
from megatron.files.settings import read_json

if TYPE_CHECKING:
    from megatron.observe.console import LineStyle

DEV, FULL = "dev", "full"
_DATASETS = (DEV, FULL)
_FILE_KEYS = ("dataset", "model", "trainer")
_EXAMPLE = Path(__file__).resolve().parent
_ACTIVATIONS = {"GELU": "gelu", "ReLU": "relu", "ELU": "elu"}
_WEIGHT_DECAY = {"Adam": 0.0, "AdamW": 0.01}  # torch's defaults
_LENGTHS = frozenset({"--epochs", "--train-iters", "--train-samples", "--train-tokens"})
_HELD_OUT = "98,2,0"
_EVALUATION_BATCHES = 10
RUN = "{run}"
_HUB, _TEXTS = "hf://", (".jsonl", ".json", ".txt", ".jsonl.gz", ".jsonl.zst", ".txt.gz")

Section = TypeVar("Section", bound=ConfigSection)


@dataclass(frozen=True)
class AllInOneModel(ConfigSection):
    """The entry `model`."""

    vocab_size: int | None = flag(None, "rows of the word embedding; the tokenizer's tokens if unset", at_least=1)
    n_ctx: int = flag(1024, "tokens of a sample, and positions", at_least=1)
    d_model: int = flag(768, "width", at_least=1)
    d_mlp: int = flag(help="width of the feed-forward layers; 4 x d_model if unset", at_least=1,
                      computed=lambda model: 4 * model.d_model, follows=("d_model",))  # fmt: skip
    n_layer: int = flag(12, "blocks", at_least=1)
    n_head: int = flag(12, "attention heads", at_least=1)
    resid_pdrop: float = flag(0.1, "dropout on the output of attention and feed-forward", at_least=0, below=1)
    embd_pdrop: float = flag(0.1, "dropout on the embedding", at_least=0, below=1)
    attn_pdrop: float = flag(0.1, "dropout on attention probabilities", at_least=0, below=1)
    layer_norm_epsilon: float = flag(1e-5, "epsilon of the norms", above=0)
    initializer_range: float = flag(0.02, "standard deviation of the initial weights", at_least=0)
    mlp_activation: str = flag("GELU", "activation of the feed-forward", choices=tuple(_ACTIVATIONS))

    def problems(self) -> Iterator[str]:
        """Rules between the fields, each beginning with the key that breaks it."""
        if self.n_head > 0 and self.d_model % self.n_head:
            divisors = [str(heads) for heads in range(1, min(self.d_model, 256) + 1) if self.d_model % heads == 0]
            yield (
                f'"model.n_head" {self.n_head} does not divide "model.d_model" {self.d_model}. Use one of '
                f"{', '.join(divisors)}."
            )
        if self.resid_pdrop != self.embd_pdrop:
            yield (
                f'"model.resid_pdrop" {self.resid_pdrop} and "model.embd_pdrop" {self.embd_pdrop} differ, and one '
                "probability holds for both (--hidden-dropout). Give both the same value."
            )

    def trainer_arguments(self) -> list[str]:
        """The trainer's flags of the architecture."""
        pairs: dict[str, Any] = {
            "--vocab-size": self.vocab_size,
            "--seq-length": self.n_ctx,
            "--max-position-embeddings": self.n_ctx,
            "--hidden-size": self.d_model,
            "--ffn-hidden-size": None if self.d_mlp == 4 * self.d_model else self.d_mlp,
            "--num-layers": self.n_layer,
            "--num-attention-heads": self.n_head,
            "--hidden-dropout": self.resid_pdrop,
            "--attention-dropout": self.attn_pdrop,
            "--layernorm-epsilon": self.layer_norm_epsilon,
            "--init-method-std": self.initializer_range,
            "--activation-function": _ACTIVATIONS[self.mlp_activation],
        }
        return arguments_of(pairs)


@dataclass(frozen=True)
class AllInOneTrainer(ConfigSection):
    """The entry `trainer`."""

    dataset: str | None = flag(
        None,
        "where dataset full is: a pattern of Parquet windows such as shards/train-*.parquet, a prefix of token files, "
        "the address of a document store, or text: hf://NAME on the hub, a folder of a dataset, jsonl or .txt",
        path=PathUse.PREFIX,
    )
    valid_dataset: str | None = flag(
        None, "the same for validation; 2 % of the documents of the training data if unset", path=PathUse.PREFIX
    )
    tokenizer: str | None = flag(
        None,
        "folder with vocab.json and merges.txt, or a tokenizer.json; if unset, the dev corpus's",
        path=PathUse.FILE_OR_FOLDER,
    )
    ckpt_path: str = flag("./logs", "folder of the runs' checkpoints", path=PathUse.FOLDER)
    log_path: str = flag("./logs", "folder of the runs", path=PathUse.FOLDER)
    device: str = flag("auto", "device the file was written for; the device is chosen automatically",
                       choices=("auto", "cpu", "cuda"))  # fmt: skip
    n_workers: int = flag(4, "values above 0 read ahead in the background", at_least=0)
    batch_size: int = flag(64, "samples of a forward pass", at_least=1)
    lr: float = flag(6.25e-5, "learning rate", above=0)
    optimizer: str = flag("Adam", "Adam without weight decay, or AdamW", choices=tuple(_WEIGHT_DECAY))
    n_epochs: int = flag(1, "passes over the data", at_least=1)
    warmup_steps: int = flag(0, "steps of the learning rate's rise from 0", at_least=0)
    log_interval: int = flag(100, "steps between two lines, and two scalars", at_least=1)
    ckpt_interval: int = flag(1000, "steps between checkpoints", at_least=1)
    valid_interval: int = flag(1000, "steps between validations", at_least=1)
    gradient_checkpoint: bool = flag(False, "recompute activations in the backward pass")
    bfloat16: bool = flag(False, "train in bfloat16")
    gradient_accumulation_steps: int | None = flag(
        None, "forward passes over all replicas that make one step; one per replica if unset", at_least=1
    )
    attention_opt: bool = flag(False, "fused attention (scaled_dot_product_attention)")

    @property
    def samples_per_step(self) -> int:
        """Samples of a step of one replica."""
        return self.batch_size * (self.gradient_accumulation_steps or 1)

    def trainer_arguments(self) -> list[str]:
        """The trainer's flags of optimizer, schedule and intervals."""
        pairs: dict[str, Any] = {
            "--num-workers": self.n_workers,
            "--micro-batch-size": self.batch_size,
            "--global-batch-size": self.samples_per_step if self.gradient_accumulation_steps else None,
            "--lr": self.lr,
            "--lr-decay-style": "constant",
            "--lr-warmup-samples": self.warmup_steps * self.samples_per_step or None,
            "--weight-decay": _WEIGHT_DECAY[self.optimizer],
            "--clip-grad": 0.0,
            "--log-interval": self.log_interval,
            "--tensorboard-log-interval": self.log_interval,
            "--save-interval": self.ckpt_interval,
            "--eval-interval": self.valid_interval,
            "--eval-iters": _EVALUATION_BATCHES,
        }
        switches = {
            "--checkpoint-activations": self.gradient_checkpoint,
            "--bf16": self.bfloat16,
            "--no-fused-attention": not self.attention_opt,
        }
        return [*arguments_of(pairs), *(name for name, is_on in switches.items() if is_on)]


@dataclass(frozen=True)
class AllInOneFile:
    """A configuration file that was read and checked."""

    dataset: str
    model: AllInOneModel
    trainer: AllInOneTrainer

    @property
    def text_folder(self) -> Path | None:
        """The folder of tokenizer and token files for a text dataset; None for others."""
        source = self.trainer.dataset or ""
        if self.dataset == DEV or not (source.startswith(_HUB) or source.endswith(_TEXTS) or Path(source).is_dir()):
            return None
        return Path(self.trainer.log_path, ".full-" + re.sub(r"[^\w.-]+", "-", source).strip("-."))

    def data_arguments(self) -> list[str]:
        """The trainer's flags of data and tokenizer."""
        shipped = _from_here(_EXAMPLE / "data")
        if self.text_folder is not None:
            source, learnt = str(self.text_folder / "train_text_document"), self.text_folder / "tokenizer.json"
        else:
            source = str(shipped / "dev_text_document") if self.dataset == DEV else self.trainer.dataset or ""
            learnt = shipped
        if self.trainer.valid_dataset is None:
            arguments = ["--data-path", source, "--split", _HELD_OUT]
        else:
            arguments = ["--train-data-path", source, "--valid-data-path", self.trainer.valid_dataset]
        folder = Path(self.trainer.tokenizer or learnt)
        if folder == learnt != shipped or folder.is_file() or (folder / "tokenizer.json").is_file():
            return [*arguments, "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)]
        return [*arguments, "--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]


@dataclass(frozen=True)
class AllInOneFlags(ProgramFlags):
    """Flags of `train.py`."""

    config: str = flag("cpu.json", "JSON file with dataset, model and trainer; a name is looked up in the example's "
                       "configs as well", path=PathUse.SMALL_FILE)  # fmt: skip
    resume: str | None = flag(
        None, "folder of a run to continue from its newest checkpoint; --config is not read", path=PathUse.FOLDER
    )

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line.

        Raises:
            ConfigError: the file, or the run, cannot be used.
        """
        style = ["--log-style", "all_in_one"]
        if self.resume is not None:
            return [*_resumed_arguments(Path(self.resume)), *style]
        file = read_all_in_one(self.path)
        run = f"{file.trainer.log_path}/{RUN}"
        saved = f"{file.trainer.ckpt_path}/{RUN}/ckpt"
        folders = ["--run-dir", run, "--tensorboard-dir", f"{run}/tb", "--save", saved]
        folders += ["--data-cache-path", f"{file.trainer.log_path}/.index-cache"]
        length = ["--epochs", str(file.trainer.n_epochs)]
        return [
            *file.model.trainer_arguments(),
            *file.trainer.trainer_arguments(),
            *file.data_arguments(),
            *folders,
            *style,
            *length,
        ]

    @property
    def path(self) -> Path:
        """The configuration file: as given, or of that name in the example's `configs`.

        Raises:
            ConfigError: it is in neither place.
        """
        given, shipped = Path(self.config), _EXAMPLE / "configs"
        if given.exists() or given.is_absolute():
            return given
        if not (shipped / given).exists():
            names = ", ".join(sorted(path.name for path in shipped.glob("*.json")))
            raise ConfigError(f"--config {given} is neither in this folder nor in {shipped}, which has {names}.")
        return shipped / given

    def text(self) -> AllInOneFile | None:
        """The file, if its dataset is text that must first become token files."""
        file = None if self.resume is not None else read_all_in_one(self.path)
        return file if file is not None and file.text_folder is not None else None

    def requested_device(self) -> str:
        """The device in the file: auto, cpu or cuda."""
        return "auto" if self.resume is not None else read_all_in_one(self.path).trainer.device


def command_line(flags: ProgramFlags, others: Sequence[str]) -> list[str]:
    """The arguments of a program's flags, then the trainer's, which take precedence; its length replaces --epochs."""
    arguments = flags.trainer_arguments()
    if _LENGTHS.intersection(argument.partition("=")[0] for argument in others) and "--epochs" in arguments:
        index = arguments.index("--epochs")
        arguments = arguments[:index] + arguments[index + 2 :]
    return [*arguments, *others]


def read_all_in_one(path: Path) -> AllInOneFile:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: with all problems, each with file, key and allowed values.
    """
    tree = read_json(str(path), f"--config {path}")
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds {shown_value(tree)}. It must hold an object with {_listed(_FILE_KEYS)}.")
    problems = [_unknown(key, "", _FILE_KEYS) for key in tree if key not in _FILE_KEYS]
    dataset = tree.get("dataset")
    if dataset not in _DATASETS:
        problems.append(f'"dataset" must be {" or ".join(_DATASETS)}, not {shown_value(dataset)}.')
    model, of_model = _read_section(AllInOneModel, "model", tree.get("model", {}))
    trainer, of_trainer = _read_section(AllInOneTrainer, "trainer", tree.get("trainer", {}))
    problems += [*of_model, *of_trainer]
    if dataset == FULL and trainer.dataset is None:
        description = next(entry.facts.help for entry in flags_of(AllInOneTrainer) if entry.field == "dataset")
        problems.append(f'"dataset" full needs "trainer.dataset", {description}.')
    if dataset == DEV and trainer.dataset is not None:
        problems.append(f'"trainer.dataset" {trainer.dataset} is for "dataset" full, not dev. Drop one of them.')
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return AllInOneFile(str(dataset), model, trainer)


def _read_section(cls: type[Section], name: str, entries: Any) -> tuple[Section, list[str]]:
    """Reads one section; returns it with its problems."""
    if not isinstance(entries, Mapping):
        return build_unchecked(cls, {}), [f'"{name}" must be an object, not {shown_value(entries)}.']
    flags = {entry.field: entry for entry in flags_of(cls)}
    problems = [_unknown(key, name, tuple(flags)) for key in entries if key not in flags]
    values: dict[str, Any] = {}
    for key, flag_of_key in flags.items():
        if entries.get(key) is not None:
            try:
                values[key] = _value(flag_of_key, entries[key])
            except ConfigError as failure:
                problems.append(f'"{name}.{key}" {failure}.')
    section = build_unchecked(cls, values)
    wrong = [key for key, _ in bound_problems(section) if key in values]
    problems += [f'"{name}.{key}" {_bounds_text(flags[key], values[key])}' for key in wrong]
    unusable = [f'"{name}.{key}"' for key in (*wrong, *entries) if key in wrong or key not in values]
    rules = section.all_problems()
    return section, problems + [rule for rule in rules if not any(key in rule for key in unusable)]


def _value(flag_of_key: Flag, value: Any) -> Any:
    """Converts an entry to the type of its field; quoted numbers are rejected."""
    if flag_of_key.element is not str and isinstance(value, str):
        names = {bool: "true or false", int: "an integer", float: "a number"}
        raise ConfigError(f"must be {names[flag_of_key.element]}, not {shown_value(value)}")
    return value_from_file(flag_of_key, value)


def _bounds_text(flag_of_key: Flag, value: Any) -> str:
    """The message for a value that is out of bounds."""
    facts = flag_of_key.facts
    if facts.choices:
        return f"must be one of {_listed(facts.choices)}, not {shown_value(value)}."
    bounds = {"at least": facts.at_least, "more than": facts.above, "at most": facts.at_most, "less than": facts.below}
    allowed = " and ".join(f"{relation} {bound}" for relation, bound in bounds.items() if bound is not None)
    return f"must be {allowed}, not {shown_value(value)}."


def _unknown(key: str, section: str, known: Sequence[str]) -> str:
    shown = f"{section}.{key}" if section else key
    others = {AllInOneModel: "model", AllInOneTrainer: "trainer"}
    homes = [name for cls, name in others.items() if key in {entry.field for entry in flags_of(cls)}]
    guess = nearest(key.replace("_", "-"), [name.replace("_", "-") for name in known])
    hint = f'Did you mean "{guess.replace("-", "_")}"? ' if guess else ""
    if homes:
        hint = f'It belongs to "{homes[0]}". '
    return f'the key "{shown}" is unknown. {hint}Known are {_listed(known)}.'


def _resumed_arguments(run: Path) -> list[str]:
    """The flags that continue a run in its folder, even if it was moved."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"--resume {run} is not the folder of a run: it holds no config.json.")
    if not (run / "ckpt").is_dir():
        raise ConfigError(
            f"--resume {run} is not a run of train.py: it holds no ckpt. Continue it with its own program."
        )
    saved = str(run / "ckpt")
    return [
        *("--config", str(run / "config.json"), "--run-dir", str(run), "--tensorboard-dir", str(run / "tb")),
        *("--save", saved, "--load", saved),
    ]


def _from_here(path: Path) -> Path:
    """A path below the current folder without that folder, so that a run that moves with it finds its data."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names))


def checkpoints_of(model: str, runs: Path = Path("logs")) -> Path:
    """The folder of checkpoints that `--model` names: a path, the folder of a run, or the name of a run in `logs`.

    Raises:
        ConfigError: no such folder or run exists.
    """
    for folder in (Path(model), runs / model):
        if (folder / "ckpt").is_dir():
            return folder / "ckpt"
        if folder.is_dir():
            return folder
    known = sorted(path.parent.name for path in runs.glob("*/ckpt")) if runs.is_dir() else []
    raise ConfigError(
        f"--model {model} is neither a folder nor the name of a run in {runs} ({_listed(known) or 'empty'}). "
        "A model of the Hugging Face hub is downloaded and imported first: python tools/convert/import_hf.py FOLDER "
        "--save checkpoints/NAME."
    )


def _line_style() -> LineStyle:
    from examples.gpt2_all_in import log_style

    return log_style


PROGRAM = Program(log_styles={"all_in_one": _line_style})
