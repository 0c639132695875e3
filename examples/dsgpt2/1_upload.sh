#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Puts the raw texts into the database, each file into a collection of its own, and says what is there.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run mkdir -p "$DSGPT2_DIR"
run $PYTHON examples/dsgpt2/generate_texts.py --output-folder "$DSGPT2_DIR/raw" --documents "$DOCUMENTS"
write_config db_raw raw_web raw_news
for name in web news; do
    run $PYTHON tools/corpus/corpus_store.py import "$DSGPT2_DIR/raw/$name.jsonl" --config "$DSGPT2_DIR/db_raw.json" --collection "raw_$name"
done
run $PYTHON tools/corpus/corpus_store.py stat --config "$DSGPT2_DIR/db_raw.json"
