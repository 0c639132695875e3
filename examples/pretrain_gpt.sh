#!/usr/bin/env bash
# Pretrains a 345M-parameter GPT in one process: on one GPU, or (slowly) on the CPU.
#
#   DATA_PATH=my-gpt2_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt bash examples/pretrain_gpt.sh [more flags]
#
# What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/gpt2_345m}"
find_data

FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 4
    --global-batch-size 8
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
    --save-interval 10000
    --log-interval 100
    --eval-interval 1000
    --eval-iters 10
)

start_training 1 "${FLAGS[@]}" "${DATA[@]}" -- "$@"
