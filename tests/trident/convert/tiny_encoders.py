"""Tiny models of the encoder families with random values, and tokenizers of their kinds with all special tokens."""

from __future__ import annotations

import json
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.vocabulary import trained_vocabulary
from tests.trident.convert.tiny_models import TOKENS, randomize

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@dataclass(frozen=True)
class TinyEncoder:
    """A configuration of a family.

    Attributes:
        architecture: the class of `transformers` with the heads.
        fields: what differs from the defaults of its configuration class.
    """

    architecture: str
    fields: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """As in `config.json`."""
        return str(getattr(transformers, self.architecture).config_class.model_type)


ROBERTA = {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}

TINY_ENCODERS: Mapping[str, TinyEncoder] = {
    "bert-pretraining": TinyEncoder("BertForPreTraining", {"max_position_embeddings": 64}),
    "bert-masked": TinyEncoder(
        "BertForMaskedLM",
        {"max_position_embeddings": 40, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3},
    ),
    "roberta": TinyEncoder("RobertaForMaskedLM", ROBERTA),
}


def build_tiny_encoder(name: str) -> PreTrainedModel:
    """The model with its random values, in evaluation mode, always the same for a name."""
    tiny = TINY_ENCODERS[name]
    kind = getattr(transformers, tiny.architecture)
    model = kind(kind.config_class(**SIZES, **tiny.fields, vocab_size=TOKENS)).eval()
    randomize(model, zlib.crc32(name.encode()))
    return model  # type: ignore[no-any-return]


def write_tiny_encoder(name: str, folder: Path) -> Path:
    """Writes a model with its tokenizer into a folder, as a download from the hub would lie there."""
    build_tiny_encoder(name).save_pretrained(folder)
    if TINY_ENCODERS[name].model_type == "roberta":
        write_roberta_tokenizer(folder)
    else:
        write_wordpiece_tokenizer(folder)
    return folder


def write_wordpiece_tokenizer(folder: Path) -> None:
    """Writes a `vocab.txt` by itself, as the first models have it."""
    letters = string.ascii_lowercase + string.digits
    words = [*letters, *(f"##{letter}" for letter in letters), *string.punctuation, "the", "##ed", "and", "##es"]
    words += [f"unused{number}" for number in range(TOKENS - len(WORDPIECE_SPECIAL) - len(words))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in (*WORDPIECE_SPECIAL, *words)), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_roberta_tokenizer(folder: Path) -> None:
    """Writes `vocab.json` and `merges.txt` of a byte-level BPE whose special tokens have RoBERTa's ids."""
    vocabulary, merges = trained_vocabulary(TOKENS - len(ROBERTA_SPECIAL) + 1)
    words = [token for token, _ in sorted(vocabulary.items(), key=lambda entry: entry[1]) if token != "<|endoftext|>"]
    ordered = [*ROBERTA_SPECIAL[:4], *words, ROBERTA_SPECIAL[4]]
    assert len(ordered) == TOKENS
    numbered = {token: number for number, token in enumerate(ordered)}
    (folder / "vocab.json").write_text(json.dumps(numbered, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    settings = {"tokenizer_class": "RobertaTokenizer", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def padded_tokens(special: int = len(WORDPIECE_SPECIAL)) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens that are not special ones, and which of them are text.

    Shapes: `[3, 20]` int64 and bool.
    """
    tokens = torch.randint(special, TOKENS - 1, (3, 20), generator=torch.Generator().manual_seed(7))
    return tokens, torch.arange(20) < torch.tensor([[20], [13], [6]])
