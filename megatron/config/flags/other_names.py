"""What other trainers call the things that flags here set, for the hint to a flag that does not exist."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping

# Names of nanoGPT, the Hugging Face Trainer, litgpt, torchtitan and of everyday speech; by the flag that is meant.
_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "--lr": "learning-rate max-lr peak-lr",
        "--train-iters": "max-steps max-iters num-steps num-iterations num-train-steps iterations iters steps",
        "--epochs": "num-train-epochs max-epochs num-epochs n-epochs",
        "--num-layers": "n-layer n-layers layers num-hidden-layers depth",
        "--num-attention-heads": "n-head n-heads num-heads heads",
        "--hidden-size": "n-embd d-model dim embedding-dim embed-dim width",
        "--ffn-hidden-size": "intermediate-size ff-dim d-ff",
        "--seq-length": "block-size context-length context-size max-length max-seq-length max-seq-len seq-len",
        "--micro-batch-size": "per-device-train-batch-size device-batch-size",
        "--global-batch-size": "total-batch-size gradient-accumulation-steps accumulate-grad-batches grad-accum",
        "--hidden-dropout": "dropout",
        "--lr-warmup-iters": "warmup-steps warmup-iters num-warmup-steps lr-warmup-steps",
        "--lr-warmup-fraction": "warmup-ratio warmup-fraction",
        "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler",
        "--clip-grad": "grad-clip max-grad-norm gradient-clipping gradient-clip-val",
        "--save": "output-dir out-dir save-dir checkpoint-dir",
        "--load": "resume resume-from resume-from-checkpoint init-from",
        "--save-interval": "save-steps save-every checkpoint-every",
        "--eval-interval": "eval-steps eval-every",
        "--log-interval": "logging-steps log-every log-freq",
        "--data-path": "dataset dataset-name dataset-path data data-dir train-file train-data",
        "--tokenizer-name-or-path": "tokenizer tokenizer-path tokenizer-name",
        "--tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size tensor-parallel-degree",
        "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size",
        "--bf16": "precision dtype mixed-precision torch-dtype",
        "--checkpoint-activations": "gradient-checkpointing activation-checkpointing",
        "--wandb-project": "wandb report-to",
    }
)


def meant_flag(name: str, known: Collection[str]) -> str | None:
    """The flag that is called `name` elsewhere; None if there is none among the known flags."""
    plain = name.lstrip("-").replace("_", "-")
    return next((flag for flag, names in _NAMES.items() if flag in known and plain in names.split()), None)
