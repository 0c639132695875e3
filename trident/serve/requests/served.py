"""The model that a server offers, as far as reading requests and writing answers need it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError, DataError
from megatron.inference.loaded_model import LoadedModel
from megatron.tokenizers.chat import ChatTemplate, Message, load_chat_template, tokenizer_folder
from megatron.tokenizers.chat.named import PLAIN
from megatron.tokenizers.prompts import encode_prompt
from megatron.tokenizers.tokenizer import Tokenizer
from trident.serve.requests.refusals import invalid


@dataclass(frozen=True)
class Served:
    """A model under the name by which clients ask for it.

    Args:
        template: how a conversation becomes a prompt.
        is_chat: whether the model was trained on, or its tokenizer comes with, that template.
        positions: tokens of prompt and answer together.
        vocab_size: tokens that may be generated.
        eod_id: ends an answer; None if the tokenizer has no such token.
        created_at: seconds since 1970.
        fingerprint: changes with the checkpoint.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    is_chat: bool
    positions: int
    vocab_size: int
    eod_id: int | None
    created_at: int
    fingerprint: str

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset() if self.eod_id is None else frozenset([self.eod_id])

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        """The tokens that end every answer in a conversation."""
        return self.stop_ids | (self.template.stop_ids(self.tokenizer) if self.eod_id is not None else frozenset())

    def prompt_of_text(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, see `encode_prompt`.

        Raises:
            Refusal: the text is empty and there is no token that documents begin after.
        """
        tokens = encode_prompt(self.tokenizer, text)
        if not tokens:
            raise invalid("The prompt is empty, and this model has no token to begin with. Give a text.", "prompt")
        return tuple(tokens)

    def prompt_of_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the answer begins.

        Raises:
            Refusal: the template has no place for such a conversation.
        """
        try:
            return tuple(self.template.prompt_ids(messages, self.tokenizer))
        except (ConfigError, DataError) as failure:
            raise invalid(str(failure), "messages") from failure

    def token_text(self, token: int) -> str:
        """The text of one token; a part of a character is written as OpenAI does, `bytes:\\xe2\\x80`.

        Where the tokenizer does not give the bytes, it shows as U+FFFD.
        """
        text = self.tokenizer.decode([token])
        token_bytes = self.token_bytes(token)
        if token_bytes is None or token_bytes == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes of one token; None where the tokenizer does not give them."""
        return self.tokenizer.token_bytes(token)

    def new_tokens(self, prompt_tokens: int, asked: int | None, most: int | None) -> int:
        """How many tokens an answer may have.

        Args:
            asked: by the client; None asks for as many as there is room for.
            most: that the server allows.

        Raises:
            Refusal: the prompt leaves no room for what was asked, or the server does not allow it.
        """
        room = self.positions - prompt_tokens
        if room < (1 if asked is None else asked):
            wanted = "" if asked is None else f" and {asked} were requested"
            raise invalid(
                f"The prompt has {prompt_tokens} tokens{wanted}, but this model has {self.positions} positions for "
                "both together. Shorten the prompt" + (" or ask for fewer tokens." if asked else "."),
                "messages" if asked is None else "max_tokens",
                "context_length_exceeded",
            )
        if asked is not None and most is not None and asked > most:
            raise invalid(f"{asked} tokens were requested, and this server generates at most {most}.", "max_tokens")
        return min(room, room if asked is None else asked, room if most is None else most)


def served_model(loaded: LoadedModel, name: str | None = None, chat_template: str | None = None) -> Served:
    """Describes a loaded checkpoint.

    Args:
        name: by which clients ask for it; by default the name of the folder of checkpoints.
        chat_template: see `load_chat_template`; by default the one that the checkpoint was fine-tuned with, else the
            tokenizer's, else plain.

    Raises:
        ConfigError: there is no such template, or the tokenizer lacks its special tokens.
    """
    data = loaded.config.data
    template = load_chat_template(chat_template or loaded.config.finetuning.chat_template, tokenizer_folder(data))
    template.check_tokenizer(loaded.tokenizer)
    identity = f"{loaded.path.resolve()} {loaded.step} {loaded.tokenizer.fingerprint} {template.fingerprint}"
    return Served(
        name=name or model_name(loaded.path),
        tokenizer=loaded.tokenizer,
        template=template,
        is_chat=template.name != PLAIN or bool(chat_template or loaded.config.finetuning.chat_template),
        positions=loaded.positions,
        vocab_size=loaded.vocab_size,
        eod_id=loaded.eod_id,
        created_at=int(loaded.path.stat().st_mtime),
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
    )


def model_name(checkpoint: Path) -> str:
    """The name of the folder in which a run saved its checkpoints, or of what was trained if that says nothing.

    `train_on_text.py my_text.txt` saves in my_text-training/checkpoints: the model is called my_text.
    """
    folder = checkpoint.resolve().parent
    if folder.name == "checkpoints" and folder.parent.name:
        return folder.parent.name.removesuffix("-training")
    return folder.name or "model"
