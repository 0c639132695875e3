#!/usr/bin/env bash
# Makes the dev corpus of train.py anew, from the documentation and the docstrings of this repository:
#   bash examples/gpt2_all_in/make_dev_corpus.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
FOLDER=${1:-examples/gpt2_all_in/data}
PYTHON=${PYTHON:-python}

mkdir -p "$FOLDER"
"$PYTHON" examples/gpt2_all_in/dev_corpus.py > "$FOLDER/dev.jsonl"
"$PYTHON" tools/train_tokenizer.py --input "$FOLDER/dev.jsonl" --vocab-size 2048 --output-prefix "$FOLDER/dev"
mv "$FOLDER/dev-vocab.json" "$FOLDER/vocab.json"
mv "$FOLDER/dev-merges.txt" "$FOLDER/merges.txt"
rm -f "$FOLDER"/dev_text_document.*
"$PYTHON" tools/preprocess_data.py --input "$FOLDER/dev.jsonl" --output-prefix "$FOLDER/dev" --append-eod --workers 1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$FOLDER/vocab.json" --merge-file "$FOLDER/merges.txt"
rm "$FOLDER/dev.jsonl" "$FOLDER/dev-tokenizer.json"
