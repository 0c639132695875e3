#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Puts questions with answers into the database and fine-tunes the pretrained network on them. The same command continues it.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

write_config db_chat chat
run $PYTHON tools/corpus/corpus_store.py import "$DSGPT2_DIR/raw/chat.jsonl" --config "$DSGPT2_DIR/db_chat.json" --collection chat --pair-keys question answer
run $TRAIN --train_mode finetune --config_train "$DSGPT2_DIR/db_chat.json" --workspace chat --workspace_finetune pretrained \
    --run-dir "$DSGPT2_DIR/run-chat" --train_iters "${FINETUNE_ITERS:-200}" --ckpt_save_steps 100 --tr_ratio 1 --eval-iters 0 "$@"
