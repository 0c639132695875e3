#!/usr/bin/env bash
# shellcheck disable=SC2086,SC2206  # some variables of settings.sh hold several words
# Serves the chatbot: curl -G localhost:4001/generate --data-urlencode 'sentence=Merhaba!'
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

SERVE=($PYTHON tools/serve.py --load "$DSGPT2_DIR/checkpoints/chat" --port "${PORT:-4001}" --cors-origin '*' "$@")
if [ -n "$DRY_RUN" ]; then
    run "${SERVE[@]}"
else
    exec "${SERVE[@]}"
fi
