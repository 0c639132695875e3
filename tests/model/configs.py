"""Small networks for tests."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig


def tiny_config(padded_vocab_size: int = 128, **changes: Any) -> ModelConfig:
    """A two-block network of width 32 with 101 words; dropout as by default unless changed."""
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
        "init_method_std": 0.1, **changes,
    }  # fmt: skip
    return ModelConfig(**settings, vocab_size=101, padded_vocab_size=padded_vocab_size)
