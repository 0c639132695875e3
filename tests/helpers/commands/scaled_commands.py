"""Published launch commands, scaled down so far that two CPU processes train a step in a moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.site.published_commands import SETTINGS, Command
from tests.helpers.tiny_run import TinyCorpus

PROCESSES = 2
LENGTH, BATCH, MICRO = 32, 4, 1
# What sizes become; flags that a command does not have stay away.
_SIZES: Mapping[str, str] = {
    "--hidden-size": "32", "--ffn-hidden-size": "48", "--num-attention-heads": "4", "--kv-channels": "8",
    "--num-layers": "2", "--num-key-value-heads": "2", "--num-query-groups": "2", "--num-experts": "4",
    "--seq-length": str(LENGTH), "--max-position-embeddings": str(LENGTH),
    "--max-absolute-position-embeddings": str(LENGTH), "--pad-vocab-size-to": "640",
    "--make-vocab-size-divisible-by": "16", "--micro-batch-size": str(MICRO), "--global-batch-size": str(BATCH),
    "--rampup-batch-size": "2 2 4", "--train-samples": "1000", "--train-iters": "100", "--train-tokens": "100000",
    "--lr-decay-iters": "90", "--lr-decay-samples": "900", "--lr-decay-tokens": "90000", "--lr-warmup-iters": "2",
    "--lr-warmup-samples": "8", "--lr-warmup-tokens": "256", "--save-interval": "1000", "--eval-interval": "1000",
    "--eval-iters": "1", "--log-interval": "1", "--loss-scale": "8", "--split": "80,15,5",
    "--expert-model-parallel-size": "2", "--moe-expert-parallel-size": "2",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-layers-teacher": "2", "--hidden-size-teacher": "32", "--num-attention-heads-teacher": "2",
}  # fmt: skip
_EXPERT_SIZES = ("--expert-model-parallel-size", "--moe-expert-parallel-size")  # these take both processes
# The corpus has another tokenizer, there is no earlier checkpoint, and no device computes in fp16.
_DROPPED = frozenset(
    {
        "--tokenizer-type",
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        "--vocab-file",
        "--merge-file",
        "--vocab-size",
    }
    | {"--finetune", "--no-load-optim", "--fp16", "--bf16", "--exit-interval", "--exit-duration-in-mins"}
)

# Such a command keeps its pipeline stages rather than its tensor-parallel ranks.
_SCHEDULED = frozenset({"--num-layers-per-virtual-pipeline-stage", "--enable-zbh1-pipeline"})


def scaled(command: Command, corpus: TinyCorpus, folder: Path, steps: int, teacher: Path) -> list[str]:
    """The words of a command with small sizes, for `steps` steps on two processes, that logs to `folder / "run"`.

    A teacher of another size is replaced by the checkpoint of a run of `TinyCorpus.flags`, or of such a command with
    different numbers of experts if the teacher has them.
    """
    pairs = _pairs(command.flags)
    has_schedule = not _SCHEDULED.isdisjoint(pairs)
    ranks = 2 if pairs.get("--tensor-model-parallel-size", ["1"]) != ["1"] and not has_schedule else 1
    divides = any(pairs.get(name, ["1"]) != ["1"] for name in _EXPERT_SIZES)
    stages = 2 if pairs.get("--pipeline-model-parallel-size", ["1"]) != ["1"] and ranks == 1 and not divides else 1
    shared = 2 if pairs.get("--ds-sequence-parallel-size", ["1"]) != ["1"] and ranks * stages == 1 else 1
    changes = {
        **_SIZES,
        "--ds-sequence-parallel-size": str(shared),
        "--tensor-model-parallel-size": str(ranks),
        "--pipeline-model-parallel-size": str(stages),
        "--save": str(folder / "checkpoints"),
        "--load": str(folder / "checkpoints"),
        "--tensorboard-dir": str(folder / "tensorboard"),
        "--data-cache-path": str(corpus.folder / "cache"),
        "--load-teacher": str(teacher),
        "--deepspeed_config": str(folder / SETTINGS),
    }
    if has_schedule:
        changes["--num-layers"] = "4"
    if len(pairs.get("--num-experts", [])) > 1:  # numbers of experts by layer need some layers
        changes |= {"--num-layers": "4", "--num-layers-teacher": "4", "--num-attention-heads-teacher": "4"}
    words = []
    for name, values in pairs.items():
        if name in _DROPPED:
            continue
        if name == "--data-path":
            values = [value if _is_number(value) else corpus.prefix for value in values]
        elif name in ("--num-experts", "--num-experts-teacher"):
            values = ["2", "4"] if len(values) > 1 else [str(min(int(values[0]), 4))]
        elif name in changes:
            values = changes[name].split(" ") if name == "--rampup-batch-size" else [changes[name]]
        words += [name, *values]
    if command.deepspeed is not None:
        folder.mkdir(parents=True, exist_ok=True)
        replicas = PROCESSES // (ranks * stages * shared)
        (folder / SETTINGS).write_text(json.dumps(_scaled_settings(command.deepspeed, replicas)))
    own = {
        "--vocab-file": corpus.vocab_file, "--merge-file": corpus.merge_file, "--run-dir": str(folder / "run"),
        "--exit-interval": str(steps),
    }  # fmt: skip
    precision = ["--bf16"] if {"--fp16", "--bf16"} & pairs.keys() else []
    return [*words, *precision, *(word for pair in own.items() for word in pair)]


def _pairs(words: Sequence[str]) -> dict[str, list[str]]:
    """Every flag with its values; of one that is given twice, the last."""
    pairs: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            pairs[name] = [value] if value else []
        else:
            pairs[name].append(word)
    return pairs


def _scaled_settings(settings: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    found = json.loads(json.dumps(settings))
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO}
    sizes["gradient_accumulation_steps"] = BATCH // (MICRO * replicas)
    found.update({name: size for name, size in sizes.items() if name in found})
    if found.get("fp16", {}).get("enabled"):
        found["fp16"]["enabled"] = False
        found["bf16"] = {"enabled": True}
    curriculum = found.get("curriculum_learning", {})
    if curriculum.get("enabled"):
        curriculum.update(min_difficulty=8, max_difficulty=LENGTH)
        curriculum["schedule_config"]["total_curriculum_step"] = 4
    return found


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
