"""Command lines of the forks' example scripts for networks other than GPT-2, and what they stand for here.

The flags are those of deepspeedai/Megatron-DeepSpeed `examples_deepspeed/`, NVIDIA/Megatron-LM `examples/` and tests
of bigscience-workshop/Megatron-DeepSpeed; some sizes and all paths are others.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.errors import ConfigError

DATA = "--vocab-file v.json --merge-file m.txt --data-path corpus --data-impl mmap"
SENTENCEPIECE = "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --data-path 1 corpus"

# pretrain_llama2_distributed.sh
LLAMA_2 = f"""
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048
    --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 2048
    --max-position-embeddings 2048 --train-iters 250000 --save out --load out {SENTENCEPIECE} --data-impl mmap
    --split 949,50,1 --distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1
    --clip-grad 1 --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling
    --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings --untie-embeddings-and-output-weights
    --swiglu --normalization rmsnorm --disable-bias-linear --num-key-value-heads 4 --deepspeed --zero-stage 0
    --recompute-granularity full --recompute-method uniform
"""
# MoE/ds_pretrain_gpt_1.3B_MoE128.sh, with one expert (a dense network) and with 128
MOE = f"""
    {DATA} --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1
    --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4
    --init-method-std 0.014 --lr-decay-tokens 300000000000 --lr-warmup-tokens 375000000 --micro-batch-size 4
    --exit-duration-in-mins 30000000 --global-batch-size 256 --num-layers 24 --hidden-size 2048
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
    --train-iters 1716613 --lr 1.2e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 98,2,0 --log-interval 10
    --eval-interval 100 --eval-iters 10 --save-interval 10000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2
    --num-workers 0 --fp16 --load out --save out --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --checkpoint-activations --deepspeed --pipeline-model-parallel-size 1 --no-pipeline-parallel
    --deepspeed-activation-checkpointing
"""
# rebase/ds_pretrain_gpt_1.3B.sh
TOKEN_SCHEDULE = f"""
    {DATA} --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 2
    --init-method-std 0.013 --lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 --micro-batch-size 2
    --exit-duration-in-mins 30000000 --global-batch-size 512 --num-layers 24 --hidden-size 2048
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
    --train-samples 292968750 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 --log-interval 10
    --eval-interval 100 --eval-iters 10 --save-interval 100 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2
    --num-workers 0 --fp16 --seed 1234 --load out --save out --no-async-tensor-model-parallel-allreduce
    --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --log-validation-ppl-to-tensorboard --tensorboard-dir tb --checkpoint-activations
    --log-optimizer-states-to-tensorboard --deepspeed --zero-stage 1 --pipeline-model-parallel-size 2
"""
# finetune_hf_llama/finetune_llama.sh
FINETUNE_LLAMA = """
    --load llama --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr-warmup-iters 2000
    --weight-decay 0.1 --clip-grad 1 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --finetune
    --ffn-hidden-size 11008 --attention-dropout 0 --hidden-dropout 0 --no-query-key-layer-scaling
    --disable-bias-linear --normalization rmsnorm --use-rotary-position-embeddings
    --untie-embeddings-and-output-weights --swiglu --seq-length 512 --max-position-embeddings 512
    --micro-batch-size 16 --global-batch-size 256 --train-iters 3500 --lr 2e-5 --tensorboard-dir tb
    --lr-decay-iters 320000 --lr-decay-style cosine --log-interval 1 --eval-iters 100 --eval-interval 100
    --data-path corpus --save-interval 1500 --split 100,0,0 --bf16 --zero-stage 0 --tokenizer-type HFTokenizer
    --tokenizer-model llama-hf --deepspeed --distributed-backend nccl --num-workers 0 --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion --repeated-dataloader
"""
# llama/train_llama3_8b_h100_fp8.sh, with data and in bf16
LLAMA_3 = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015
    --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --tensor-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
    --data-path corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model llama-3 --data-cache-path cache
    --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
    --vocab-size 128256 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60
    --save out --load out --tensorboard-dir tb
"""
# mixtral/train_mixtral_8x7b_distributed.sh
MIXTRAL = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path corpus --split 99990,8,2
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel --log-interval 100 --save-interval 10000 --eval-interval 1000
    --eval-iters 10 --save out --load out --tensorboard-dir tb --no-load-optim --no-load-rng
