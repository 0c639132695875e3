"""What a server and a conversation in the terminal need of a loaded checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron.inference.loading import LoadedModel
from megatron.inference.serve.requests.served import Served
from megatron.tokenizers.chat import load_chat_template, tokenizer_folder
from megatron.tokenizers.chat.named import PLAIN


def served_model(loaded: LoadedModel, name: str | None = None, chat_template: str | None = None) -> Served:
    """Describes a loaded checkpoint.

    Args:
        name: by which clients ask for it; by default that of the folder of checkpoints.
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
    """The name of the folder in which a run saved its checkpoints."""
    return checkpoint.resolve().parent.name or "model"
