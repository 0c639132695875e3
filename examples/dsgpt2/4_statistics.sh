#!/usr/bin/env bash
# Counts how many tokens documents have: what is beyond the context is cut off in training.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

$PYTHON tools/corpus_store.py lengths --config "$DSGPT2_DIR/db.json" $TOKENIZER
