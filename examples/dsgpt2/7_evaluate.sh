#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# The loss of the pretrained network on documents that were held out, and how many questions the chatbot answers word for word.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run $TRAIN --config_train "$DSGPT2_DIR/db.json" --workspace pretrained --restart True --tr_ratio 0.95 \
    --train_iters "${TRAIN_ITERS:-200}" --run-dir "$DSGPT2_DIR/run-evaluated" --eval-only

if [ -n "$DRY_RUN" ]; then
    run $PYTHON tools/chat.py --load "$DSGPT2_DIR/checkpoints/chat" --greedy --max-new-tokens 40
    exit
fi
sed 's/.*"answer": "\([^"]*\)".*/\1/' "$DSGPT2_DIR/raw/chat.jsonl" >"$DSGPT2_DIR/expected.txt"
sed 's/.*"question": "\([^"]*\)".*/\1\n\/reset/' "$DSGPT2_DIR/raw/chat.jsonl" |
    run $PYTHON tools/chat.py --load "$DSGPT2_DIR/checkpoints/chat" --greedy --max-new-tokens 40 >"$DSGPT2_DIR/answers.txt"
RIGHT="$(paste "$DSGPT2_DIR/expected.txt" "$DSGPT2_DIR/answers.txt" | awk -F '\t' '$1 == $2' | wc -l)"
echo "right answers: $((RIGHT)) of $(($(wc -l <"$DSGPT2_DIR/expected.txt")))"
