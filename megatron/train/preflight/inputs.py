"""What a run imports, reads and writes: optional packages, data, tokenizer, checkpoints, folders."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from megatron import log
from megatron.config.flags.paths import is_address
from megatron.config.run_config import RunRequest
from megatron.config.sections.checkpoints import LoadingConfig
from megatron.config.sections.data import NULL_TOKENIZER, SENTENCEPIECE_TOKENIZERS, WORDPIECE_TOKENIZERS, DataConfig
from megatron.data.build import check_sources, data_prefixes
from megatron.data.datasets.examples.example_files import names_example_files
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.sources.source import SourceUse
from megatron.errors import CheckpointError, ConfigError, DataError, MegatronError, StorageError
from megatron.tokenizers.hugging_face import local_files
from megatron.tokenizers.tokenizer_files import check_tokenizer_file


def package_failures(request: RunRequest, wrong: Collection[str]) -> Iterator[ConfigError]:
    """Packages that flags require and the environment lacks.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    for flag, package in _needed(request, wrong):
        if not is_installed(package):
            yield ConfigError(
                f"{flag} needs the package {package}, which is not installed. Install it with: pip install {package}"
            )


def is_installed(package: str) -> bool:
    """Whether a package could be imported; one that is known to be broken, and so blocked, could not."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _needed(request: RunRequest, wrong: Collection[str]) -> Iterator[tuple[str, str]]:
    report, data = request.report, request.data
    if report.tensorboard_dir:
        yield f"--tensorboard-dir {report.tensorboard_dir}", "tensorboard"
    if request.optim.use_bnb_optimizer:
        yield "--use-bnb-optimizer", "bitsandbytes"
    if report.wandb_project:
        yield f"--wandb-project {report.wandb_project}", "wandb"
    if "tokenizer_type" not in wrong and data.tokenizer_type != NULL_TOKENIZER:
        package = "sentencepiece" if data.tokenizer_type in SENTENCEPIECE_TOKENIZERS else "tokenizers"
        yield f"--tokenizer-type {data.tokenizer_type}", package


def source_failures(request: RunRequest, wrong: Collection[str]) -> list[MegatronError]:
    """What is wrong with the files and stores that the data flags name.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    data = request.data
    if "objective" in wrong:
        return []
    try:
        prefixes = data_prefixes(data)
    except ConfigError:  # a blend that cannot be read; the flags have been refused for it
        return []
    options = ExampleOptions.of(request.finetuning, request.loss, data, request.optim)
    length = None if "seq_length" in wrong else data.seq_length
    failures: list[MegatronError] = []
    try:
        check_sources(data, SourceUse(length, request.loss.objective, options.needed_by, options.excluded_by))
    except MegatronError as failure:
        failures.append(failure)
    if request.finetuning.chat_template is not None and any(map(names_example_files, prefixes)):
        try:
            _ = options.template
        except MegatronError as failure:
            failures.append(failure)
    return failures


