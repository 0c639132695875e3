#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Pretrains on the documents of the database. After an interruption: bash examples/dsgpt2/5_train.sh --restart True
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run $TRAIN --train_mode pretrain --config_train "$DSGPT2_DIR/db.json" --workspace pretrained --run-dir "$DSGPT2_DIR/run-pretrained" \
    --train_iters "${TRAIN_ITERS:-200}" --ckpt_save_steps 100 --tr_ratio 0.95 --eval-interval 50 "$@"
