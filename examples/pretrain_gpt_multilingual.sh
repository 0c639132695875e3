#!/usr/bin/env bash
# Pretrains on a blend of two languages, each with a validation set of its own: 7 parts English, 3 parts Turkish.
#
#   ENGLISH=en_text_document TURKISH=tr_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       bash examples/pretrain_gpt_multilingual.sh [more flags]
#
# Without ENGLISH small corpora of both are made. The last 5 % of each corpus are for validation only; the log shows the loss of each
# source. What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
DEMO_DATA="${DEMO_DATA:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/data/multilingual}"
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/multilingual}"
if [ -z "${ENGLISH:-}" ]; then
    ENGLISH="$DEMO_DATA/en_text_document"
    TURKISH="$DEMO_DATA/tr_text_document"
    VOCAB_FILE="$DEMO_DATA/demo-vocab.json"
    MERGE_FILE="$DEMO_DATA/demo-merges.txt"
    if [ -z "$DRY_RUN" ]; then
        make_vocabulary "$DEMO_DATA" english tr
        make_tokens "$DEMO_DATA" en english
        make_tokens "$DEMO_DATA" tr tr
    fi
fi

FLAGS=(
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
    --lr-decay-iters 100000
    --lr-warmup-fraction .01
    --train-iters 100000
    --bf16
    --checkpoint-activations
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
)

DATA=(
    --train-weighted-split-paths "TRAIN: 0.7 0:0.95 $ENGLISH, 0.3 0:0.95 ${TURKISH:?}"
    --valid-weighted-split-paths "ENGLISH: 1 0.95:1 $ENGLISH" "TURKISH: 1 0.95:1 $TURKISH"
    --log-per-source-loss
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}"
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}"
)

start_training "$(processes_here 2)" "${FLAGS[@]}" "${DATA[@]}" -- "$@"
