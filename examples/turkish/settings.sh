# shellcheck shell=bash disable=SC2034  # the scripts that source this use the variables
# Sourced by the scripts of this folder: where things are, and what is trained. The environment wins over every value here.
#
#   WORK_DIR       outputs of all steps (./turkish-demo)
#   PYTHON         an interpreter with the project installed; without it examples/environment.sh finds or makes one
#   DRY_RUN=1      prints the commands and runs none
#   SCALE=tiny     few documents, a tiny network and four steps
set -euo pipefail

WORK_DIR="${WORK_DIR:-turkish-demo}"
case "$WORK_DIR" in /*) ;; *) WORK_DIR="$PWD/$WORK_DIR" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DRY_RUN="${DRY_RUN:-}"
# shellcheck source=examples/environment.sh
source examples/environment.sh
if [ -n "$DRY_RUN" ]; then
    PYTHON="${PYTHON:-python}"
fi
if [ -z "${PYTHON:-}" ]; then
    prepare_environment hf
    export PYTHON
fi
export WORK_DIR
[ -n "$DRY_RUN" ] || mkdir -p "$WORK_DIR"

case "${SCALE:-full}" in
    full | tiny) ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac
if [ "${SCALE:-full}" = tiny ]; then
    DOCUMENTS="${DOCUMENTS:-300}" VOCAB_SIZE="${VOCAB_SIZE:-600}" STEPS="${STEPS:-4}" EPOCHS="${EPOCHS:-1}"
    QUESTIONS="${QUESTIONS:-4}" LENGTH="${LENGTH:-4}"
    NETWORK="${NETWORK:---num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64}"
fi
DOCUMENTS="${DOCUMENTS:-4000}"
VOCAB_SIZE="${VOCAB_SIZE:-4000}"
STEPS="${STEPS:-400}"
EPOCHS="${EPOCHS:-20}"
read -r -a SHAPE <<<"${NETWORK:---num-layers 4 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128}"
SHAPE+=(--hidden-dropout 0 --attention-dropout 0)
TOKENS=(--tokenizer-type GPT2BPETokenizer --vocab-file "$WORK_DIR/tr-vocab.json" --merge-file "$WORK_DIR/tr-merges.txt")
