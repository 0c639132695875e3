#!/usr/bin/env bash
# Pretrains a 1.3B-parameter GPT with tensor, pipeline and data parallelism, started by torchrun on every node.
#
#   one node:    bash examples/pretrain_gpt_distributed.sh
#   two nodes:   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_gpt_distributed.sh    (and NODE_RANK=1 on the other)
#
# 8 GPUs per node: 2 tensor-parallel x 2 pipeline ranks hold a model replica; the rest is data parallel, with ZeRO 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-6000}"

CHECKPOINT_PATH="${CHECKPOINT_PATH:-checkpoints/gpt2_1.3b}"
VOCAB_FILE="${VOCAB_FILE:-gpt2-vocab.json}"
MERGE_FILE="${MERGE_FILE:-gpt2-merges.txt}"
DATA_PATH="${DATA_PATH:-my-gpt2_text_document}"

torchrun \
    --nproc-per-node "$GPUS_PER_NODE" \
    --nnodes "$NNODES" \
    --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" \
    --master-port "$MASTER_PORT" \
    pretrain_gpt.py \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --zero-stage 1 \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 4 \
    --global-batch-size 256 \
    --rampup-batch-size 32 32 2000000 \
    --lr 2.0e-4 \
    --min-lr 2.0e-5 \
    --lr-decay-style cosine \
    --lr-decay-samples 70000000 \
    --lr-warmup-samples 200000 \
    --train-samples 73000000 \
    --weight-decay 0.1 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --checkpoint-activations \
    --data-path "$DATA_PATH" \
    --vocab-file "$VOCAB_FILE" \
    --merge-file "$MERGE_FILE" \
    --split 949,50,1 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --save-interval 1000 \
    --log-interval 10 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" \
    "$@"
