#!/usr/bin/env bash
# Pretrains a 345M-parameter BERT in one process, on one GPU: the published command line.
#
#   DATA_PATH=my-bert_text_sentence VOCAB_FILE=bert-vocab.txt bash examples/pretrain_bert.sh [more flags]
#
# What else can be set (DRY_RUN=1, SCALE=tiny) is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
# shellcheck disable=SC2034  # start_training uses it
PROGRAM=pretrain_bert.py
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/bert_345m}"
find_sentences

FLAGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --micro-batch-size 4
    --global-batch-size 8
    --seq-length 512
    --max-absolute-position-embeddings 512
    --position-embedding-type absolute
    --train-iters 2000000
    --lr-decay-iters 990000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --data-impl mmap
    --split 949,50,1
    --lr 0.0001
    --min-lr 0.00001
    --lr-decay-style linear
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --fp16
)

start_training 1 "${FLAGS[@]}" "${DATA[@]}" -- "$@"
