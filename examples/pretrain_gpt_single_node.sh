#!/usr/bin/env bash
# Pretrains a 345M-parameter GPT on the GPUs of one machine, started by DeepSpeed's launcher.
#
#   DATA_PATH=my-gpt2_text_document bash examples/pretrain_gpt_single_node.sh [more flags]
#
# DEVICES=4 uses four GPUs, PRECISION=--fp16 half precision. What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
LAUNCHER="${LAUNCHER:-deepspeed}"
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/gpt2}"
PRECISION="${PRECISION:---bf16}"
find_data

GPT_FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 4
    --global-batch-size 32
    --lr 0.00015
    --train-iters 500000
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    "$PRECISION"
)

OUTPUT_FLAGS=(
    --log-interval 10
    --save-interval 500
    --eval-interval 100
    --eval-iters 10
    --checkpoint-activations
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
)

start_training "$(processes_here 2)" "${GPT_FLAGS[@]}" "${OUTPUT_FLAGS[@]}" "${DATA[@]}" -- "$@"