def tokenizer_failures(request: RunRequest, wrong: Collection[str]) -> Iterator[MegatronError]:
    """What is wrong with the files that the tokenizer flags name; missing flags are reported elsewhere.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    if "tokenizer_type" in wrong:
        return
    try:
        files = list(_files(request.data))
    except MegatronError as failure:
        yield failure
        return
    except OSError as failure:
        yield DataError(
            f"the tokenizer {failure.filename} cannot be read: {failure.strerror}. Give one that this user can read."
        )
        return
    for path, what, beginning in files:
        try:
            check_tokenizer_file(path, what, beginning)
        except MegatronError as failure:
            yield failure


def _files(data: DataConfig) -> Iterator[tuple[str | Path, str, bytes]]:
    """(path, description, first bytes) of each file.

    Raises:
        ConfigError: a Hugging Face tokenizer is neither here nor can it come from the hub.
    """
    kind, named = data.tokenizer_type, data.tokenizer_name_or_path
    if kind == "GPT2BPETokenizer":
        wanted = [(data.vocab_file, "--vocab-file", b"{"), (data.merge_file, "--merge-file", b"")]
    elif kind in WORDPIECE_TOKENIZERS:
        wanted = [(data.vocab_file, "--vocab-file", b"")]
    elif kind in SENTENCEPIECE_TOKENIZERS:
        wanted = [(named or data.vocab_file, "--tokenizer-model", b"")]
    else:
        wanted = []
        named = None if kind == NULL_TOKENIZER else named
        source = named or (data.vocab_file if kind == "HFTokenizer" else None)
        local = None if source is None else local_files(source)
        if local is not None and "tokenizer.json" in local:
            yield local["tokenizer.json"], "tokenizer.json", b"{"
        elif source is not None and local is None and not is_installed("huggingface_hub"):
            raise ConfigError(
                f"--tokenizer-name-or-path {source} is not a folder here, and the package huggingface_hub, which would "
                "fetch it, is not installed. Install it with: pip install huggingface_hub, or give a local folder."
            )
    for path, what, beginning in wanted:
        if path is not None:
            yield path, what, beginning


def file_failures(request: RunRequest) -> Iterator[MegatronError]:
    """What is missing of the files that flags name.

    Only rank 0 looks for checkpoints, as it does later: other nodes may not see them.
    """
    tasks = request.evaluation.eval_tasks
    if tasks is not None and not os.path.isfile(tasks):
        yield ConfigError(f"--eval-tasks {tasks} is not a file. Give the path of a YAML or JSON file of tasks.")
    if not log.is_first_rank():
        return
    if request.saving.save_secondary is None:
        yield from _load_failures(request.loading, is_evaluation=request.evaluation.eval_only)
    how = request.distillation
    is_needed = how.is_on and how.kd_iters is None and not request.evaluation.eval_only  # it may be over
    if is_needed and how.load_teacher is not None:
        reason = f"{'--kd' if how.kd else '--mos'} needs the weights of one"
        yield from _folder_failures("--load-teacher", how.load_teacher, reason, "the teacher's run")


def _load_failures(loading: LoadingConfig, *, is_evaluation: bool) -> Iterator[MegatronError]:
    """A checkpoint that a run cannot do without; others may be missing."""
    needed = {
        f"--ckpt-step {loading.load_step} is one of its steps": loading.load_step is not None,
        "--eval-only needs the weights of one": is_evaluation,
        "--finetune needs the weights of one": loading.finetune,
        "--exit-on-missing-checkpoint is set": loading.exit_on_missing_checkpoint,
    }
    reason = next((name for name, is_given in needed.items() if is_given), None)
    if loading.load is None or is_address(loading.load) or reason is None or loading.from_scratch:
        return
    yield from _folder_failures("--load", loading.load, reason, "an earlier run")


def _folder_failures(name: str, folder: str, reason: str, owner: str) -> Iterator[CheckpointError]:
    """Why a folder cannot hold a checkpoint, without opening any that it may hold.

    Args:
        name: the flag that gives the folder.
        reason: why it has to hold one.
        owner: whose checkpoints are meant.
    """
    try:
        why = "it is empty" if not os.listdir(folder) else ""
    except FileNotFoundError:
        there = next(parent for parent in Path(folder).absolute().parents if os.path.isdir(parent))
        why = f"it does not exist, the nearest folder that does is {there}"
    except OSError as failure:
        why = f"it cannot be listed ({failure.strerror})"
    if why:
        yield CheckpointError(
            f"{name} {folder} holds no checkpoint and {reason}: {why}. Give the folder of the checkpoints of {owner}."
        )


def place_failures(request: RunRequest) -> Iterator[StorageError]:
    """Which of the files that a run must write cannot be written.

    Only rank 0 checks: the other ranks write into folders that it has made, and some of them nothing at all.
    """
    if not log.is_first_rank():
        return
    report = request.report
    asked = {
        "--save": request.saving.save,
        "--run-dir": report.run_dir or "runs",
        "--tensorboard-dir": report.tensorboard_dir,
        "--log-path": report.log_path,
    }
    for flag, folder in asked.items():
        reason = None if folder is None else why_no_folder(Path(folder))
        if reason:
            shown = folder if flag != "--run-dir" or report.run_dir else f"{folder} (the default)"
            yield StorageError(f"{flag} {shown} cannot be written: {reason}. Give another folder.")
    if report.metrics_file is not None:
        reason = why_no_folder(Path(report.metrics_file).parent)
        if not reason and os.path.isdir(report.metrics_file):
            reason = "it is a folder"
        if reason:
            yield StorageError(f"--metrics-file {report.metrics_file} cannot be written: {reason}. Give another file.")


def why_no_folder(folder: Path) -> str:
    """Why a folder cannot be written to, or be made; empty if it may be possible.

    Of a name that contains `{run}`, only the part before it is checked.
    """
    parts = folder.absolute().parts
    known = next((number for number, part in enumerate(parts) if "{" in part), len(parts))
    path = Path(*parts[:known])
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder" if os.path.exists(nearest) else f"{nearest} is a link to nothing"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write in {nearest}"
    return ""
