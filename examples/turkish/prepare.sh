#!/usr/bin/env bash
# Step 1 and 2: a Turkish corpus, a byte-level BPE vocabulary learned from it, and the token files.
#
#   bash examples/turkish/prepare.sh
#
# For a corpus of your own put a jsonl file with a "text" on each line at $WORK_DIR/tr.jsonl first.
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ ! -f "$WORK_DIR/tr.jsonl" ]; then
    run "$PYTHON" tools/corpus/build_demo_corpus.py --lang tr --documents "$DOCUMENTS" --output "$WORK_DIR/tr.jsonl" \
        --held-out "$WORK_DIR/tr-held-out.txt" --questions "$WORK_DIR/tr-questions.jsonl"
fi
run "$PYTHON" tools/train_tokenizer.py --input "$WORK_DIR/tr.jsonl" --output-prefix "$WORK_DIR/tr" --vocab-size "$VOCAB_SIZE"
run "$PYTHON" tools/corpus/check_tokenizer.py "${TOKENS[@]}" --input "$WORK_DIR/tr.jsonl" --text 'ILIK İĞDE, ılık iğde: Iğdır, İĞDİR'
run "$PYTHON" tools/preprocess_data.py --input "$WORK_DIR/tr.jsonl" --output-prefix "$WORK_DIR/tr" --append-eod --workers 2 "${TOKENS[@]}"
