"""The network: attention, position encodings, norms, encoders, initialization and multi-token prediction."""

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
        yield f"--qk-pos-emb-head-dim {rotated} must be even: RoPE rotates pairs of channels. Use {rotated + 1}."
    if model.v_head_dim > width:
        yield (
            f"--v-head-dim {model.v_head_dim} must not exceed the {width} channels of queries and keys (--qk-head-dim "
            f"+ --qk-pos-emb-head-dim). Use at most {width}."
        )
    for is_wrong, flag, way_out in (
        (model.position_embedding_type != ROPE, f"--position-embedding-type {model.position_embedding_type}",
         "Use --position-embedding-type rope."),
        (model.num_query_groups != model.num_attention_heads, f"--num-query-groups {model.num_query_groups}",
         "Drop it: all heads share one latent already."),
        (model.rotary_percent != 1, f"--rotary-percent {model.rotary_percent:g}",
         "Use --qk-pos-emb-head-dim for the number of rotated channels."),
        (bool(model.rope_layer_pattern), "--rope-layer-pattern", "Drop it: every layer has RoPE."),
        (model.bidirectional, "--bidirectional", "Drop one of them."),
        (model.attention_output_gate, "--attention-output-gate", "Drop one of them."),
    ):  # fmt: skip
        if is_wrong:
            yield f"{flag} cannot be combined with --multi-latent-attention. {way_out}"


@model_rule
def _attention(model: ModelRequest) -> Iterator[str]:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups > 0 and heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}."
    if model.softmax_type != VANILLA and model.attention_dropout > 0:
        yield (
            f"--attention-dropout {model.attention_dropout:g} cannot be combined with --softmax-type "
            f"{model.softmax_type}. Use --attention-dropout 0."
        )
    if model.attention_window_pattern and model.attention_window is None:
        yield "--attention-window-pattern requires --attention-window, the size of the window."


@model_rule
def _encoder(model: ModelRequest) -> Iterator[str]:
    requested = {
        f"--num-token-types {model.token_types}": model.token_types > 0 and not model.sentence_order_head,
        "--masked-lm-head": model.masked_lm_head,
        "--sentence-order-head": model.sentence_order_head,
    }
    options = [option for option, is_set in requested.items() if is_set]
    if options and not model.bidirectional:
        yield f"{', '.join(options)} requires an encoder. Add --bidirectional, use pretrain_bert.py, or drop it."


@model_rule
def _positions(model: ModelRequest) -> Iterator[str]:
    if not model.uses_rope and model.rope_layer_pattern:
        yield "--rope-layer-pattern requires --position-embedding-type rope. Add it, or drop --rope-layer-pattern."
    if not model.uses_rope and model.rope_scaling_type != "none":
        yield (
            f"--rope-scaling-type {model.rope_scaling_type} requires --position-embedding-type rope. Add it, or drop "
            "--rope-scaling-type."
        )
    if model.short_context is not None and isinstance(model.kv_channels, int):
        short, long, pairs = len(model.rope_short_factors), len(model.rope_long_factors), model.rotary_width // 2
        if not short == long == pairs:
            yield (
                f"--rope-scaling-type longrope requires {pairs} --rope-short-factors and --rope-long-factors, one for "
                f"each pair of rotated channels, got {short} and {long}."
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
            f"--mtp-num-layers {model.mtp_num_layers} cannot be combined with --bidirectional, which lets tokens "
            "attend to later ones. Drop one of them."
        )
    if model.mtp_num_layers > 0 and model.position_embedding_type == LEARNED:
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} cannot be combined with --position-embedding-type {LEARNED}: its "
            "blocks use word embeddings without positions. Use rope, alibi or none."
        )


@model_rule
def _norms(model: ModelRequest) -> Iterator[str]:
    if model.apply_residual_connection_post_layernorm and (model.parallel_residual or model.norm_placement != PRE):
        other = "--parallel-residual" if model.parallel_residual else f"--norm-placement {model.norm_placement}"
        yield (
            f"--apply-residual-connection-post-layernorm cannot be combined with {other}: it requires norms before "
            "attention and MLP. Drop one of them."
        )
    if model.parallel_residual and model.norm_placement in (POST_BRANCH, POST):
        yield (
            f"--parallel-residual cannot be combined with --norm-placement {model.norm_placement}, which has no norm "
            "before attention and MLP. Drop one of them."
        )


@model_rule
def _initial_values(model: ModelRequest) -> Iterator[str]:
    if model.init_method_xavier_uniform and model.init_method != XAVIER_UNIFORM:
        yield f"--init-method-xavier-uniform contradicts --init-method {model.init_method}. Drop one of them."
    if model.init_method not in (NORMAL, TRUNCATED_NORMAL) and model.init_method_std != 0.02:
        yield (
            f"--init-method-std {model.init_method_std} has no effect with --init-method {model.init_method}, which "
            "determines the standard deviation. Drop one of them."
        )
    if model.use_mup and model.init_method in (XAVIER_UNIFORM, XAVIER_NORMAL):
        yield (
            f"--use-mup cannot be combined with --init-method {model.init_method}, which scales with the width itself. "
            "Use --init-method normal."
        )
    if not model.use_mup:
        for name in ("mup_base_hidden_size", "mup_base_head_dim"):
            if getattr(model, name) is not None:
                yield f"--{name.replace('_', '-')} {getattr(model, name)} has no effect without --use-mup. Add it."


@notice
def _unused_flags(run: ReadFlags) -> Iterator[str]:
    """Reports architecture flags that have no effect, except flags of experts with an explicit `--num-experts 1`, as in
    scripts of the forks.
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
