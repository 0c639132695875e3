#!/usr/bin/env bash
# Trains a small Llama for 200 steps in one process, on a CPU or a GPU: the preset `laptop` is the whole recipe.
#
#   bash examples/pretrain_gpt_tiny.sh [more flags]
#
# For a text of your own: python train_on_text.py my.txt. What can be set is in examples/training.sh.
# shellcheck source=examples/training.sh
source "$(dirname "${BASH_SOURCE[0]}")/training.sh"
CHECKPOINT_PATH="${CHECKPOINT_PATH:-$CHECKPOINTS/tiny}"
find_data

FLAGS=(--model-preset laptop)
FILES=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" "${DATA[@]}")
LENGTH=(--train-iters 200)

start_training 1 "${FLAGS[@]}" "${LENGTH[@]}" "${FILES[@]}" -- "$@"
