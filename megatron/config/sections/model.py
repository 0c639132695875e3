"""The architecture: what a checkpoint must match, and nothing about how the network is trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import MUST_MATCH, derived, flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError


def _head_width(model: ModelRequest) -> int:
    """The width of a head that is not given."""
    heads = model.num_attention_heads
    if heads < 1 or model.hidden_size % heads:
        multiple = -(-model.hidden_size // max(1, heads)) * max(1, heads)
        raise ConfigError(
            f"--hidden-size {model.hidden_size} cannot be divided among --num-attention-heads {heads}. The width must "
            f"be a multiple of the heads; use --hidden-size {multiple} or give --kv-channels."
        )
    return model.hidden_size // heads


@dataclass(frozen=True)
class ModelRequest(ConfigSection):
    """The architecture that was asked for."""

    num_layers: int = flag(help="transformer blocks in the whole model", at_least=1, resume=MUST_MATCH)
    hidden_size: int = flag(help="width of the model", at_least=1, resume=MUST_MATCH)
    num_attention_heads: int = flag(help="attention heads per block", at_least=1, resume=MUST_MATCH)
    ffn_hidden_size: int = flag(
        help="inner width of the MLP; 4 x hidden size if unset",
        computed=lambda model: 4 * model.hidden_size,
        at_least=1,
        follows=("hidden_size",),
        resume=MUST_MATCH,
    )
    kv_channels: int = flag(
        help="width of an attention head; hidden size / heads if unset",
        computed=_head_width,
        at_least=1,
        follows=("hidden_size", "num_attention_heads"),
        resume=MUST_MATCH,
    )
    max_position_embeddings: int = flag(
        help="rows of the learned position embedding; at least the sequence length", at_least=1, resume=MUST_MATCH
    )
    layernorm_epsilon: float = flag(1e-5, "epsilon of every layer norm", above=0, resume=MUST_MATCH)
    openai_gelu: bool = flag(False, "tanh approximation of GELU, as in OpenAI's code", resume=MUST_MATCH)
    hidden_dropout: float = flag(0.1, "dropout on block outputs and on the embedding", at_least=0, below=1)
    attention_dropout: float = flag(0.1, "dropout on attention probabilities", at_least=0, below=1)
    init_method_std: float = flag(
        0.02, "standard deviation of the normal distribution that weights are drawn from", at_least=0
    )
    bias_gelu_fusion: bool = flag(
        True,
        "tanh approximation of GELU, as in upstream's fused kernel; off: exact GELU unless --openai-gelu",
        resume=MUST_MATCH,
    )


@dataclass(frozen=True)
class ModelConfig(ModelRequest):
    """The architecture with the size of its vocabulary, as every layer sees it."""

    vocab_size: int = derived("tokens the tokenizer knows", resume=MUST_MATCH)
    padded_vocab_size: int = derived("rows of the word embedding over all tensor-parallel ranks")
