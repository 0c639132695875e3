#!/usr/bin/env bash
# Step 3: pretraining with 2 tensor and 2 pipeline ranks, here on one machine's CPU. The same command resumes.
#
#   bash examples/turkish/pretrain.sh [more flags]
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "${SHAPE[@]}" "${TOKENS[@]}" \
    --data-path "$WORK_DIR/tr_text_document" --split 95,5,0 --micro-batch-size 4 --global-batch-size 16 \
    --train-iters "$STEPS" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.95 \
    --save "$WORK_DIR/pretrained" --load "$WORK_DIR/pretrained" --run-dir "$WORK_DIR/run-pretrained" \
    --save-interval 100 --log-interval 20 --eval-interval 100 --eval-iters 4 "$@"
