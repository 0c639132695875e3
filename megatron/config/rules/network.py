"""The network: attention, positions, norms, encoders, initial values and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.architecture.attention import VANILLA
from megatron.config.architecture.norms import POST, POST_BRANCH, PRE
from megatron.config.architecture.positions import LEARNED, ROPE
from megatron.config.architecture.scales import NORMAL, TRUNCATED_NORMAL, XAVIER_NORMAL, XAVIER_UNIFORM
from megatron.config.flags.fields import as_written, flags_of
from megatron.config.rules.rule import model_rule, notice
from megatron.config.run_sections import ReadFlags
from megatron.config.sections.model import ModelRequest, unused_fields


@model_rule
def _latent_attention(model: ModelRequest) -> Iterator[str]:
    if not model.multi_latent_attention:
        return
    width = model.qk_head_dim + model.qk_pos_emb_head_dim
    if (rotated := model.qk_pos_emb_head_dim) % 2:
        yield f"--qk-pos-emb-head-dim {rotated} is odd, and channels are rotated in pairs. Use {rotated + 1}."
    if model.v_head_dim > width:
        yield (
            f"--v-head-dim {model.v_head_dim} is more than the {width} channels of queries and keys (--qk-head-dim "
            f"+ --qk-pos-emb-head-dim), which is not supported. Use at most {width}."
        )
    for is_wrong, flag, way_out in (
        (model.position_embedding_type != ROPE, f"--position-embedding-type {model.position_embedding_type}",
         "Use --position-embedding-type rope."),
        (model.num_query_groups != model.num_attention_heads, f"--num-query-groups {model.num_query_groups}",
         "All heads share one latent already; drop it."),
        (model.rotary_percent != 1, f"--rotary-percent {model.rotary_percent:g}",
         "Use --qk-pos-emb-head-dim for the number of rotated channels."),
        (bool(model.rope_layer_pattern), "--rope-layer-pattern", "Drop it: every layer rotates."),
        (model.bidirectional, "--bidirectional", "Drop one of the two."),
        (model.attention_output_gate, "--attention-output-gate", "Drop one of the two."),
    ):  # fmt: skip
        if is_wrong:
            yield f"{flag} does not go with --multi-latent-attention. {way_out}"


@model_rule
def _attention(model: ModelRequest) -> Iterator[str]:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups > 0 and heads % groups:
        yield (
            f"--num-attention-heads {heads} cannot be divided into --num-query-groups {groups}. The heads must be "
            f"a multiple of the groups."
        )
    if model.softmax_type != VANILLA and model.attention_dropout > 0:
        yield (
            f"--attention-dropout {model.attention_dropout:g} does not go with --softmax-type {model.softmax_type}, "
            "whose attention has no dropout. Use --attention-dropout 0."
        )
    if model.attention_window_pattern and model.attention_window is None:
        yield "--attention-window-pattern needs --attention-window, the number of tokens."


@model_rule
def _encoder(model: ModelRequest) -> Iterator[str]:
    asked = {
        f"--num-token-types {model.token_types}": model.token_types > 0 and not model.sentence_order_head,
        "--masked-lm-head": model.masked_lm_head,
        "--sentence-order-head": model.sentence_order_head,
    }
    parts = [option for option, is_asked in asked.items() if is_asked]
    if parts and not model.bidirectional:
        yield (f"{', '.join(parts)}: only encoders have this. Add --bidirectional, use pretrain_bert.py, or drop it.")


@model_rule
def _positions(model: ModelRequest) -> Iterator[str]:
    if not model.uses_rope and model.rope_layer_pattern:
        yield "--rope-layer-pattern needs rotary positions. Give --position-embedding-type rope, or drop it."
    if not model.uses_rope and model.rope_scaling_type != "none":
        yield (
            f"--rope-scaling-type {model.rope_scaling_type} needs rotary positions. Give --position-embedding-type "
            "rope, or drop it."
        )
    if model.short_context is not None and isinstance(model.kv_channels, int):
        short, long, pairs = len(model.rope_short_factors), len(model.rope_long_factors), model.rotary_width // 2
        if not short == long == pairs:
            yield (
                f"--rope-scaling-type longrope needs --rope-short-factors and --rope-long-factors, {pairs} numbers "
                f"each: one for every pair of rotated channels. {short} and {long} were given."
            )
    if model.rope_high_freq_factor <= model.rope_low_freq_factor:
        yield (
            f"--rope-high-freq-factor {model.rope_high_freq_factor} must be more than --rope-low-freq-factor "
            f"{model.rope_low_freq_factor}. The llama3 scaling interpolates between them."
        )


@model_rule
def _multi_token_prediction(model: ModelRequest) -> Iterator[str]:
    if model.mtp_num_layers > 0 and model.bidirectional:
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} does not go with --bidirectional, with which a token has seen "
            "the ones after it. Drop one of them."
        )
    if model.mtp_num_layers > 0 and model.position_embedding_type == LEARNED:
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} does not go with --position-embedding-type {LEARNED}: its "
            "blocks look word embeddings up again, which have no position of their own. Use rope, alibi or none."
        )


@model_rule
def _norms(model: ModelRequest) -> Iterator[str]:
    if model.apply_residual_connection_post_layernorm and (model.parallel_residual or model.norm_placement != PRE):
        other = "--parallel-residual" if model.parallel_residual else f"--norm-placement {model.norm_placement}"
        yield (
            f"--apply-residual-connection-post-layernorm cannot be combined with {other}. It moves the residual of "
            "a block with norms before attention and feed-forward; drop one of them."
        )
    if model.parallel_residual and model.norm_placement in (POST_BRANCH, POST):
        yield (
            f"--parallel-residual cannot be combined with --norm-placement {model.norm_placement}, which has no "
            "norm before the branches. Drop one of them."
        )


@model_rule
def _initial_values(model: ModelRequest) -> Iterator[str]:
    if model.init_method_xavier_uniform and model.init_method != XAVIER_UNIFORM:
        yield (
            f"--init-method-xavier-uniform and --init-method {model.init_method} contradict each other. Drop one of "
            "them."
        )
    if model.init_method not in (NORMAL, TRUNCATED_NORMAL) and model.init_method_std != 0.02:
        yield (
            f"--init-method-std {model.init_method_std} has no effect with --init-method {model.init_method}, which "
            "has a standard deviation of its own. Drop one of them."
        )
    if model.use_mup and model.init_method in (XAVIER_UNIFORM, XAVIER_NORMAL):
        yield (
            f"--use-mup cannot be combined with --init-method {model.init_method}, which scales with the width in "
            "its own way. Use --init-method normal."
        )
    if not model.use_mup:
        for name in ("mup_base_hidden_size", "mup_base_head_dim"):
            if getattr(model, name) is not None:
                yield f"--{name.replace('_', '-')} {getattr(model, name)} has no effect without --use-mup. Add it."


@notice
def _idle_flags(run: ReadFlags) -> Iterator[str]:
    """A field of the architecture that was set and changes nothing.

    Scripts of the forks pass `--num-experts 1` with the flags of experts, which needs no comment.
    """
    model, values = run.model, run.values
    reasons = unused_fields(model)
    for flag in flags_of(ModelRequest):
        value = values.get(f"model.{flag.field}", flag.default)
        is_dense_by_choice = model.num_experts == 1 and flag.field.startswith("moe_") and "model.num_experts" in values
        if flag.field in reasons and value != flag.default and not is_dense_by_choice:
            reason = reasons[flag.field]
            condition = reason if reason.startswith("with ") else f"without {reason}"
            yield f"{as_written(flag.positive_name, value)} has no effect {condition}."
