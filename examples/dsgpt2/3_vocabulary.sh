#!/usr/bin/env bash
# shellcheck disable=SC2086  # some variables of settings.sh hold several words
# Draws documents from the database, trains a byte-level vocabulary with dsGPT2's special tokens on them, and tests it.
# shellcheck source=examples/dsgpt2/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run mkdir -p "$DSGPT2_DIR/vocab/vocab_$VOCABULARY_SIZE"
run $PYTHON tools/corpus/corpus_store.py fetch --config "$DSGPT2_DIR/db.json" --nsample "${NSAMPLE:-$DOCUMENTS}" --num-process 2 \
    --output-prefix "$DSGPT2_DIR/vocab/text"
run $PYTHON tools/train_tokenizer.py --input "$DSGPT2_DIR/vocab/text*.txt" \
    --output-prefix "$DSGPT2_DIR/vocab/vocab_$VOCABULARY_SIZE/demo" --vocab-size "$VOCABULARY_SIZE" --special-tokens dsgpt2
run $PYTHON tools/corpus/check_tokenizer.py --tokenizer-type GPT2BPETokenizer $TOKENIZER --text '안녕하세요 👍🏽' 'Iğdır İstanbul çok güzel' --require-exact
