# shellcheck shell=bash
# Sourced by the training scripts of this folder: finds Python and data, and starts the trainer.
#
#   find_data               sets DATA, the flags of data and tokenizer: from DATA_PATH, VOCAB_FILE and MERGE_FILE, or, where
#                           DATA_PATH is not set, from a small English corpus that is made once
#   find_sentences          the same for BERT: token files with a sequence for each sentence, and a WordPiece vocabulary
#   start_training RANKS FLAGS... -- MORE...
#                           starts PROGRAM, pretrain_gpt.py unless a script sets it, with the flags; MORE, the words of the script's command line, win over them
#
# Variables that every script understands:
#
#   DRY_RUN=1      prints the command and starts nothing
#   SCALE=tiny     trains a network of the same shape for four steps that fits two CPU cores, on at most four processes
#   DEVICES        processes on this machine; also as N_GPUS and GPUS_PER_NODE, as upstream's scripts call it
#   PYTHON         interpreter with the project installed
#   LAUNCHER       torchrun or deepspeed, where there is more than one process
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT      for several nodes: the same script on each, with its own NODE_RANK
#   DEMO_DATA      folder of the English corpus
#
# Paths are relative to the folder that a script is started from.
set -euo pipefail

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$PROJECT/examples/environment.sh"
DRY_RUN="${DRY_RUN:-}"
SCALE="${SCALE:-full}"
LAUNCHER="${LAUNCHER:-torchrun}"
NNODES="${NNODES:-1}"
DEVICES="${DEVICES:-${N_GPUS:-${GPUS_PER_NODE:-}}}"
DEMO_DATA="${DEMO_DATA:-$PROJECT/data/english}"
TINY_RANKS=4
# shellcheck disable=SC2034  # the scripts use it
CHECKPOINTS=checkpoints   # the folder of CHECKPOINT_PATH, where that is not set
# shellcheck disable=SC2034
[ "$SCALE" = full ] || CHECKPOINTS=checkpoints/tiny_networks
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$PROJECT/.venv/bin/python" ]; then
        PYTHON="$PROJECT/.venv/bin/python"
    fi
fi
case "$SCALE" in
    full | tiny) ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac

# How many processes this machine is asked to run: DEVICES, or its GPUs, or as many as are given.
processes_here() {
    local unless_known="$1"
    if [ -n "${DEVICES:-}" ]; then
        printf '%s' "$DEVICES"
    elif [ "$SCALE" = full ] && has_gpu; then
        nvidia-smi -L | wc -l | tr -d ' '
    else
        printf '%s' "$unless_known"
    fi
}

# make_tokens FOLDER NAME LANGUAGE   encodes a demo corpus with the vocabulary of the folder, unless that is done
make_tokens() {
    local folder="$1" name="$2" language="$3"
    [ ! -f "$folder/${name}_text_document.idx" ] || return 0
    "$PYTHON" "$PROJECT/tools/preprocess_data.py" --input "$folder/$language.jsonl" --output-prefix "$folder/$name" --append-eod \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$folder/demo-vocab.json" --merge-file "$folder/demo-merges.txt"
}

# make_vocabulary FOLDER LANGUAGES   collects the corpora and trains one vocabulary on them, unless that is done
make_vocabulary() {
    local folder="$1" language
    shift
    local -a texts=()
    mkdir -p "$folder"
    for language in "$@"; do
        texts+=("$folder/$language.jsonl")
        [ -f "$folder/$language.jsonl" ] ||
            "$PYTHON" "$PROJECT/tools/corpus/build_demo_corpus.py" --lang "$language" --output "$folder/$language.jsonl"
    done
    [ -f "$folder/demo-merges.txt" ] ||
        "$PYTHON" "$PROJECT/tools/train_tokenizer.py" --input "${texts[@]}" --output-prefix "$folder/demo" --vocab-size 4000
}

