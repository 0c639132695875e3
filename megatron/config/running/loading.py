"""Which checkpoint a run starts from, and what is taken from it."""

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

    load: str | None = flag(None, "folder to resume from", path=PathUse.FOLDER)
    ckpt_step: int | None = flag(None, "step of the checkpoint in --load; the newest if unset", at_least=0)
    load_tag: str | None = flag(None, "the same as a name, such as iter_0000500 or global_step500")
    no_load_optim: bool = flag(False, "take the weights of a checkpoint but not its optimizer state")
    finetune: bool = flag(False, "take only the weights of a checkpoint and start at step 0")
    reset_iteration: bool = flag(False, "as --finetune, but with the optimizer state of the checkpoint")
    from_scratch: bool = flag(False, "start at step 0 although --load or --save holds checkpoints")
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
        elif self.load_tag is not None and self.ckpt_step not in (None, self.load_step):
            yield f"--load-tag {self.load_tag} and --ckpt-step {self.ckpt_step} name two steps. Drop one of them."
        if self.load_step is not None and self.load is None:
            yield f"--ckpt-step {self.load_step} needs --load, the folder that holds that checkpoint."
        yield from address_problems("--load", self.load)
        if self.from_scratch and self.finetune:
            yield "--from-scratch and --finetune contradict each other: the first loads nothing. Drop one of them."
        if self.exit_on_missing_checkpoint and self.load is None:
            yield "--exit-on-missing-checkpoint needs --load, the folder that must hold a checkpoint."
