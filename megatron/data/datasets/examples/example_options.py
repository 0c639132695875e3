"""Options for turning examples into rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.config.objective.finetuning import FinetuningConfig
from megatron.config.objective.loss import CAUSAL, LossConfig
from megatron.config.sections.curriculum import CurriculumFields
from megatron.tokenizers.chat import ChatTemplate, load_chat_template, tokenizer_folder
from megatron.tokenizers.tokenizer import TokenizerFlags


@dataclass(frozen=True)
class ExampleOptions:
    """The fine-tuning flags that concern examples.

    Args:
        chat_template: `--chat-template`.
        pack: several examples in a row (`--pack-examples`).
        on_targets_only: no loss on prompts (`--loss-on-targets-only`).
        copy_prompt_probability: share of the training samples whose answers are replaced by their prompts.
        needed_by: a given flag that requires examples; empty if none.
        excluded_by: a given flag that cannot be combined with examples; empty if none.
        flags: the flags that select the tokenizer, whose folder may hold a template.
    """

    chat_template: str | None = None
    pack: bool = False
    on_targets_only: bool = False
    copy_prompt_probability: float = 0.0
    needed_by: str = ""
    excluded_by: str = ""
    flags: TokenizerFlags | None = None

    @staticmethod
    def of(
        finetuning: FinetuningConfig, loss: LossConfig, flags: TokenizerFlags, curriculum: CurriculumFields
    ) -> ExampleOptions:
        """Returns the options set by flags; only the causal objective trains on examples."""
        pack = finetuning.pack_examples and loss.objective == CAUSAL
        on_targets_only = loss.loss_on_targets_only and loss.objective == CAUSAL
        copied = finetuning.copy_prompt_probability
        given = {
            "--pack-examples": pack,
            "--loss-on-targets-only": on_targets_only,
            "--copy-prompt-probability": copied > 0,
        }
        needed_by = next((name for name, is_given in given.items() if is_given), "")
        excluded_by = "--curriculum-learning" if curriculum.curriculum_learning else ""
        return ExampleOptions(finetuning.chat_template, pack, on_targets_only, copied, needed_by, excluded_by, flags)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, loaded on first use, since training without examples needs none.

        Raises:
            ConfigError: the template cannot be used.
        """
        return load_chat_template(self.chat_template, None if self.flags is None else tokenizer_folder(self.flags))
