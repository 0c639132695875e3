"""Checkpoints: the one to start from, when and how they are written, retention, and the secondary copy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse, address_problems
from megatron.config.flags.section import ConfigSection

_TAG = re.compile(r"(?:global_step|iter_)0*(\d+)")


@dataclass(frozen=True)
class LoadingConfig(ConfigSection):
    """The checkpoint to start from."""

    load: str | None = flag(
        None, "checkpoint folder to load from, or an address such as s3://bucket/run", path=PathUse.FOLDER
    )
    ckpt_step: int | None = flag(None, "step of the checkpoint to load; the newest if unset", at_least=0)
    load_tag: str | None = flag(None, "checkpoint to load by name, such as iter_0000500 or global_step500")
    no_load_optim: bool = flag(False, "do not load the optimizer state")
    finetune: bool = flag(False, "load only the weights and start at step 0")
    reset_iteration: bool = flag(
        False, "like --finetune, but load the optimizer state as well", spelled=("--reset-progress",)
    )
    from_scratch: bool = flag(
        False, "start at step 0 although --load or --save holds checkpoints; a restart resumes the run as usual"
    )
    exit_on_missing_checkpoint: bool = flag(False, "exit with an error if --load holds no checkpoint")

    @property
    def takes_optimizer_state(self) -> bool:
        """True if the optimizer state of the checkpoint is loaded with its weights."""
        return not self.no_load_optim and (self.reset_iteration or not self.finetune)

    @property
    def load_step(self) -> int | None:
        """The step of the requested checkpoint; None for the newest."""
        named = None if self.load_tag is None else _TAG.fullmatch(self.load_tag)
        return self.ckpt_step if named is None else int(named.group(1))

    def complete(self) -> None:
        if self.reset_iteration:
            self.set_derived("finetune", True)

    def problems(self) -> Iterator[str]:
        if self.load_tag is not None and _TAG.fullmatch(self.load_tag) is None:
            yield f"--load-tag {self.load_tag} does not contain a step. Expected iter_0000500 or global_step500."


_LINK = re.compile(r"(?![.-]|iter_)(?=.*\{step\})(?:[\w.-]|\{epoch\}|\{step\})+", re.ASCII)


@dataclass(frozen=True)
class SavingConfig(ConfigSection):
    """Folder and interval, asynchronous saving, retention, and the secondary copy."""

    save: str | None = flag(None, "folder to save checkpoints to", path=PathUse.FOLDER)
    save_interval: int | None = flag(
        None,
        "steps between checkpoints; if 0 or unset, one checkpoint at the end or when the run is stopped",
        at_least=0,
    )
    save_each_epoch: bool = flag(False, "also save at the end of each epoch of --epochs")
    no_save_optim: bool = flag(False, "do not save the optimizer state")
    async_save: bool = flag(
        True, "asynchronous saving: write checkpoints in the background, from a copy of the state in host memory"
    )
    keep_last: int | None = flag(
        None, "number of checkpoints to keep; older ones are deleted after each save", at_least=1
    )
    keep_every: int | None = flag(
        None, "with --keep-last: never delete checkpoints whose step is a multiple of this", at_least=1
    )
    keep_best: bool = flag(False, "with --keep-last: never delete the checkpoint with the lowest validation loss")
    save_secondary: str | None = flag(
        None,
        "folder, or address such as s3://bucket/run, for a verified copy of each checkpoint; also the fallback if "
        "--load holds none",
        path=PathUse.FOLDER,
    )
    save_secondary_per_node: bool = flag(
        False,
        "--save-secondary is a node-local folder: each node stores the files of its ranks and of one other node, and a "
        "resume combines the surviving copies",
    )

    max_failed_saves: int = flag(3, "consecutive failed saves after which the run exits with code 74", at_least=1)
    exit_on_failed_save: bool = flag(False, "exit with code 74 at the first failed save")

    checkpoint_link: str | None = flag(
        None,
        "name of a link to each checkpoint, with {epoch} (from 0) and {step}, such as 'epoch{epoch}-step{step}'",
    )

    @property
    def tolerated_failures(self) -> int:
        """Number of consecutive failed saves that do not end the run."""
        return 0 if self.exit_on_failed_save else self.max_failed_saves - 1

    def link_name(self, epoch: int, step: int) -> str | None:
        """The name of the link to a checkpoint; None without --checkpoint-link."""
        return None if self.checkpoint_link is None else self.checkpoint_link.format(epoch=epoch, step=step)

    def problems(self) -> Iterator[str]:
        yield from address_problems("--save", self.save)
        if self.checkpoint_link is not None and _LINK.fullmatch(self.checkpoint_link) is None:
            yield (
                f"--checkpoint-link {self.checkpoint_link} is not a valid link name. Use letters, digits and -_. with "
                "{step} and optionally {epoch}, such as 'epoch{epoch}-step{step}'."
            )
