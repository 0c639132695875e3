"""How examples become rows, as far as the flags decide it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.tokenizers.chat import ChatTemplate, load_chat_template, tokenizer_folder
from megatron.tokenizers.tokenizer import TokenizerFlags


@dataclass(frozen=True)
class ExampleOptions:
    """What the fine-tuning flags say of examples.

    Args:
        chat_template: `--chat-template`.
        pack: several examples in a row (`--pack-examples`).
        on_targets_only: no loss on prompts (`--loss-on-targets-only`).
        flags: those that choose the tokenizer, whose folder may hold a template.
    """

    chat_template: str | None = None
    pack: bool = False
    on_targets_only: bool = False
    flags: TokenizerFlags | None = None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; loaded when it is first needed, since training without examples needs none.

        Raises:
            ConfigError: it cannot be used.
        """
        return load_chat_template(self.chat_template, None if self.flags is None else tokenizer_folder(self.flags))
