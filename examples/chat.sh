#!/usr/bin/env bash
# From nothing to a network that answers: pretrains a tiny GPT on this machine's CPU, fine-tunes it on questions and answers about this
# project, measures how many it answers word for word, and lets it answer some in the terminal. Needs only Python 3.10-3.13 with pip.
#
#   bash examples/chat.sh [WORK_DIR]        WORK_DIR is ./chat-demo unless given; run it again to continue where it stopped
#
# Ends with an error unless at least 95 % of the training questions are answered right. The answers to questions in other words
# (examples/data/paraphrases.jsonl) are measured as well: a network of this size learns by heart and seldom knows those.
# See examples/environment.sh for where things are installed and how to change that. DRY_RUN=1 prints the commands and runs none;
# SCALE=tiny trains a smaller network for a few steps, which learns nothing, in one process.
set -euo pipefail

WORK_DIR="${1:-chat-demo}"
case "$WORK_DIR" in /*) ;; *) WORK_DIR="$PWD/$WORK_DIR" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DRY_RUN="${DRY_RUN:-}"
HIDDEN=192 VOCABULARY=2000
case "${SCALE:-full}" in
    full) ;;
    tiny)
        HIDDEN=32 VOCABULARY=500 LEAST_RIGHT="${LEAST_RIGHT:-0}" PRETRAINING_STEPS="${PRETRAINING_STEPS:-4}"
        EPOCHS="${EPOCHS:-1}" RANKS="${RANKS:-1}"
        ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac
source examples/environment.sh
if [ -n "$DRY_RUN" ]; then
    PYTHON="${PYTHON:-python}"
elif [ "${SCALE:-full}" = tiny ] && [ -n "${PYTHON:-}" ]; then
    mkdir -p "$WORK_DIR"   # with an interpreter that has the project installed
else
    prepare_environment plot
    mkdir -p "$WORK_DIR"
fi
STARTED=$SECONDS

SEED="${SEED:-1234}"
LEAST_RIGHT="${LEAST_RIGHT:-0.95}"
PRETRAINING_STEPS="${PRETRAINING_STEPS:-120}"
EPOCHS="${EPOCHS:-40}"
RANKS="${RANKS:-2}"

NETWORK=(--num-layers 4 --hidden-size "$HIDDEN" --num-attention-heads 4 --num-query-groups 2 --swiglu --no-add-bias-linear
    --position-embedding-type rope --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 --seq-length 128)
TOKENS=(--vocab-file "$WORK_DIR/demo-vocab.json" --merge-file "$WORK_DIR/demo-merges.txt" --tokenizer-type GPT2BPETokenizer)
ADAM=(--adam-beta2 0.95 --weight-decay 0.1 --lr-decay-style cosine --lr-warmup-fraction 0.1 --seed "$SEED")
TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py)

step() { printf '\n[%3d s] %s\n' $((SECONDS - STARTED)) "$*"; }

step "1/5 text and vocabulary: the sources of this Python"
if [ ! -f "$WORK_DIR/demo_text_document.idx" ]; then
    [ -f "$WORK_DIR/demo.jsonl" ] || run "$PYTHON" tools/corpus/build_demo_corpus.py --output "$WORK_DIR/demo.jsonl"
    run "$PYTHON" tools/train_tokenizer.py --input "$WORK_DIR/demo.jsonl" --output-prefix "$WORK_DIR/demo" --vocab-size "$VOCABULARY"
    run "$PYTHON" tools/preprocess_data.py --input "$WORK_DIR/demo.jsonl" --output-prefix "$WORK_DIR/demo" --append-eod --workers 2 "${TOKENS[@]}"
fi

step "2/5 pretraining: $PRETRAINING_STEPS steps on text"
run "${TRAIN[@]}" "${NETWORK[@]}" "${TOKENS[@]}" "${ADAM[@]}" --data-path "$WORK_DIR/demo_text_document" \
    --save "$WORK_DIR/pretrained" --load "$WORK_DIR/pretrained" --run-dir "$WORK_DIR/run-pretrained" \
    --micro-batch-size 4 --global-batch-size 8 --train-iters "$PRETRAINING_STEPS" --lr 2e-3 --min-lr 2e-4 \
    --save-interval 50 --log-interval 20 --eval-interval 1000 --eval-iters 2

step "3/5 fine-tuning: $EPOCHS passes over $(wc -l <examples/data/questions.jsonl) questions with answers"
run "${TRAIN[@]}" "${NETWORK[@]}" "${TOKENS[@]}" "${ADAM[@]}" --finetune --load "$WORK_DIR/pretrained" \
    --save "$WORK_DIR/tuned" --run-dir "$WORK_DIR/run-tuned" \
    --data-path examples/data/questions.jsonl --split 1,0,0 --data-cache-path "$WORK_DIR/cache" \
    --chat-template plain --loss-on-targets-only --pack-examples --epochs "$EPOCHS" \
    --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --min-lr 1e-4 \
    --save-interval 100 --log-interval 50 --eval-iters 0

step "4/5 evaluation: exact match of the answers that it writes"
run "$PYTHON" tools/evaluate.py --load "$WORK_DIR/tuned" --tasks examples/data/chat_tasks.yaml --no-baselines --output "$WORK_DIR/results.json"

step "5/5 some answers"
run "$PYTHON" tools/chat.py --load "$WORK_DIR/tuned" --greedy \
    <<<$'What is a token?\n/reset\nWhat does ZeRO stage 1 divide?\n/reset\nHow does a run continue?\n/reset\nWho are you?'
[ -z "$DRY_RUN" ] || exit 0

step "done. Talk to it yourself: $PYTHON tools/chat.py --load $WORK_DIR/tuned --greedy"
"$PYTHON" - "$WORK_DIR/results.json" "$LEAST_RIGHT" <<'PY'
import json
import sys

figures = {task["name"]: task["figures"]["exact_match"] for task in json.load(open(sys.argv[1]))["tasks"]}
right, least = figures["training questions"], float(sys.argv[2])
print(f"right answers: {right:.1%} of the training questions, {figures['other words']:.1%} of those in other words")
if right < least:
    sys.exit(f"error: fewer than {least:.0%} of the training questions were answered right. Train longer: EPOCHS=80")
PY
