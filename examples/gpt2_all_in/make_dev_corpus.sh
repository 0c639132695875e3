#!/usr/bin/env bash
# Makes the dev corpus of train.py anew, from the documentation and the docstrings of this repository:
#   bash examples/gpt2_all_in/make_dev_corpus.sh [FOLDER]
#
# SCALE=tiny makes a small one of its first documents, in the folder dev-corpus unless another is given. It starts no training.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
case "${SCALE:-full}" in
    full) FOLDER=${1:-examples/gpt2_all_in/data} ENTRIES=2048 DOCUMENTS=1000000 ;;
    tiny) FOLDER=${1:-dev-corpus} ENTRIES=400 DOCUMENTS=50 ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac

mkdir -p "$FOLDER"
"$PYTHON" examples/gpt2_all_in/dev_corpus.py > "$FOLDER/dev-all.jsonl"
head -n "$DOCUMENTS" "$FOLDER/dev-all.jsonl" > "$FOLDER/dev.jsonl"
rm "$FOLDER/dev-all.jsonl"
"$PYTHON" tools/train_tokenizer.py --input "$FOLDER/dev.jsonl" --vocab-size "$ENTRIES" --output-prefix "$FOLDER/dev"
mv "$FOLDER/dev-vocab.json" "$FOLDER/vocab.json"
mv "$FOLDER/dev-merges.txt" "$FOLDER/merges.txt"
rm -f "$FOLDER"/dev_text_document.*
"$PYTHON" tools/preprocess_data.py --input "$FOLDER/dev.jsonl" --output-prefix "$FOLDER/dev" --append-eod --workers 1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$FOLDER/vocab.json" --merge-file "$FOLDER/merges.txt"
rm "$FOLDER/dev.jsonl" "$FOLDER/dev-tokenizer.json"
