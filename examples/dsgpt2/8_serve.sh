#!/usr/bin/env bash
# Serves the chatbot: curl -G localhost:4001/generate --data-urlencode 'sentence=Merhaba!'
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

exec $PYTHON tools/serve.py --load "$DSGPT2_DIR/checkpoints/chat" --port "${PORT:-4001}" --cors-origin '*' "$@"
