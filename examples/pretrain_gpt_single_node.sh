#!/usr/bin/env bash
# Pretrains a 345M-parameter GPT on the GPUs of one machine, started by DeepSpeed's launcher.
#
#   N_GPUS=4 bash examples/pretrain_gpt_single_node.sh [more flags]
#
# On a CPU: PRECISION=--bf16 bash examples/pretrain_gpt_single_node.sh --exit-interval 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CHECKPOINT_PATH="${CHECKPOINT_PATH:-checkpoints/gpt2}"
VOCAB_FILE="${VOCAB_FILE:-gpt2-vocab.json}"
MERGE_FILE="${MERGE_FILE:-gpt2-merges.txt}"
DATA_PATH="${DATA_PATH:-my-gpt2_text_document}"
PRECISION="${PRECISION:---fp16}"
N_GPUS="${N_GPUS:-1}"

GPT_FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 4
    --global-batch-size 8
    --lr 0.00015
    --train-iters 500000
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --lr-warmup-fraction .01
    "$PRECISION"
)

OUTPUT_FLAGS=(
    --log-interval 10
    --save-interval 500
    --eval-interval 100
    --eval-iters 10
    --checkpoint-activations
)

DATA_FLAGS=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --data-path "$DATA_PATH"
)

deepspeed --num_gpus "$N_GPUS" pretrain_gpt.py "${GPT_FLAGS[@]}" "${OUTPUT_FLAGS[@]}" "${DATA_FLAGS[@]}" "$@"
