# Sourced by the scripts of this folder: where things are, and what is trained. The environment wins over every value here.
#
#   WORK_DIR   outputs of all steps (./turkish-demo)
#   PYTHON     an interpreter with the project installed; without it examples/environment.sh finds or makes one
set -euo pipefail

WORK_DIR="${WORK_DIR:-turkish-demo}"
case "$WORK_DIR" in /*) ;; *) WORK_DIR="$PWD/$WORK_DIR" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -z "${PYTHON:-}" ]; then
    source examples/environment.sh
    prepare_environment hf
    export PYTHON
fi
export WORK_DIR
mkdir -p "$WORK_DIR"

DOCUMENTS="${DOCUMENTS:-4000}"
VOCAB_SIZE="${VOCAB_SIZE:-4000}"
STEPS="${STEPS:-400}"
EPOCHS="${EPOCHS:-20}"
NETWORK="${NETWORK:---num-layers 4 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128}"
NETWORK="$NETWORK --hidden-dropout 0 --attention-dropout 0"
TOKENS="--tokenizer-type GPT2BPETokenizer --vocab-file $WORK_DIR/tr-vocab.json --merge-file $WORK_DIR/tr-merges.txt"
