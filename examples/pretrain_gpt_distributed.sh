#!/usr/bin/env bash
# Pretrains a 345M-parameter GPT on one or several nodes, data-parallel with ZeRO 1, started by torchrun on every node.
#
#   one node:    DATA_PATH=my-gpt2_text_document bash examples/pretrain_gpt_distributed.sh [more flags]
#   two nodes:   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_gpt_distributed.sh    (and NODE_RANK=1 on the other)
#
# What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/gpt2_345m_distributed}"
find_data

FLAGS=(
    --zero-stage 1
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 8
    --global-batch-size 128
    --lr 0.00015
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-fraction .01
    --train-iters 500000
    --weight-decay 1e-2
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
)

start_training "$(processes_here 8)" "${FLAGS[@]}" "${DATA[@]}" -- "$@"
