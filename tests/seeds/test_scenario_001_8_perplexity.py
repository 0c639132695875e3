"""Scenario 001.8: the perplexity of a held-out text by upstream's program, against a computation window by window."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from megatron.inference.loading import open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import ParallelMesh
from tasks import main as program
from tests.inference.checkpoints import make_checkpoint

WINDOW, STRIDE = 32, 5
PUBLISHED = (
    " \n = Random numbers = \n \n A sequence of 1 @,@ 000 numbers , drawn ( without replacement ) from a list ; each "
    "is chosen once . \n The well @-@ known ' key ' sets the state of the generator . \n " * 2
)
PLAIN = (
    "\n= Random numbers =\n\nA sequence of 1,000 numbers, drawn (without replacement) from a list; each is chosen once."
    "\nThe well-known 'key' sets the state of the generator.\n"
)


def test_wikitext(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = make_checkpoint(tmp_path)
    (tmp_path / "wiki.test.tokens").write_text(PUBLISHED)
    argv = ["--task", "WIKITEXT103", "--valid-data", str(tmp_path / "wiki.test.tokens"), "--load", str(checkpoints)]
    assert program.main([*argv, "--overlapping-eval", str(STRIDE)]) == 0
    rule, text, again = capfd.readouterr().out.splitlines()[-3:]
    number = r"(\d\.\d{4}E[+-]\d\d)"
    found = re.fullmatch(
        rf" validation results on WIKITEXT103 \| avg loss: {number} \| ppl: {number} \| adjusted ppl: {number} \| "
        r"token ratio: (\d+\.\d+) \|",
        text,
    )
    assert found and rule == again == "-" * (len(text) + 1)
    loss, tokens = reference_loss(checkpoints)
    words = len(PUBLISHED.strip().split(" "))
    ratio = (tokens - 1) / (words - 1)
    loss_shown, ppl, adjusted, ratio_shown = map(float, found.groups())
    assert loss_shown == pytest.approx(loss, rel=1e-4)
    assert ppl == pytest.approx(math.exp(loss), rel=1e-3)
    assert adjusted == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-2)
    assert ratio_shown == ratio


def reference_loss(checkpoints: Path) -> tuple[float, int]:
    """The loss when each token is scored by the last window of upstream's that does not count it twice."""
    loaded = open_checkpoint(str(checkpoints), {}, ParallelMesh.single())
    tokens = loaded.tokenizer.encode(PLAIN * 2)
    assert len(tokens) > 3 * WINDOW
    nats = 0.0
    for place in range(1, len(tokens)):
        first = max(0, math.ceil((place - WINDOW) / STRIDE)) * STRIDE
        context = StepSettings().context(torch.zeros(1, dtype=torch.int64), first_sample=0)
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([tokens[first:place]]), context)[0, -1, : loaded.vocab_size]
        nats -= float(logits.float().log_softmax(-1)[tokens[place]])
    return nats / (len(tokens) - 1), len(tokens)
