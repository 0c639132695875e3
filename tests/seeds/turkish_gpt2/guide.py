"""The page on Turkish GPT-2 as a program: all of its blocks, with sizes that a test can wait for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "seeds" / "turkish_gpt2.md").read_text()
HOSTS = "node[003-007,011]"
DOCUMENTS = 200
# Values of the page and their replacements in the test: sizes, and the half precision that a CPU has not.
_SMALLER = {
    "--documents 4000": f"--documents {DOCUMENTS}",
    "--vocab-size 8000": "--vocab-size 700",
    "--num-layers 24": "--num-layers 2",
    "--hidden-size 1024": "--hidden-size 32",
    "--num-attention-heads 16": "--num-attention-heads 4",
    "--seq-length 1024": "--seq-length 32",
    "--max-position-embeddings 1024": "--max-position-embeddings 32",
    "--train-iters 500000": "--train-iters 20 --exit-interval 2",  # each start ends two steps further on
    "--lr-decay-iters 320000": "--lr-decay-iters 20",
    "--log-interval 10": "--log-interval 1",
    "--fp16": "--bf16",
    "GPUS_PER_NODE=4": "GPUS_PER_NODE=2",
    "NNODES=16": "NNODES=1",
    "--workers 60": "--workers 3",
    "--workers 30": "--workers 1",
}
# The same for examples/turkish.
_TINY = {
    "SCALE": "tiny",
    "WORK_DIR": "turkish-demo",
    "DOCUMENTS": str(DOCUMENTS),
    "VOCAB_SIZE": "700",
    "STEPS": "4",
    "EPOCHS": "1",
    "QUESTIONS": "8",
    "LENGTH": "8",
    "NETWORK": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64",
}
# Starts the job's only task. Its name for this machine resolves nowhere.
_SRUN = """#!/bin/bash
echo "$LAUNCHER" >>srun.log
shift 2  # --jobid
export SLURM_PROCID=0 LAUNCHER="${LAUNCHER/node003/127.0.0.1}"
exec "$@"
"""
_PROGRAMS = {"pip": '#!/bin/sh\necho "$@" >>pip.log\n', "srun": _SRUN}


@dataclass(frozen=True)
class Guide:
    """A folder in which every block of the page has run, and all that was shown."""

    folder: Path
    output: str

    def pair(self, name: str) -> list[bytes]:
        """The bytes of both token files of a prefix."""
        return [(self.folder / f"{name}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]

    def texts(self) -> list[str]:
        """The documents of the corpus."""
        return [json.loads(line)["text"] for line in (self.folder / "my-corpus.json").read_text().splitlines()]

    def run(self, command: str) -> None:
        """Runs one more command."""
        run(self.folder, command)


def follow_the_page(folder: Path) -> Guide:
    """Runs all blocks of the page in a folder, in their order and in one shell."""
    for name in ("tools", "tasks", "examples", "megatron", "trident", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    for name, text in _PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    write_deepspeed(folder / "bin", "python")
    _write_other_tokenizer(folder)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S))
    for words, smaller in {**_SMALLER, "MASTER_PORT=6000": f"MASTER_PORT={free_port()}"}.items():
        assert words in blocks, f"the page no longer contains {words}"
        blocks = blocks.replace(words, smaller)
    return Guide(folder, run(folder, blocks))


def write_deepspeed(folder: Path, python: str) -> None:
    """Writes DeepSpeed's launcher as a program that an interpreter runs, whatever scripts are installed."""
    program = folder / "deepspeed"
    program.write_text(f'#!/bin/sh\nexec "{python}" -m deepspeed.launcher.runner "$@"\n')
    program.chmod(0o755)


def run(folder: Path, commands: str) -> str:
    """Runs shell commands as somebody does who is in the batch script of a Slurm job."""
    path = os.pathsep.join((str(folder / "bin"), str(Path(forking_python()).parent), os.environ["PATH"]))
    job = {"SLURM_JOBID": "4711", "SLURM_JOB_NODELIST": HOSTS, "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, **_TINY, **job, "PATH": path, "HOME": str(folder), "PYTHON": "python"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def _write_other_tokenizer(folder: Path) -> None:
    """The tokenizer and the text of the page's command for any tokenizer, under the names it gives them."""
    letters = {letter: number for number, letter in enumerate(["</s>", *"abcçdefgğhıijklmnoöprsştuüvyz "])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>"])
    (folder / "t5-small").mkdir()
    tokenizer.save(str(folder / "t5-small" / "tokenizer.json"))
    (folder / "t5-small" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "c4_en_train.jsonl").write_text(json.dumps({"text": "ılık iğde"}) + "\n")
