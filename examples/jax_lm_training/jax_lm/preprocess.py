r"""jax-lm-training's first step, `python -m jax_lm.preprocess`: the program is tools/corpus/featurize.py.

    cd examples/jax_lm_training
    python -m jax_lm.preprocess --tokenizer-model "gpt2" --min-sequence-length 128 --max-sequence-length 256 \
        --dataset-name "wikitext" --dataset-sub-name "wikitext-103-v1" --dataset-split-type "train" \
        --output-path "dataset/wikitext.train"
"""

from __future__ import annotations

import runpy
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":
    runpy.run_path(str(_PROJECT / "tools" / "corpus" / "featurize.py"), run_name="__main__")
