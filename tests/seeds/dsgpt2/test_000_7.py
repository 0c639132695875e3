"""Scenario 000.7: each step is a script that needs no container, and the container is documented."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from megatron.observe.metrics_file import read_steps
from tests.seeds.dsgpt2.example import (
    FINETUNE_STEPS,
    GUIDE,
    ROOT,
    TRAIN_STEPS,
    commands_of_the_guide,
    dsgpt2_example,
    needs_a_server,
)

pytestmark = pytest.mark.xdist_group("dsGPT2 scenarios")

SCRIPTS = sorted((ROOT / "examples" / "dsgpt2").glob("[0-9]_*.sh"))
LEAST_RIGHT = 0.95


def test_000_7_scripts_run_without_a_container() -> None:
    run = dsgpt2_example()
    named = [word for command in commands_of_the_guide() for word in command.split() if word.endswith(".sh")]
    assert list(dict.fromkeys(named)) == [f"examples/dsgpt2/{path.name}" for path in SCRIPTS]
    assert len(SCRIPTS) == 8
    assert "total: 200 documents" in run.output_of("1_upload")
    assert "total: 188 documents" in run.output_of("2_clean")  # without the short ones and the second copies
    assert "188 documents, " in run.output_of("4_statistics")
    trained, tuned = read_steps(run.folder / "run-pretrained"), read_steps(run.folder / "run-chat")
    assert max(trained) == TRAIN_STEPS and trained[TRAIN_STEPS]["lm_loss"] < trained[1]["lm_loss"] - 1
    assert max(tuned) == FINETUNE_STEPS and tuned[FINETUNE_STEPS]["sample_loss"] < 0.1
    assert "INFO: [Loss (eval)]" in run.output_of("7_evaluate")
    right = re.search(r"^right answers: (\d+) of 15$", run.output_of("7_evaluate"), flags=re.MULTILINE)
    assert right is not None and int(right.group(1)) >= LEAST_RIGHT * 15


def test_the_chatbot_is_served_as_the_guide_says(tmp_path: Path) -> None:
    run = dsgpt2_example()
    serve, ask = (command for command in commands_of_the_guide() if needs_a_server(command))
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(serve.split(), cwd=ROOT, env={**run.environment}, stdout=output, stderr=output)
    try:
        ends_at = time.monotonic() + 120
        while not (found := re.search(r"^serving \S+ at (http://\S+)$", log.read_text(), flags=re.MULTILINE)):
            assert process.poll() is None and time.monotonic() < ends_at, log.read_text()
            time.sleep(0.02)
        sentence = re.search(r"'sentence=(.*)'", ask)
        assert sentence is not None and "localhost:4001/generate" in ask
        address = f"{found.group(1)}/generate?sentence={urllib.parse.quote(sentence.group(1))}"
        with urllib.request.urlopen(address, timeout=120) as response:
            answer = json.loads(response.read())
        assert answer["input"] == sentence.group(1) and answer["response"]
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(120)


def test_the_container_is_documented() -> None:
    text = GUIDE.read_text()
    assert "docker build" in text and (ROOT / "Dockerfile").is_file()
