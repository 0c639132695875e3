"""Which checkpoint a run starts from, when it writes its own and how, which of them are kept, and where copies go."""

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

    load: str | None = flag(None, "folder to resume from, or an address such as s3://bucket/run", path=PathUse.FOLDER)
    ckpt_step: int | None = flag(None, "step of the checkpoint in --load; the newest if unset", at_least=0)
    load_tag: str | None = flag(None, "the same as a name, such as iter_0000500 or global_step500")
    no_load_optim: bool = flag(False, "take the weights of a checkpoint but not its optimizer state")
    finetune: bool = flag(False, "take only the weights of a checkpoint and start at step 0")
    reset_iteration: bool = flag(
        False, "as --finetune, but with the optimizer state of the checkpoint", spelled=("--reset-progress",)
    )
    from_scratch: bool = flag(
        False, "start at step 0 although --load or --save holds checkpoints; given again, it continues what it began"
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop with an error if --load holds no checkpoint")

    @property
    def takes_optimizer_state(self) -> bool:
        """Whether the moments of the checkpoint in --load are taken over with its weights."""
        return not self.no_load_optim and (self.reset_iteration or not self.finetune)

    @property
    def load_step(self) -> int | None:
        """The step of the checkpoint that is asked for; None for the newest."""
        named = None if self.load_tag is None else _TAG.fullmatch(self.load_tag)
        return self.ckpt_step if named is None else int(named.group(1))

    def complete(self) -> None:
        if self.reset_iteration:
            self.set_derived("finetune", True)

    def problems(self) -> Iterator[str]:
        if self.load_tag is not None and _TAG.fullmatch(self.load_tag) is None:
            yield f"--load-tag {self.load_tag} names no step. Write it like iter_0000500, or use --ckpt-step 500."


_LINK = re.compile(r"(?![.-]|iter_)(?=.*\{step\})(?:[\w.-]|\{epoch\}|\{step\})+", re.ASCII)


@dataclass(frozen=True)
class SavingConfig(ConfigSection):
    """Folder and interval, background writing, retention, and the second copy."""

    save: str | None = flag(None, "folder checkpoints are written to", path=PathUse.FOLDER)
    save_interval: int | None = flag(
        None, "steps between checkpoints; only where the run ends or is stopped if 0 or unset", at_least=0
    )
    save_each_epoch: bool = flag(False, "also save at the end of each pass of --epochs")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    async_save: bool = flag(
        True, "write checkpoints in the background while training continues; needs host memory for a copy of the state"
    )
    keep_last: int | None = flag(None, "checkpoints to keep; older ones are deleted after each save", at_least=1)
    keep_every: int | None = flag(
        None, "with --keep-last: checkpoints whose step is a multiple of this are never deleted", at_least=1
    )
    keep_best: bool = flag(False, "with --keep-last: the checkpoint with the lowest validation loss is not deleted")
    save_secondary: str | None = flag(
        None,
        "folder, or address such as s3://bucket/run, that receives a verified copy of each checkpoint, and is loaded "
        "from if --load has none",
        path=PathUse.FOLDER,
    )
    save_secondary_per_node: bool = flag(
        False,
        "--save-secondary is a folder on a disk of each node's own: a node gets the files of its ranks and of one "
        "other node, and a resume puts together what is left",
    )

    max_failed_saves: int = flag(
        3, "consecutive saves that the file system may refuse before the run ends with code 74", at_least=1
    )
    exit_on_failed_save: bool = flag(False, "end the run with code 74 at the first save that the file system refuses")

    checkpoint_link: str | None = flag(
        None,
        "second name of each checkpoint, a link next to it, with {epoch} (from 0) and {step}, such as "
        "'epoch{epoch}-step{step}'",
    )

    @property
    def tolerated_failures(self) -> int:
        """How many saves in a row may fail without an end of the run."""
        return 0 if self.exit_on_failed_save else self.max_failed_saves - 1

    def link_name(self, epoch: int, step: int) -> str | None:
        """The second name of a checkpoint; None if it is to have none."""
        return None if self.checkpoint_link is None else self.checkpoint_link.format(epoch=epoch, step=step)

    def problems(self) -> Iterator[str]:
        yield from address_problems("--save", self.save)
        if self.checkpoint_link is not None and _LINK.fullmatch(self.checkpoint_link) is None:
            yield (
                f"--checkpoint-link {self.checkpoint_link} cannot be the name of every checkpoint. Write letters, "
                "digits and -_. around {step}, with {epoch} if wanted, such as 'epoch{epoch}-step{step}'."
            )
