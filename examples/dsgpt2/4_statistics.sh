#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Counts how many tokens documents have: what is beyond the context is cut off in training.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run $PYTHON tools/corpus/corpus_store.py lengths --config "$DSGPT2_DIR/db.json" $TOKENIZER
