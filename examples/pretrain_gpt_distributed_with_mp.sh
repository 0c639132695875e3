#!/usr/bin/env bash
# Pretrains a 1.3B-parameter GPT with tensor, pipeline and data parallelism, started by torchrun on every node.
#
#   one node:    DATA_PATH=my-gpt2_text_document bash examples/pretrain_gpt_distributed_with_mp.sh [more flags]
#   two nodes:   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_gpt_distributed_with_mp.sh  (NODE_RANK=1 on the other)
#
# 8 GPUs per node: 2 tensor-parallel x 2 pipeline ranks hold a model replica; the rest is data parallel, with ZeRO 1.
# What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/gpt2_1.3b}"
find_data

FLAGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --zero-stage 1
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --micro-batch-size 4
    --global-batch-size 256
    --rampup-batch-size 32 32 2000000
    --lr 2.0e-4
    --min-lr 2.0e-5
    --lr-decay-style cosine
    --lr-decay-samples 70000000
    --lr-warmup-samples 200000
    --train-samples 73000000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --checkpoint-activations
    --split "949,50,1"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

start_training "$(processes_here 8)" "${FLAGS[@]}" "${DATA[@]}" -- "$@"
