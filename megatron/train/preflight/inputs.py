"""Checks of optional packages, data, tokenizer, checkpoints and folders."""

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
    """Missing packages that flags require.

    Args:
        wrong: fields of the request without a valid value.
    """
    for flag, package in _needed(request, wrong):
        if not is_installed(package):
            yield ConfigError(
                f"{flag} requires the package {package}, which is not installed. Install it with: pip install {package}"
            )


def is_installed(package: str) -> bool:
    """True if a package can be imported and is not blocked in `sys.modules`."""
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
    """Problems with the files and stores of the data flags.

    Args:
        wrong: fields of the request without a valid value.
    """
    data = request.data
    if "objective" in wrong:
        return []
    try:
        prefixes = data_prefixes(data)
    except ConfigError:  # an invalid blend, already refused
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
    """Problems with the files of the tokenizer flags; missing flags are reported elsewhere.

    Args:
        wrong: fields of the request without a valid value.
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
            f"the tokenizer {failure.filename} cannot be read: {failure.strerror}. Use one that this user can read."
        )
        return
    for path, what, prefix in files:
        try:
            check_tokenizer_file(path, what, prefix)
        except MegatronError as failure:
            yield failure


def _files(data: DataConfig) -> Iterator[tuple[str | Path, str, bytes]]:
    """(path, description, expected first bytes) of each file.

    Raises:
        ConfigError: a Hugging Face tokenizer is neither local nor can it be downloaded.
    """
    kind, named = data.tokenizer_type, data.tokenizer_name_or_path
    if kind == "GPT2BPETokenizer":
        files = [(data.vocab_file, "--vocab-file", b"{"), (data.merge_file, "--merge-file", b"")]
    elif kind in WORDPIECE_TOKENIZERS:
        files = [(data.vocab_file, "--vocab-file", b"")]
    elif kind in SENTENCEPIECE_TOKENIZERS:
        files = [(named or data.vocab_file, "--tokenizer-model", b"")]
    else:
        files = []
        named = None if kind == NULL_TOKENIZER else named
        source = named or (data.vocab_file if kind == "HFTokenizer" else None)
        local = None if source is None else local_files(source)
        if local is not None and "tokenizer.json" in local:
            yield local["tokenizer.json"], "tokenizer.json", b"{"
        elif source is not None and local is None and not is_installed("huggingface_hub"):
            raise ConfigError(
                f"--tokenizer-name-or-path {source} is not a local folder, and the package huggingface_hub, which can "
                "download it, is not installed. Run pip install huggingface_hub, or use a local folder."
            )
    for path, what, prefix in files:
        if path is not None:
            yield path, what, prefix


def file_failures(request: RunRequest) -> Iterator[MegatronError]:
    """Missing files of flags. Only rank 0 checks checkpoints, since other nodes may not see them."""
    tasks = request.evaluation.eval_tasks
    if tasks is not None and not os.path.isfile(tasks):
        yield ConfigError(f"--eval-tasks {tasks} is not a file. Use a YAML or JSON file of tasks.")
    if not log.is_first_rank():
        return
    if request.saving.save_secondary is None:
        yield from _load_failures(request.loading, is_evaluation=request.evaluation.eval_only)
    options = request.distillation
    is_needed = options.is_on and options.kd_iters is None and not request.evaluation.eval_only  # may be over
    if is_needed and options.load_teacher is not None:
        reason = f"{'--kd' if options.kd else '--mos'} needs its weights"
        yield from _folder_failures("--load-teacher", options.load_teacher, reason, "the teacher's run")


def _load_failures(loading: LoadingConfig, *, is_evaluation: bool) -> Iterator[MegatronError]:
    """Reports a missing checkpoint if the run requires one."""
    needed = {
        f"--ckpt-step {loading.load_step} selects one of its steps": loading.load_step is not None,
        "--eval-only needs its weights": is_evaluation,
        "--finetune needs its weights": loading.finetune,
        "--exit-on-missing-checkpoint is set": loading.exit_on_missing_checkpoint,
    }
    reason = next((name for name, is_given in needed.items() if is_given), None)
    if loading.load is None or is_address(loading.load) or reason is None or loading.from_scratch:
        return
    yield from _folder_failures("--load", loading.load, reason, "an earlier run")


def _folder_failures(name: str, folder: str, reason: str, owner: str) -> Iterator[CheckpointError]:
    """Reports a folder that certainly contains no checkpoint.

    Args:
        name: the flag of the folder.
        reason: why it must contain one.
        owner: the run that the checkpoints belong to.
    """
    try:
        problem = "it is empty" if not os.listdir(folder) else ""
    except FileNotFoundError:
        existing = next(parent for parent in Path(folder).absolute().parents if os.path.isdir(parent))
        problem = f"it does not exist (the nearest existing folder is {existing})"
    except OSError as failure:
        problem = f"it cannot be listed ({failure.strerror})"
    if problem:
        yield CheckpointError(
            f"{name} {folder} has no checkpoint, but {reason}: {problem}. Use the checkpoint folder of {owner}."
        )


def place_failures(request: RunRequest) -> Iterator[StorageError]:
    """Output folders and files that cannot be written. Only rank 0 checks, since it creates the folders."""
    if not log.is_first_rank():
        return
    report = request.report
    folders = {
        "--save": request.saving.save,
        "--run-dir": report.run_dir or "runs",
        "--tensorboard-dir": report.tensorboard_dir,
        "--log-path": report.log_path,
    }
    for flag, folder in folders.items():
        reason = None if folder is None else unwritable_reason(Path(folder))
        if reason:
            shown = folder if flag != "--run-dir" or report.run_dir else f"{folder} (the default)"
            yield StorageError(f"{flag} {shown} cannot be written: {reason}. Use another folder.")
    if report.metrics_file is not None:
        reason = unwritable_reason(Path(report.metrics_file).parent)
        if not reason and os.path.isdir(report.metrics_file):
            reason = "it is a folder"
        if reason:
            yield StorageError(f"--metrics-file {report.metrics_file} cannot be written: {reason}. Use another file.")


def unwritable_reason(folder: Path) -> str:
    """The reason why a folder cannot be created or written; empty if it may be possible.

    With `{run}` in a path, only the part before it is checked.
    """
    parts = folder.absolute().parts
    count = next((index for index, part in enumerate(parts) if "{" in part), len(parts))
    path = Path(*parts[:count])
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder" if os.path.exists(nearest) else f"{nearest} is a dangling link"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write in {nearest}"
    return ""
