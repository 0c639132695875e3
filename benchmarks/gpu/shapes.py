"""The networks that are trained, and their floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A network.

    Attributes:
        groups: heads of keys and values of a Llama network; None for GPT-2's architecture, whose head shares the
            weight of the embedding.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocab: int = 50257
    padded_vocab: int = 50304
    groups: int | None = None

    @property
    def flags(self) -> list[str]:
        """The architecture as flags of pretrain_gpt.py, without dropout."""
        numbers = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--num-attention-heads": self.heads,
            "--ffn-hidden-size": self.feed_forward,
            "--vocab-size": self.vocab,
            "--pad-vocab-size-to": self.padded_vocab,
            "--hidden-dropout": 0,
            "--attention-dropout": 0,
        }
        words = [str(word) for pair in numbers.items() for word in pair]
        if self.groups is None:
            return words
        return [
            *words,
            *("--position-embedding-type", "rope", "--normalization", "RMSNorm"),
            *("--num-query-groups", str(self.groups), "--activation-function", "silu", "--gated-linear-unit"),
            *("--no-add-bias-linear", "--untie-embeddings-and-output-weights"),
        ]

    def multiplied_parameters(self) -> int:
        """The parameters that every token is multiplied with: those of the blocks' matrices and of the head."""
        kept = 1.0 if self.groups is None else self.groups / self.heads
        attention = (2 + 2 * kept) * self.hidden**2
        matrices = 2 if self.groups is None else 3
        block = attention + matrices * self.hidden * self.feed_forward
        return round(self.layers * block) + self.padded_vocab * self.hidden

    def flops_per_token(self, length: int) -> float:
        """Operations of training on one token: 6 a parameter, and 12 a layer, channel and token attended to.

        All `length` tokens count as attended to, though half of them are hidden; recomputation does not count.

        Source: Chowdhery et al., "PaLM", 2022, appendix B.
        """
        return 6.0 * self.multiplied_parameters() + 12.0 * self.layers * self.hidden * length

    def tiny(self) -> Shape:
        """The same architecture, small enough for a test."""
        groups = None if self.groups is None else 1
        return replace(self, layers=2, hidden=32, heads=2, feed_forward=64, vocab=257, padded_vocab=384, groups=groups)


SHAPES = {
    "124m": Shape("GPT 124M", 12, 768, 12, 3072),
    "355m": Shape("GPT 355M", 24, 1024, 16, 4096),
    "1.3b": Shape("GPT 1.3B", 24, 2048, 16, 8192),
    # The shape of TinyLlama 1.1B: 4 heads of keys and values, SwiGLU, its own head.
    "llama1b": Shape("Llama 1B", 22, 2048, 32, 5632, vocab=32000, padded_vocab=32000, groups=4),
}
