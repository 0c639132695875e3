"""Parameters and floating-point operations of the layers, from the configuration alone, without torch."""

from __future__ import annotations

from itertools import accumulate, pairwise

from megatron.config import ModelConfig
from megatron.config.architecture.attention import LEARNABLE
from megatron.config.architecture.norms import LAYER_NORM, SANDWICH
from megatron.model.interface.layer_cost import LayerCost, TokenWork
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import Division


def block_cost(config: ModelConfig, index: int) -> LayerCost:
    """Parameters and operations of block `index`."""
    attention = attention_cost(config)
    vectors = (4 if config.norm_placement == SANDWICH else 2) * norm_size(config)
    has_experts = config.has_experts(index)
    feed_forward = experts_cost(config, index) if has_experts else feed_forward_cost(config, config.ffn_hidden_size)
    return LayerCost(
        attention.parameters + vectors + feed_forward.parameters,
        flops_per_token=attention.flops_per_token + feed_forward.flops_per_token,
        flops_per_token_pair=attention.flops_per_token_pair,
    )


def attention_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of attention; of latent attention in training, which expands keys and values."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    if config.multi_latent_attention:
        queries = config.q_lora_rank or 0
        biased, normed = queries + config.latent_width, queries + config.kv_lora_rank
    else:
        biased = (heads * (1 + config.attention_output_gate) + 2 * groups) * size
        normed = (heads + groups) * size if config.qk_layernorm_scope == "all" else 2 * size
    vectors = config.add_qkv_bias * biased + config.attention_output_bias * config.hidden_size
    vectors += config.qk_layernorm * normed * _norm_vectors(config)
    vectors += heads if config.softmax_type == LEARNABLE else 0
    matrices = attention_matrices(config)
    pair = 2 * heads * (size + config.value_channels)
    return LayerCost(matrices + vectors, flops_per_token=2 * matrices, flops_per_token_pair=pair)


def attention_matrices(config: ModelConfig, ranks: int = 1) -> int:
    """Elements of the attention matrices on each of `ranks` tensor-parallel ranks."""
    hidden, size, heads = config.hidden_size, config.kv_channels, config.num_attention_heads / ranks
    if not config.multi_latent_attention:
        groups = max(config.num_query_groups / ranks, 1)
        return int(hidden * size * ((2 + config.attention_output_gate) * heads + 2 * groups))
    rank, values = config.q_lora_rank, config.v_head_dim
    queries = hidden * heads * size if rank is None else rank * (hidden + heads * size)
    latents = config.latent_width * hidden + config.kv_lora_rank * heads * (config.qk_head_dim + values)
    return int(queries + latents + heads * values * hidden)


def feed_forward_cost(config: ModelConfig, inner_size: int) -> LayerCost:
    """Parameters and operations of a dense feed-forward layer."""
    products = 2 if config.gated_linear_unit else 1
    matrices = config.hidden_size * inner_size * (products + 1)
    biases = config.mlp_bias * (products * inner_size + config.hidden_size)
    return LayerCost(matrices + biases, flops_per_token=2 * matrices)


def experts_cost(config: ModelConfig, index: int = 0) -> LayerCost:
    """Parameters of all experts of a layer, and the operations of a token, which passes through k of them."""
    hidden, matrices = config.hidden_size, 3 if config.gated_linear_unit else 2
    count = config.experts_of(index)
    router = count * hidden
    expert = matrices * hidden * config.moe_ffn_hidden_size
    vectors = count * (config.moe_router_bias + expert_parameters(config) - expert)
    shared = matrices * hidden * config.moe_shared_expert_intermediate_size
    dense = mixing = LayerCost(0)
    if config.moe_residual:
        dense = feed_forward_cost(config, config.ffn_hidden_size)
        mixing = LayerCost(2 * (hidden + 1), flops_per_token=2 * 2 * hidden)
    return LayerCost(
        router + count * expert + vectors + shared + dense.parameters + mixing.parameters,
        flops_per_token=2 * (router + config.moe_router_topk * expert + shared)
        + dense.flops_per_token
        + mixing.flops_per_token,
    )


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one routed expert."""
    hidden, inner, products = config.hidden_size, config.moe_ffn_hidden_size, 2 if config.gated_linear_unit else 1
    return hidden * inner * (products + 1) + config.moe_mlp_bias * (products * inner + hidden)


def idle_expert_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not use, over all layers."""
    layers = range(config.num_layers + config.mtp_num_layers)
    counts = [config.experts_of(layer) for layer in layers if config.has_experts(layer)]
    return sum(count - config.moe_router_topk for count in counts) * expert_parameters(config)


def head_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of the output head; a shared matrix counts with the embedding."""
    parameters = config.untie_embeddings_and_output_weights * config.vocab_size * config.hidden_size
    return LayerCost(parameters, flops_per_token=2 * config.padded_vocab_size * config.hidden_size)


def multi_token_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of multi-token prediction: for each depth two norms, a projection, a block, a norm and
    a pass through the head, whose matrix is shared.
    """
    hidden = config.hidden_size
    blocks = [block_cost(config, config.num_layers + depth) for depth in range(config.mtp_num_layers)]
    joining, head = 2 * hidden * hidden, head_cost(config).flops_per_token
    return LayerCost(
        sum(block.parameters + joining + 3 * norm_size(config) for block in blocks),
        flops_per_token=sum(block.flops_per_token + 2 * joining + head for block in blocks),
        flops_per_token_pair=sum(block.flops_per_token_pair for block in blocks),
    )


def bert_head_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of the heads of an encoder, with every position predicted."""
    hidden, output = config.hidden_size, head_cost(config)
    dense = hidden * (hidden + 1)
    parameters, flops = output.parameters, output.flops_per_token
    if config.masked_lm_head:
        parameters += dense + norm_size(config) + config.vocab_size
        flops += 2 * hidden * hidden
    if config.sentence_order_head:
        parameters += dense + 2 * (hidden + 1)
    return LayerCost(parameters, flops_per_token=flops)


def heads_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of the heads of a GPT or an encoder."""
    return bert_head_cost(config) if config.bidirectional else head_cost(config)


def token_work(config: ModelConfig, sequence_length: int, head_share: float = 1.0) -> TokenWork:
    """The work per token of samples of this length; with causal attention a token attends to half of the others."""
    return TokenWork(sequence_length if config.bidirectional else sequence_length // 2, head_share)


def chunk_flops(config: ModelConfig, work: TokenWork, placement: Placement, division: Division) -> tuple[int, ...]:
    """Forward FLOPs of each chunk of a pipeline for a token.

    Raises:
        ConfigError: fewer blocks than chunks.
    """
    blocks = [block_cost(config, index).flops(work.pairs) for index in range(config.num_layers)]
    head = int(work.head_share * heads_cost(config).flops_per_token) + multi_token_cost(config).flops(work.pairs)
    bounds = [0, *accumulate(division.counts(blocks, (0, head), placement))]
    flops = [sum(blocks[start:end]) for start, end in pairwise(bounds)]
    return *flops[:-1], flops[-1] + head


def norm_size(config: ModelConfig) -> int:
    """Parameters of a norm over the hidden states."""
    return _norm_vectors(config) * config.hidden_size


def _norm_vectors(config: ModelConfig) -> int:
    return 2 if config.normalization == LAYER_NORM else 1
