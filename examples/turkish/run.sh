#!/usr/bin/env bash
# A Turkish GPT-2 from text to evaluation, on a laptop's CPU: all scripts of this folder in their order.
#
#   bash examples/turkish/run.sh
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

for step in prepare pretrain finetune evaluate generate export; do
    printf '\n[%3d s] %s\n' "$SECONDS" "$step"
    bash "examples/turkish/$step.sh"
done
printf '\n[%3d s] done: everything is in %s\n' "$SECONDS" "$WORK_DIR"
