"""The sequences of a proof: random and real ones, longer than the window and the context.

Sequences of encoders have masked tokens, both token types, and padding after texts of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.config import ModelConfig
from megatron.tokenizers.tokenizer import Tokenizer

REAL_TEXTS = (
    'The treaty was signed in 1648, and both sides kept it. "Why?" she asked; nobody knew.\n\n',
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # square metres\n",
    "Straße, naïve, 東京都, Привет мир, ½ — 12,345.67 €\t",
)

_SHORT_TOKENS = 64
_BEYOND_TOKENS = 16
_MOST_POSITIONS = 64
_SEED = 20260101
_MASK_EVERY = 7  # tokens; about BERT's masking rate
_MASKS, _PADDINGS = ("[MASK]", "<mask>"), ("[PAD]", "<pad>")
# Scalings that depend on the length or on an original context.
_CONTEXT_SCALINGS = ("dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class ProofBatch:
    """A random and a real sequence, or only a random one for a model without tokenizer.

    Shapes: tokens `[b, s]` int64; positions `[n]` int64; token_types `[b, s]` int64; is_text `[b, s]` bool.

    Attributes:
        positions: positions of the compared logits in both sequences.
        token_types: None in networks without them.
        is_text: False for padding; None without padding.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    token_types: torch.Tensor | None = None
    is_text: torch.Tensor | None = None


def token_gradients(logits: torch.Tensor, batch: ProofBatch, embedding: torch.Tensor) -> torch.Tensor:
    """The gradients of the embeddings of a batch's tokens, for next-token prediction.

    Shapes: logits `[b, positions, v]`; embedding `[v, h]`; returns `[tokens, h]`, in the order of `tokens.unique()`.
    """
    successors = batch.tokens.roll(-1, 1)[:, batch.positions]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), successors.flatten())
    return torch.autograd.grad(loss, embedding)[0][batch.tokens.unique()]


def proof_batches(model: ModelConfig, tokenizer: Tokenizer | None, padding_id: int | None = None) -> list[ProofBatch]:
    """The batches of a proof: a short one, and one longer than the window and the original context, if any; for an
    encoder the short one with and without padding.

    Args:
        padding_id: a token that is always padding.
    """
    batches = []
    for length in proof_lengths(model):
        drawn = torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(_SEED))
        if padding_id is not None:
            drawn[drawn == padding_id] = (padding_id + 1) % model.vocab_size
        rows = [drawn.tolist()]
        if tokenizer is not None:
            ids = [token for text in REAL_TEXTS for token in tokenizer.encode(text) if token < model.vocab_size]
            rows.append((ids * (length // max(1, len(ids)) + 1))[:length])
        batches.append(ProofBatch(torch.tensor(rows), _positions(length)))
    return _encoder_batches(batches[0].tokens, model, tokenizer, padding_id) if model.bidirectional else batches


def proof_lengths(model: ModelConfig) -> list[int]:
    """Sequence lengths in tokens: one within the original context, and one beyond it and the window."""
    context = model.max_position_embeddings
    is_scaled = model.uses_rope and model.rope_scaling_type in _CONTEXT_SCALINGS
    if is_scaled:
        context = model.rope_original_max_positions or context
    short = min(_SHORT_TOKENS, context)
    long = max(_SHORT_TOKENS, (model.attention_window or 0) + _BEYOND_TOKENS, is_scaled * (context + _BEYOND_TOKENS))
    if model.position_embedding_type == "learned_absolute":
        long = min(long, model.max_position_embeddings)
    return [short] if long == short else [short, long]


def described(batch: ProofBatch) -> list[dict[str, Any]]:
    """The tokens and compared positions of a batch, for `proof.json`."""
    return [
        {
            "kind": kind,
            "positions": batch.positions.tolist(),
            "tokens": row.tolist(),
            **({} if batch.is_text is None else {"text_tokens": int(batch.is_text[number].sum())}),
        }
        for number, (kind, row) in enumerate(zip(("random", "real"), batch.tokens, strict=False))
    ]


def _encoder_batches(
    tokens: torch.Tensor, model: ModelConfig, tokenizer: Tokenizer | None, padding_id: int | None
) -> list[ProofBatch]:
    """Batches without padding, and with a quarter or half of the sequences as padding."""
    length = tokens.shape[1]
    special = {} if tokenizer is None else tokenizer.special_ids
    mask_id, known_padding = (
        next((special[name] for name in names if name in special), None) for names in (_MASKS, _PADDINGS)
    )
    if mask_id is not None and mask_id < model.vocab_size:
        tokens = torch.where(torch.arange(length) % _MASK_EVERY == 1, mask_id, tokens)
    types = None
    if model.token_types:
        types = (torch.arange(length) * model.token_types // length).expand_as(tokens)
    lengths = torch.tensor([[length * 3 // 4], [length // 2]])[: len(tokens)]
    is_text = torch.arange(length) < lengths
    padding = padding_id if padding_id is not None else known_padding or 0
    padded = torch.where(is_text, tokens, padding)
    return [
        ProofBatch(tokens, _positions(length), types),
        ProofBatch(padded, _positions(length // 2), types, is_text),
    ]


def _positions(length: int) -> torch.Tensor:
    """All positions of a short sequence, or evenly spaced ones."""
    if length <= _MOST_POSITIONS:
        return torch.arange(length)
    return torch.linspace(0, length - 1, _MOST_POSITIONS).round().long()
