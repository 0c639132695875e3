"""Architectures that together use every switch of the network at least once, as flags."""

from __future__ import annotations

SMALL = ["--kv-channels", "8", "--num-attention-heads", "4"]
ROPE = ["--position-embedding-type", "rope"]
RMS = ["--normalization", "RMSNorm"]

SWITCHES: dict[str, list[str]] = {
    "llama": [*ROPE, *RMS, "--activation-function", "silu", "--gated-linear-unit", "--no-add-bias-linear",
              "--num-query-groups", "2", "--untie-embeddings-and-output-weights"],
    "llama3-rope": [*ROPE, "--rope-scaling-type", "llama3", "--rope-original-max-positions", "8",
                    "--rope-scaling-factor", "4", "--rotary-interleaved", "--rope-layer-pattern", "1", "1", "0"],
    "yarn": [*ROPE, "--rope-scaling-type", "yarn", "--rope-original-max-positions", "8", "--rotary-percent", "0.5"],
    "neox": [*ROPE, "--rotary-percent", "0.25", "--parallel-residual", "--activation-function", "gelu"],
    "bloom": ["--position-embedding-type", "alibi", "--embed-layernorm"],
    "multi-query": ["--position-embedding-type", "none", "--num-query-groups", "1",
                    "--activation-function", "squared_relu"],
    "gemma2": [*ROPE, *RMS, "--apply-layernorm-1p", "--norm-placement", "sandwich", "--gated-linear-unit",
               "--attention-window", "5", "--attention-window-pattern", "1", "0", "--attention-logit-softcap", "5",
               "--output-logit-softcap", "3", "--embedding-multiplier", "5.5", "--softmax-scale", "0.2",
               "--kv-channels", "6"],
    "qwen3": [*ROPE, *RMS, "--qk-layernorm", "--no-add-bias-linear", "--add-qkv-bias", "--num-query-groups", "1",
              "--rope-scaling-type", "dynamic", "--rope-original-max-positions", "8", "--rope-scaling-factor", "2"],
    "olmo2": [*ROPE, *RMS, "--qk-layernorm", "--qk-layernorm-scope", "all", "--norm-placement", "post_branch",
              "--num-query-groups", "2"],
    "olmo2-multi-query": [*ROPE, *RMS, "--qk-layernorm", "--qk-layernorm-scope", "all", "--num-query-groups", "1"],
    "post-residual": ["--apply-residual-connection-post-layernorm", "--activation-function", "relu",
                      "--residual-multiplier", "0.5", "--logit-multiplier", "0.5"],
    "bilinear, layer-norm qk": [*ROPE, "--activation-function", "linear", "--gated-linear-unit", "--qk-layernorm",
                                "--apply-layernorm-1p", "--rope-scaling-type", "linear"],
    "experts": ["--num-experts", "4", "--gated-linear-unit", "--activation-function", "silu",
                "--moe-ffn-hidden-size", "24", "--moe-layer-pattern", "0", "1", "1",
                "--moe-aux-loss-coeff", "0.2", "--moe-z-loss-coeff", "0.1"],
    "sigmoid and shared experts": ["--num-experts", "8", "--moe-router-topk", "3", "--moe-ffn-hidden-size", "16",
                                   "--moe-router-score-function", "sigmoid", "--moe-aux-loss-coeff", "0.2",
                                   "--moe-router-topk-scaling-factor", "2.5",
                                   "--moe-shared-expert-intermediate-size", "12", "--moe-mlp-bias",
                                   "--moe-router-bias"],
    "residual experts": ["--num-experts", "2", "4", "3", "--mlp-type", "residual"],
    "one expert a token": ["--num-experts", "4", "--moe-router-topk", "1", "--moe-router-pre-softmax"],
    "multi-token": [*ROPE, *RMS, "--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.5", "--num-experts", "4",
                    "--untie-embeddings-and-output-weights", "--moe-layer-pattern", "0", "1", "1"],
    "multi-token, tied": [*ROPE, "--mtp-num-layers", "1"],
    "smoothed labels and z-loss": ["--label-smoothing", "0.1", "--z-loss-coeff", "0.01"],
    "xavier": ["--init-method-xavier-uniform", "--gated-linear-unit"],
    "small and wang": ["--init-method", "small", "--output-layer-init-method", "wang"],
    "truncated": ["--init-method", "truncated_normal", "--output-layer-init-method", "same",
                  "--embedding-init-method-std", "0.1"],
    "mup": ["--use-mup", "--mup-base-hidden-size", "8", "--mup-base-head-dim", "4"],
    "mup, experts": ["--use-mup", "--mup-base-hidden-size", "16", "--untie-embeddings-and-output-weights",
                     "--num-experts", "4"],
    "gpt-oss": [*ROPE, *RMS, "--softmax-type", "learnable", "--num-query-groups", "2", "--attention-window", "5",
                "--attention-window-pattern", "1", "0", "--rotary-base-windowed", "100", "--rope-scaling-type", "yarn",
                "--no-yarn-correction-range-round-to-int", "--quick-geglu", "--activation-func-clamp-value", "0.5",
                "--glu-linear-offset", "1"],
    "qwen3-next": [*ROPE, *RMS, "--attention-output-gate", "--qk-layernorm", "--num-query-groups", "2",
                   "--rotary-percent", "0.5"],
    "off by one, longrope": [*ROPE, "--softmax-type", "off-by-one", "--rope-scaling-type", "longrope",
                             "--rope-original-max-positions", "8", "--rope-short-factors", "1", "1.5", "2", "3",
                             "--rope-long-factors", "1", "2", "3", "4",
                             "--norm-placement", "post", "--activation-function", "elu",
                             "--init-method", "xavier_normal"],
    "latents": [*ROPE, *RMS, "--multi-latent-attention", "--q-lora-rank", "20", "--kv-lora-rank", "12",
                "--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "10", "--qk-layernorm",
                "--rope-scaling-type", "yarn", "--rotary-scaling-factor", "4", "--rope-original-max-positions", "8",
                "--mscale", "0.7", "--mscale-all-dim", "1.3", "--rotary-interleaved", "--mtp-num-layers", "1"],
}  # fmt: skip
# What test_bert.py and experts/test_balancing.py train.
ELSEWHERE = {
    *("bidirectional", "masked_lm_head", "sentence_order_head"),
    *("moe_router_enable_expert_bias", "moe_token_drop_policy", "moe_aux_loss_scope", "disable_moe_token_dropping"),
    *("openai_gelu", "bias_gelu_fusion"),  # an activation function by another name
}
