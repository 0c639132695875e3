"""Optional packages that a flag needs, looked for without importing them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator

from megatron.config.run import RunRequest
from megatron.config.sections.data import SENTENCEPIECE_TOKENIZERS
from megatron.errors import ConfigError


def package_failures(request: RunRequest, wrong: Collection[str]) -> Iterator[ConfigError]:
    """What flags ask for and the environment lacks.

    Args:
        wrong: fields of the request that hold no usable value.
    """
    for flag, package in _needed(request, wrong):
        if not is_installed(package):
            yield ConfigError(
                f"{flag} needs the package {package}, which is not installed. Install it with: pip install {package}"
            )


def is_installed(package: str) -> bool:
    """Whether a package could be imported; one that was found broken, and so blocked, could not."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _needed(request: RunRequest, wrong: Collection[str]) -> Iterator[tuple[str, str]]:
    """(flag with its value, package)."""
    report, data = request.report, request.data
    if report.tensorboard_dir:
        yield f"--tensorboard-dir {report.tensorboard_dir}", "tensorboard"
    if request.optim.use_bnb_optimizer:
        yield "--use-bnb-optimizer", "bitsandbytes"
    if report.wandb_project:
        yield f"--wandb-project {report.wandb_project}", "wandb"
    if "tokenizer_type" not in wrong:
        package = "sentencepiece" if data.tokenizer_type in SENTENCEPIECE_TOKENIZERS else "tokenizers"
        yield f"--tokenizer-type {data.tokenizer_type}", package
