"""What the network is: sizes, dropout, initialisation, dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags import MUST_MATCH, RUN_MUST_MATCH, Area, derived, flag

_FUSED_AWAY = "PyTorch picks the kernel for this operation"


@dataclass(frozen=True)
class ModelConfig(Area):
    """The network, as every layer sees it."""

    num_layers: int = flag(help="transformer blocks in the whole model", at_least=1, resume=MUST_MATCH)
    hidden_size: int = flag(help="width of the model", at_least=1, resume=MUST_MATCH)
    num_attention_heads: int = flag(help="attention heads per block", at_least=1, resume=MUST_MATCH)
    ffn_hidden_size: int = flag(
        None,
        "inner width of the MLP; 4 x hidden size if unset",
        at_least=1,
        follows=("hidden_size",),
        resume=MUST_MATCH,
    )
    kv_channels: int = flag(
        None,
        "width of one attention head; hidden size / heads if unset",
        at_least=1,
        follows=("hidden_size", "num_attention_heads"),
        resume=MUST_MATCH,
    )
    seq_length: int = flag(
        help="tokens per sample", spelled=("--encoder-seq-length",), at_least=1, resume=RUN_MUST_MATCH
    )
    max_position_embeddings: int = flag(
        help="rows of the learned position table, at least the sequence length", at_least=1, resume=MUST_MATCH
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the vocabulary is padded up to a multiple of this times the tensor-parallel size", at_least=1
    )
    pad_vocab_size_to: int | None = flag(None, "pad the vocabulary to exactly this size instead", at_least=1)
    layernorm_epsilon: float = flag(1e-5, "epsilon of every layer norm", above=0, resume=MUST_MATCH)
    openai_gelu: bool = flag(False, "tanh form of GELU, as OpenAI's code has it", resume=MUST_MATCH)
    hidden_dropout: float = flag(0.1, "dropout on block outputs and on the embedding", at_least=0, below=1)
    attention_dropout: float = flag(0.1, "dropout on attention probabilities", at_least=0, below=1)
    init_method_std: float = flag(
        0.02, "standard deviation of the normal distribution weights are drawn from", at_least=0
    )
    seed: int = flag(1234, "seed of weights, dropout and data order", at_least=1, resume=RUN_MUST_MATCH)
    fp16: bool = flag(False, "train in float16 with loss scaling; CUDA only")
    bf16: bool = flag(False, "train in bfloat16")
    checkpoint_activations: bool = flag(
        False, "recompute each block in the backward pass instead of keeping its activations"
    )
    checkpoint_num_layers: int = flag(
        1,
        "blocks per recompute chunk",
        spelled=("--recompute-num-layers",),
        at_least=1,
        ignored="every block is recomputed on its own, the finest and fastest choice; it keeps one input per block",
    )
    recompute_granularity: str | None = flag(
        None, "full: the same as --checkpoint-activations; selective: attention only", choices=("full", "selective")
    )
    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    bias_gelu_fusion: bool = flag(
        True,
        "tanh form of GELU, which upstream's fused kernel computes; off: the exact form, unless --openai-gelu",
        resume=MUST_MATCH,
    )
    bias_dropout_fusion: bool = flag(True, "fused bias, dropout and residual", ignored=_FUSED_AWAY)
    masked_softmax_fusion: bool = flag(
        True, "fused masked softmax", ignored="attention is one call of PyTorch's scaled_dot_product_attention"
    )
    vocab_size: int = derived(0, "tokens the tokenizer knows", resume=MUST_MATCH)
    padded_vocab_size: int = derived(0, "rows of the word embedding over all tensor-parallel ranks")

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    def complete(self) -> None:
        if self.ffn_hidden_size is None:
            self.set_derived("ffn_hidden_size", 4 * self.hidden_size)
        heads = self.num_attention_heads
        if self.kv_channels is None and heads > 0 and self.hidden_size % heads == 0:
            self.set_derived("kv_channels", self.hidden_size // heads)
        if self.recompute_activations and self.recompute_granularity is None:
            self.set_derived("recompute_granularity", "selective")
        if self.recompute_granularity == "full":
            self.set_derived("checkpoint_activations", True)

    def problems(self) -> Iterator[str]:
        heads = self.num_attention_heads
        if heads > 0 and self.kv_channels is None:
            yield (
                f"--hidden-size {self.hidden_size} cannot be shared by --num-attention-heads {heads}. "
                f"The width must be a multiple of the heads; use --hidden-size {-(-self.hidden_size // heads) * heads} "
                "or give --kv-channels."
            )
        if self.max_position_embeddings < self.seq_length:
            yield (
                f"--max-position-embeddings {self.max_position_embeddings} is less than --seq-length "
                f"{self.seq_length}. Every position needs a row; use --max-position-embeddings {self.seq_length} or "
                "shorter samples."
            )
        if self.recompute_activations and self.recompute_granularity == "full":
            yield "--recompute-activations means selective, and --recompute-granularity full is given. Drop one."
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 are both given. A run has one dtype; drop one of them."
        size = self.pad_vocab_size_to
        if size is not None and size % self.make_vocab_size_divisible_by:
            multiple = -(-size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by
            yield (
                f"--pad-vocab-size-to: {size} is not divisible by {self.make_vocab_size_divisible_by} "
                f"(--make-vocab-size-divisible-by). Use --pad-vocab-size-to {multiple} or another divisor."
            )
