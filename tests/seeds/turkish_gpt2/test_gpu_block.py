"""The block of 345 million parameters, as it stands on the page, on one GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from tests.helpers.tiny_run import write_tiny_corpus
from tests.seeds.turkish_gpt2.guide import PAGE, ROOT, write_deepspeed


@pytest.mark.gpu
def test_001_9_the_block_trains_on_a_gpu(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path, documents=400)
    (block,) = re.findall(r"```bash\n(CHECKPOINT_PATH=.*?)```", PAGE, flags=re.S)
    for name, value in (("VOCAB_FILE", corpus.vocab_file), ("MERGE_FILE", corpus.merge_file)):
        block = re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", block)
    block = re.sub(r"(?m)^DATA_PATH=.*$", f"DATA_PATH={corpus.prefix}", block)
    # A fp16 run begins with steps that only find its loss scale; the run ends before its first evaluation.
    block = block.replace("--train-iters 500000", "--train-iters 500000 --exit-interval 20 --run-dir run")
    block = block.replace("--log-interval 10", "--log-interval 1").replace(" .01", " 0")
    block = block.replace("pretrain_gpt.py", str(ROOT / "pretrain_gpt.py"))
    programs = tmp_path / "bin"
    programs.mkdir()
    write_deepspeed(programs, sys.executable)  # needs no activated environment
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
    packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": packages}
    done = subprocess.run(
        ["bash", "-euc", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = read_steps(tmp_path / "run")
    assert sorted(steps) == list(range(1, 21))
    assert steps[20]["lm_loss"] < steps[1]["lm_loss"]
    assert "tokens per second" in done.stdout and "TFLOPs" in done.stdout
