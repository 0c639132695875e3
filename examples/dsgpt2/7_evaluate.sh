#!/usr/bin/env bash
# The loss of the pretrained network on documents that were held out, and how many of its questions the chatbot answers word for word.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

$TRAIN --config_train "$DSGPT2_DIR/db.json" --workspace pretrained --restart True --tr_ratio 0.95 \
    --train_iters "${TRAIN_ITERS:-200}" --run-dir "$DSGPT2_DIR/run-evaluated" --eval-only
cp "$DSGPT2_DIR/raw/chat.jsonl" examples/dsgpt2/tasks.yaml "$DSGPT2_DIR"
$PYTHON tools/evaluate.py --load "$DSGPT2_DIR/checkpoints/chat" --tasks "$DSGPT2_DIR/tasks.yaml" --no-baselines --output "$DSGPT2_DIR/results.json"
