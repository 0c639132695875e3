"""How checkpoints are written, which of them are kept, and where copies go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection
from megatron.config.sections.control import folder_problems

_LINK = re.compile(r"(?![.-]|iter_)(?=.*\{step\})(?:[\w.-]|\{epoch\}|\{step\})+", re.ASCII)


@dataclass(frozen=True)
class SavingConfig(ConfigSection):
    """Background writing, retention, and the second copy."""

    async_save: bool = flag(
        True, "write checkpoints in the background while training continues; needs host memory for a copy of the state"
    )
    keep_last: int | None = flag(None, "checkpoints to keep; older ones are deleted after each save", at_least=1)
    keep_every: int | None = flag(
        None, "with --keep-last: checkpoints whose step is a multiple of this are never deleted", at_least=1
    )
    keep_best: bool = flag(False, "with --keep-last: the checkpoint with the lowest validation loss is not deleted")
    save_secondary: str | None = flag(
        None, "folder that receives a verified copy of each checkpoint, and is loaded from if --load has none"
    )

    checkpoint_link: str | None = flag(
        None,
        "second name of each checkpoint, a link beside it, with {epoch} (from 0) and {step}, such as "
        "'epoch{epoch}-step{step}'",
    )

    def link_name(self, epoch: int, step: int) -> str | None:
        """The second name of a checkpoint; None if it is to have none."""
        return None if self.checkpoint_link is None else self.checkpoint_link.format(epoch=epoch, step=step)

    def problems(self) -> Iterator[str]:
        if self.checkpoint_link is not None and _LINK.fullmatch(self.checkpoint_link) is None:
            yield (
                f"--checkpoint-link {self.checkpoint_link} cannot be the name of every checkpoint. Write letters, "
                "digits and -_. around {step}, with {epoch} if wanted, such as 'epoch{epoch}-step{step}'."
            )
        yield from folder_problems("--save-secondary", self.save_secondary)
        if self.keep_last is None:
            for name, is_set in (("--keep-every", self.keep_every is not None), ("--keep-best", self.keep_best)):
                if is_set:
                    yield (
                        f"{name} says which checkpoints are not deleted, and nothing is deleted without --keep-last. "
                        f"Give --keep-last, for example --keep-last 3, or drop {name}."
                    )
