#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Copies each collection without texts of fewer than 5 characters and without texts that were there before.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run mkdir -p "$DSGPT2_DIR/clean"
write_config db web news
for name in web news; do
    run $PYTHON tools/corpus/clean_corpus.py --input "$DSGPT2_DIR/db_raw.json?collection=raw_$name" \
        --output "$DSGPT2_DIR/clean/$name.jsonl" --min-characters 5 --exact-duplicates --report "$DSGPT2_DIR/clean/$name-report.json"
    run $PYTHON tools/corpus/corpus_store.py import "$DSGPT2_DIR/clean/$name.jsonl" --config "$DSGPT2_DIR/db.json" --collection "$name"
done
run $PYTHON tools/corpus/corpus_store.py stat --config "$DSGPT2_DIR/db.json"
