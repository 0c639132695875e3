#!/usr/bin/env bash
# Pretrains a network of Llama 3.2 1B's shape on the GPUs of one or several nodes: rotary positions, RMSNorm, SwiGLU, grouped queries.
#
#   DATA_PATH=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt bash examples/pretrain_llama.sh [more flags]
#
# PRESET=llama-3.1-8b and other names of docs/models.md. What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
PRESET="${PRESET:-llama-3.2-1b}"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/$PRESET}"
find_data

FLAGS=(
    --model-preset "$PRESET"
    --tensor-model-parallel-size "${TENSOR:-2}"
    --zero-stage 1
    --seq-length 4096
    --micro-batch-size 2
    --global-batch-size 256
    --train-iters 100000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 100000
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --checkpoint-activations
    --split "99,1,0"
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)

start_training "$(processes_here 8)" "${FLAGS[@]}" "${DATA[@]}" -- "$@"
