#!/usr/bin/env bash
# The command of a network of a trillion parameters on 3,072 GPUs: 8 tensor-parallel x 64 pipeline ranks x 6 replicas.
#
#   bash examples/pretrain_gpt_1t.sh                                             prints the command of a node
#   NNODES=384 NODE_RANK=0 MASTER_ADDR=node0 DATA_PATH=... bash examples/pretrain_gpt_1t.sh      on every node
#
# Nobody has run it at this size: a test checks its flags and its layout, and trains its shape with SCALE=tiny. Shape and layout are
# those of the largest network in "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473, table 1).
if [ -z "${NNODES:-}" ] && [ "${SCALE:-full}" = full ]; then
    DRY_RUN=1
    NNODES=384
fi
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/gpt_1t}"
find_data

if [ "$SCALE" = tiny ]; then
    LAYOUT=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
else
    LAYOUT=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 64)
fi
FLAGS=(
    "${LAYOUT[@]}"
    --zero-stage 1
    --num-layers 128
    --hidden-size 25600
    --num-attention-heads 160
    --seq-length 2048
    --max-position-embeddings 2048
    --micro-batch-size 1
    --global-batch-size 3072
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-decay-iters 70000
    --lr-warmup-fraction .01
    --train-iters 75000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --checkpoint-activations
    --split "949,50,1"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 200
    --log-interval 1
    --eval-interval 1000
    --eval-iters 10
)

start_training "${DEVICES:-8}" "${FLAGS[@]}" "${DATA[@]}" -- "$@"
