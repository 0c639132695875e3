# shellcheck shell=bash disable=SC2034,SC2086  # the scripts that source this use the variables, some of which hold several words
# Sourced by the scripts of this folder: where everything lies, and the network. Any variable can be set before.
#
#   DSGPT2_DIR   folder of all files                      PYTHON     interpreter with the project installed
#   RANKS        processes that train together            MODEL      112m, 112m_half or 345m, with flags that change it
#   DATABASE     sqlite:///FILE or mongodb://host:27017   DOCUMENTS  generated documents of each collection
#   DRY_RUN=1    prints the commands and runs none        SCALE=tiny few documents, a smaller network, four steps, one process
#
# The default network is a tiny one that two CPU cores train in a minute; MODEL=112m is dsGPT2's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DRY_RUN="${DRY_RUN:-}"
# shellcheck source=examples/environment.sh
source examples/environment.sh
DSGPT2_DIR="${DSGPT2_DIR:-dsgpt2-demo}"
PYTHON="${PYTHON:-python}"
case "${SCALE:-full}" in
    full) ;;
    tiny)
        RANKS="${RANKS:-1}" DOCUMENTS="${DOCUMENTS:-60}" VOCABULARY_SIZE="${VOCABULARY_SIZE:-500}"
        TRAIN_ITERS="${TRAIN_ITERS:-4}" FINETUNE_ITERS="${FINETUNE_ITERS:-4}"
        MODEL="${MODEL:-112m --truncated_len 48 --num-layers 2 --hidden-size 32 --num-attention-heads 4}"
        ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac
RANKS="${RANKS:-2}"
DOCUMENTS="${DOCUMENTS:-2000}"
DATABASE="${DATABASE:-sqlite:///$DSGPT2_DIR/corpus.db}"
MODEL="${MODEL:-112m --truncated_len 80 --num-layers 2 --hidden-size 64 --num-attention-heads 4}"
VOCABULARY_SIZE="${VOCABULARY_SIZE:-800}"

VOCABULARY="--vocab_load_dir $DSGPT2_DIR/vocab --vocab_id_dir vocab_$VOCABULARY_SIZE"
TOKENIZER="--vocab-file $DSGPT2_DIR/vocab/vocab_$VOCABULARY_SIZE/demo-vocab.json
    --merge-file $DSGPT2_DIR/vocab/vocab_$VOCABULARY_SIZE/demo-merges.txt"
LAUNCH="$PYTHON"
[ "$RANKS" = 1 ] || LAUNCH="$PYTHON -m torch.distributed.run --standalone --nproc-per-node $RANKS"
TRAIN="$LAUNCH examples/dsgpt2/ds_trainer.py --model_select $MODEL $VOCABULARY --ckpt_dir $DSGPT2_DIR/checkpoints
    --deepspeed --deepspeed_config examples/dsgpt2/ds_config.json --micro-batch-size $((16 / RANKS))
    --lr 4e-3 --adam-beta1 0.9 --adam-beta2 0.95 --lr-warmup-fraction 0.1"

# write_config NAME COLLECTION...   makes $DSGPT2_DIR/NAME.json, which names collections of the database
write_config() {
    local name="$1" collections
    shift
    [ -z "$DRY_RUN" ] || return 0
    collections="$(printf '"%s", ' "$@")"
    printf '{"MONGO_CONNECTION_STRING": "%s", "MONGO_CONNECTION_DB": "dsgpt2", "COLLECTIONS": [%s]}\n' \
        "$DATABASE" "${collections%, }" >"$DSGPT2_DIR/$name.json"
}
