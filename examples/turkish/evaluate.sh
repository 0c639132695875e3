#!/usr/bin/env bash
# Step 5: perplexity on text that was held out, and how many questions the fine-tuned network answers word for word.
#
#   bash examples/turkish/evaluate.sh
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run "$PYTHON" tasks/main.py --task WIKITEXT103 --valid-data "$WORK_DIR/tr-held-out.txt" --load "$WORK_DIR/pretrained" --overlapping-eval 32
[ -n "$DRY_RUN" ] || printf -- '- {task: exact_match, name: Turkish questions, data: "%s", template: "{prompt}\\n", max_new_tokens: 24, normalize: none}\n' "$WORK_DIR/tr-questions.jsonl" >"$WORK_DIR/tasks.yaml"
run "$PYTHON" tools/evaluate.py --load "$WORK_DIR/tuned" --tasks "$WORK_DIR/tasks.yaml" --no-baselines \
    --output "$WORK_DIR/results.json" --limit "${QUESTIONS:-1000}"
