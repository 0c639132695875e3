#!/usr/bin/env bash
# Step 4: fine-tuning on questions with answers, in one process: a checkpoint loads into any layout. Only answers are learned.
#
#   bash examples/turkish/finetune.sh [more flags]
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run "$PYTHON" pretrain_gpt.py --finetune --load "$WORK_DIR/pretrained" "${SHAPE[@]}" "${TOKENS[@]}" \
    --data-path "$WORK_DIR/tr-questions.jsonl" --split 1,0,0 --data-cache-path "$WORK_DIR/cache" \
    --chat-template plain --loss-on-targets-only --pack-examples --epochs "$EPOCHS" \
    --micro-batch-size 4 --global-batch-size 4 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
    --save "$WORK_DIR/tuned" --run-dir "$WORK_DIR/run-tuned" --save-interval 100 --log-interval 50 --eval-iters 0 "$@"