find_data() {
    if [ -z "${DATA_PATH:-}" ]; then
        VOCAB_FILE="$DEMO_DATA/demo-vocab.json"
        MERGE_FILE="$DEMO_DATA/demo-merges.txt"
        DATA_PATH="$DEMO_DATA/demo_text_document"
        if [ -z "$DRY_RUN" ]; then
            make_vocabulary "$DEMO_DATA" english
            make_tokens "$DEMO_DATA" demo english
        fi
    fi
    # shellcheck disable=SC2034  # the scripts that source this use it
    DATA=(--data-path "$DATA_PATH" --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}")
}

find_sentences() {
    local vocabulary="${VOCAB_FILE:-bert-vocab.txt}" sentences="${DATA_PATH:-my-bert_text_sentence}"
    local -a tokenizer
    if [ -z "${DATA_PATH:-}" ] && [ "$SCALE" = tiny ]; then
        vocabulary="$DEMO_DATA/bert-vocab.txt" sentences="$DEMO_DATA/bert_text_sentence"
        tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$vocabulary")
        if [ -z "$DRY_RUN" ] && [ ! -f "$sentences.idx" ]; then
            mkdir -p "$DEMO_DATA"
            [ -f "$DEMO_DATA/english.jsonl" ] ||
                "$PYTHON" "$PROJECT/tools/corpus/build_demo_corpus.py" --lang english --output "$DEMO_DATA/english.jsonl"
            "$PYTHON" "$PROJECT/tools/train_tokenizer.py" --input "$DEMO_DATA/english.jsonl" --output-prefix "$DEMO_DATA/bert" \
                --model-type wordpiece --lower-case --vocab-size 1000
            "$PYTHON" "$PROJECT/tools/preprocess_data.py" --input "$DEMO_DATA/english.jsonl" --output-prefix "$DEMO_DATA/bert" \
                --split-sentences "${tokenizer[@]}"
        fi
    fi
    # shellcheck disable=SC2034  # the scripts that source this use it
    DATA=(--data-path "$sentences" --vocab-file "$vocabulary")
}

# The flags that make a network tiny; they stand behind those of the script.
tiny_flags() {
    local word
    TINY=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64)
    TINY+=(--micro-batch-size 2 --global-batch-size 8 --log-interval 1 --save-interval 4 --eval-interval 4 --eval-iters 1)
    for word in "$@"; do
        case "$word" in
            --model-preset) TINY+=(--ffn-hidden-size 128 --num-query-groups 2 --kv-channels 16) ;;
            --rampup-batch-size) TINY+=(--rampup-batch-size 4 4 16) ;;
            --lr-decay-iters) TINY+=(--lr-decay-iters 4) ;;
            --train-iters) TINY+=(--train-iters 4) ;;
            --train-samples) TINY+=(--train-samples 32 --lr-decay-samples 32 --lr-warmup-samples 8) ;;
        esac
    done
}

start_training() {
    local ranks="$1"
    shift
    local -a flags=() more=() command=("$PYTHON") TINY=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        [ "$SCALE $1" = "tiny --fp16" ] || flags+=("$1")   # which CPUs do not have
        shift
    done
    [ $# -eq 0 ] || shift
    more=("$@")
    if [ "$SCALE" = tiny ]; then
        tiny_flags "${flags[@]}"
        [ "$ranks" -le "$TINY_RANKS" ] || ranks="$TINY_RANKS"
    fi
    if [ "$ranks" -gt 1 ] || [ "$NNODES" -gt 1 ]; then
        if [ "$LAUNCHER" = deepspeed ]; then
            command+=(-m deepspeed.launcher.runner --num_gpus "$ranks")
        else
            command+=(-m torch.distributed.run --nproc-per-node "$ranks" --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}")
            command+=(--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-6000}")
        fi
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    run "${command[@]}" "$PROJECT/${PROGRAM:-pretrain_gpt.py}" "${flags[@]}" ${TINY[@]+"${TINY[@]}"} ${more[@]+"${more[@]}"}
}
