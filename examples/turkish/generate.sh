#!/usr/bin/env bash
# Step 5: texts without a prompt, and greedy continuations of prompts from a file with 2 pipeline ranks.
#
#   bash examples/turkish/generate.sh
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run "$PYTHON" tools/generate_samples_gpt.py --load "$WORK_DIR/pretrained" --num-samples 2 --genfile "$WORK_DIR/samples.jsonl" \
    --top_p 0.9 --out-seq-length "${LENGTH:-60}"
[ -n "$DRY_RUN" ] || printf 'Bir varmış, bir yokmuş.\nIğdır\nİzmir\n' >"$WORK_DIR/prompts.txt"
run "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 tools/generate_samples_gpt.py --load "$WORK_DIR/pretrained" \
    --pipeline-model-parallel-size 2 --sample-input-file "$WORK_DIR/prompts.txt" --greedy --out-seq-length "${LENGTH:-60}"
run cat "$WORK_DIR/prompts.txt.out"
