#!/usr/bin/env bash
# Pretrains a 345M-parameter GPT in one process: on one GPU, or (slowly) on the CPU.
#
#   DATA_PATH=my-gpt2_text_document bash examples/pretrain_gpt.sh [more flags]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CHECKPOINT_PATH="${CHECKPOINT_PATH:-checkpoints/gpt2_345m}"
VOCAB_FILE="${VOCAB_FILE:-gpt2-vocab.json}"
MERGE_FILE="${MERGE_FILE:-gpt2-merges.txt}"
DATA_PATH="${DATA_PATH:-my-gpt2_text_document}"

python pretrain_gpt.py \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 4 \
    --global-batch-size 8 \
    --lr 0.00015 \
    --min-lr 1.0e-5 \
    --lr-decay-style cosine \
    --lr-decay-iters 320000 \
    --lr-warmup-fraction .01 \
    --train-iters 500000 \
    --weight-decay 1e-2 \
    --clip-grad 1.0 \
    --bf16 \
    --checkpoint-activations \
    --data-path "$DATA_PATH" \
    --vocab-file "$VOCAB_FILE" \
    --merge-file "$MERGE_FILE" \
    --split 949,50,1 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --save-interval 10000 \
    --log-interval 100 \
    --eval-interval 1000 \
    --eval-iters 10 \
    "$@"
