"""The served model, as far as reading requests and writing answers need it."""

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
class ServedModel:
    """A model under the name that clients use.

    Args:
        template: renders a conversation as a prompt.
        is_chat: True if the model was trained on the template, or its tokenizer comes with it.
        positions: most tokens of prompt and answer together.
        vocab_size: number of tokens that may be generated.
        eod_id: the token that ends an answer; None if the tokenizer has none.
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
            Refusal: the text is empty, and the tokenizer has no token that starts a document.
        """
        tokens = encode_prompt(self.tokenizer, text)
        if not tokens:
            raise invalid("The prompt is empty, and this model has no token to begin with. Give a text.", "prompt")
        return tuple(tokens)

    def prompt_of_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the answer begins.

        Raises:
            Refusal: the template cannot express the conversation.
        """
        try:
            return tuple(self.template.prompt_ids(messages, self.tokenizer))
        except (ConfigError, DataError) as failure:
            raise invalid(str(failure), "messages") from failure

    def token_text(self, token: int) -> str:
        """The text of one token; an incomplete character is written in OpenAI's notation, `bytes:\\xe2\\x80`.

        If the tokenizer does not give the bytes, it is shown as U+FFFD.
        """
        text = self.tokenizer.decode([token])
        token_bytes = self.token_bytes(token)
        if token_bytes is None or token_bytes == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes of one token; None if the tokenizer does not give them."""
        return self.tokenizer.token_bytes(token)

    def new_tokens(self, prompt_tokens: int, requested: int | None, limit: int | None) -> int:
        """The most tokens of an answer.

        Args:
            requested: number requested by the client; None for as many as fit.
            limit: the server's limit.

        Raises:
            Refusal: the prompt leaves too few positions, or the request exceeds the limit.
        """
        room = self.positions - prompt_tokens
        if room < (1 if requested is None else requested):
            answer = "" if requested is None else f" and {requested} were requested"
            raise invalid(
                f"The prompt has {prompt_tokens} tokens{answer}, but this model has {self.positions} positions for "
                "both together. Shorten the prompt" + (" or request fewer tokens." if requested else "."),
                "messages" if requested is None else "max_tokens",
                "context_length_exceeded",
            )
        if requested is not None and limit is not None and requested > limit:
            raise invalid(
                f"{requested} tokens were requested, and this server generates at most {limit}.", "max_tokens"
            )
        return min(number for number in (room, requested, limit) if number is not None)


def build_served_model(loaded: LoadedModel, name: str | None = None, chat_template: str | None = None) -> ServedModel:
    """Describes a loaded checkpoint.

    Args:
        name: the name for clients; by default the checkpoint folder's.
        chat_template: see `load_chat_template`; by default the one that the checkpoint was fine-tuned with, else the
            tokenizer's, else plain.

    Raises:
        ConfigError: an unknown template, or special tokens that the tokenizer lacks.
    """
    data = loaded.config.data
    template = load_chat_template(chat_template or loaded.config.finetuning.chat_template, tokenizer_folder(data))
    template.check_tokenizer(loaded.tokenizer)
    identity = f"{loaded.path.resolve()} {loaded.step} {loaded.tokenizer.fingerprint} {template.fingerprint}"
    return ServedModel(
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
    """The name of the checkpoint folder; if that is `checkpoints`, of the run's folder without `-training`.

    `train_on_text.py my_text.txt` saves in my_text-training/checkpoints: the model is called my_text.
    """
    folder = checkpoint.resolve().parent
    if folder.name == "checkpoints" and folder.parent.name:
        return folder.parent.name.removesuffix("-training")
    return folder.name or "model"