"""
ONE_STAGE = MIXTRAL.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 1")
# bigscience's tests of training: variants of one small run
SMALL = f"""
    {DATA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 64
    --num-attention-heads 2 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --train-samples 200
    --rampup-batch-size 2 2 200 --lr 1e-4 --lr-warmup-samples 5 --fp16 --deepspeed --zero-stage 1
"""


def run(text: str, world: int = 8, vocabulary: int = 50257) -> RunConfig:
    """The resolved run of a command line."""
    facts = TokenizerFacts(vocabulary, 0, "f")
    return resolve(parse(shlex.split(text)), Machine("cuda", world, True, True), facts)


LLAMA_FIELDS = {
    "activation_function": "silu", "gated_linear_unit": True, "add_bias_linear": False,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "world", "fields"),
    [
        (
            LLAMA_2,
            8,
            {**LLAMA_FIELDS, "normalization": "RMSNorm", "num_query_groups": 4, "ffn_hidden_size": 5504},
        ),
        (FINETUNE_LLAMA, 8, {**LLAMA_FIELDS, "normalization": "RMSNorm", "ffn_hidden_size": 11008}),
        (
            LLAMA_3.replace("--grad-reduce-in-bf16", "") + "--checkpoint-activations",
            8,
            {**LLAMA_FIELDS, "normalization": "LayerNorm", "apply_layernorm_1p": True, "num_query_groups": 8,
             "rotary_base": 1e6, "vocab_size": 128256},
        ),
        (ONE_STAGE, 8, {**LLAMA_FIELDS, "num_experts": 8, "moe_ffn_hidden_size": 14336, "moe_aux_loss_coeff": 0.01}),
        (
            MOE + "--num-experts 1 --moe-expert-parallel-size 1",
            64,
            {"num_experts": 1, "activation_function": "gelu_tanh", "ffn_hidden_size": 8192},
        ),
        (
            MOE + "--num-experts 128 --moe-expert-parallel-size 64 --create-moe-param-group --topk 1 "
            "--expert-interval 2",
            64,
            {"num_experts": 128, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_pattern": (0, 1)},
        ),
        (
            SMALL + "--max-position-embeddings 128 --position-embedding-type alibi --embed-layernorm",
            4,
            {"position_embedding_type": "alibi", "embed_layernorm": True},
        ),
        (
            SMALL + "--max-position-embeddings 128 --glu-activation geglu --no-bias-gelu-fusion",
            4,
            {"activation_function": "gelu", "gated_linear_unit": True, "ffn_hidden_size": 256},
        ),
        (
            SMALL + "--position-embedding-type rotary --glu-activation swiglu --no-bias-gelu-fusion",
            4,
            {"position_embedding_type": "rope", "max_position_embeddings": 128, "activation_function": "silu"},
        ),
    ],
    ids=["llama-2", "finetune", "llama-3", "mixtral", "dense", "moe", "alibi", "geglu", "rotary"],
)  # fmt: skip
def test_the_network_of_a_published_command(text: str, world: int, fields: dict[str, Any]) -> None:
    model = run(text, world).model if "vocab-size" not in text else run(text, world, 128000).model
    assert {name: getattr(model, name) for name in fields} == fields


def test_what_is_said_of_a_published_command() -> None:
    config = run(LLAMA_2)
    assert [text.split()[0] for text in config.notices] == ["--zero-stage"]
    assert [text.split()[0] for text in config.ignored] == ["--no-query-key-layer-scaling"]
    assert [text.split()[0] for text in run(TOKEN_SCHEDULE).ignored] == [
        "--no-async-tensor-model-parallel-allreduce", "--log-optimizer-states-to-tensorboard",
    ]  # fmt: skip


def test_a_published_schedule_in_tokens() -> None:
    optim = run(TOKEN_SCHEDULE).optim
    assert optim.train_iters == 286_103  # 300e9 / (512 x 2048) = 286102.3, and the last step reaches the tokens
    optim = run(MOE, 64).optim
    assert (optim.train_iters, optim.most_iters) == (572_205, 1_716_613)


def test_what_published_commands_cannot_have_yet() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(shlex.split(LLAMA_3 + "--fp8-format hybrid --decoupled-lr 5e-4 --spec local"))
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "--decoupled-lr", "--spec",
    ]  # fmt: skip


def test_experts_are_on_as_many_ranks_as_published() -> None:
    config = run(MIXTRAL, 32)
    assert (config.parallel.expert_model_parallel_size, config.parallel.effective_zero_stage) == (8, 1)
    with pytest.raises(ConfigError, match="--expert-model-parallel-size 8 does not divide the 4 ranks"):
        run(ONE_STAGE, 4)
