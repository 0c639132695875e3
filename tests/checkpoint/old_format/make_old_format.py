"""Makes `old_format/`: checkpoints written by an earlier program, and the losses with which it went on from them.

The folder was made at commit 547970d (torch 2.13.0, 2-core x86-64 CPU) by running this file, which uses only what that
commit had, from the root of a checkout of it:

    PYTHONPATH=. python /path/to/this/make_old_format.py /path/to/tests/checkpoint/old_format

Every case trains to step 3 of 6, saves, resumes in the same layout and goes on to the end. `expected.json` holds the
flags of every case and the losses and gradient norms of steps 4 to 6 after that resume, `runs.tar.xz` the corpus, the
vocabulary and the checkpoints. bf16 with ZeRO 2 takes one micro-batch a step, so that how gradients accumulate does not
matter.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.data.indexed import IndexedWriter
from megatron.data.tokenizer import build_tokenizer

from tests.helpers.tiny_run import TinyCorpus, steps, train
from tests.helpers.vocabulary import write_vocabulary

COMMIT = "547970d"
STEPS, SAVED_AT = 6, 3
VOCAB_SIZE = 280
SHAPE = {
    "num_layers": 2,
    "hidden_size": 16,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "attention_dropout": 0,
    "make_vocab_size_divisible_by": 8,
    "train_iters": STEPS,
    "eval_iters": 0,
    "lr": 3e-2,
}
# name: tensor, pipeline and data size, ZeRO stage, whether bf16
CASES = {
    "plain_fp32": ((1, 1, 1), 1, False),
    "plain_bf16": ((1, 1, 1), 1, True),
    "tp2_fp32": ((2, 1, 1), 1, False),
    "pp2_fp32": ((1, 2, 1), 0, False),
    "tp2_pp2_zero1_fp32": ((2, 2, 1), 1, False),
    "tp2_pp2_zero1_bf16": ((2, 2, 1), 1, True),
    "dp2_zero3_fp32": ((1, 1, 2), 3, False),
    "dp2_zero2_bf16": ((1, 1, 2), 2, True),
}


def write_corpus(folder: Path) -> TinyCorpus:
    """Forty documents that count upwards with gaps, and the vocabulary they belong to."""
    choice = write_vocabulary(folder, VOCAB_SIZE)
    tokenizer = build_tokenizer(choice)
    drawn = np.random.default_rng(11)
    prefix = str(folder / "tiny_text_document")
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            length = int(drawn.integers(20, 80))
            body = (int(drawn.integers(250)) + int(drawn.integers(1, 4)) * np.arange(length)) % 250
            writer.add_document([np.append(body, tokenizer.eod_id)])
    return TinyCorpus(folder, prefix, str(choice.vocab_file), str(choice.merge_file))


def run_case(corpus: TinyCorpus, folder: Path, name: str) -> dict[str, object]:
    """Trains and resumes one case; returns its flags and [loss, gradient norm] of every step after the resume."""
    (tp, pp, dp), zero_stage, bf16 = CASES[name]
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "zero_stage": zero_stage}
    precision = ["--bf16"] if bf16 else []
    flags = corpus.flags(*precision, folder=folder, save_interval=SAVED_AT, **SHAPE, **layout)
    assert train([*flags, "--exit-interval", str(SAVED_AT)], tp * pp * dp) == (0, "")
    kept = folder / "kept"
    shutil.copytree(folder / "checkpoints", kept)
    assert train(flags, tp * pp * dp) == (0, "")
    logged = steps(folder, "lm_loss", "gradient_norm")
    losses = [list(logged[step]) for step in range(SAVED_AT + 1, STEPS + 1)]
    return {"world_size": tp * pp * dp, "layout": layout, "flags": precision, "losses": losses}


def processor() -> str:
    """The processor's model, where Linux says it: together with torch it decides the last bits of a sum."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def main(target: Path) -> None:
    """Writes the whole folder."""
    target.mkdir(parents=True, exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "corpus").mkdir()
        corpus = write_corpus(work / "corpus")
        with tarfile.open(target / "runs.tar.xz", "w:xz", format=tarfile.PAX_FORMAT, preset=9) as archive:
            for path in sorted((work / "corpus").iterdir()):
                _add(archive, path, f"corpus/{path.name}")
            for name in CASES:
                expected[name] = run_case(corpus, work / name, name)
                for path in sorted((work / name / "kept").rglob("*")):
                    if path.is_file() and not path.name.startswith("."):
                        _add(archive, path, f"{name}/{path.relative_to(work / name / 'kept')}")
    known = {
        "commit": COMMIT,
        "machine": [torch.__version__, torch.backends.cpu.get_cpu_capability(), processor()],
        "saved_at": SAVED_AT,
        "shape": SHAPE,
        "cases": expected,
    }
    text = json.dumps(known, indent=1)
    (target / "expected.json").write_text(text + "\n")


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    content = path.read_bytes()
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
