#!/usr/bin/env bash
# Step 5: the pretrained network as a Hugging Face model, written only if transformers computes the same logits.
#
#   bash examples/turkish/export.sh
# shellcheck source=examples/turkish/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

run rm -rf "$WORK_DIR/exported"
run "$PYTHON" tools/convert/export_hf.py --load "$WORK_DIR/pretrained" --output "$WORK_DIR/exported"
