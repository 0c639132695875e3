"""Scenario 001.8: samples in every layout, the perplexity of a held-out text, and an export that transformers loads."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from megatron.inference.loaded_model import open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import ParallelMesh
from tasks import main as perplexity
from tests.helpers.networks import forward
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import make_checkpoint
from tests.seeds.turkish_gpt2.guide import Guide
from tools import generate_samples_gpt

PROMPTS = "def main(argument):\n\nimport os\nthe last line without an end"
PROMPTS_OF_THE_EXAMPLE = ["Bir varmış, bir yokmuş.", "Iğdır", "İzmir"]
WINDOW, STRIDE = 32, 5
PUBLISHED = (
    " \n = Random numbers = \n \n A sequence of 1 @,@ 000 numbers , drawn ( without replacement ) from a list ; each "
    "is chosen once . \n The well @-@ known ' key ' sets the state of the generator . \n " * 2
)
PLAIN = (
    "\n= Random numbers =\n\nA sequence of 1,000 numbers, drawn (without replacement) from a list; each is chosen once."
    "\nThe well-known 'key' sets the state of the generator.\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a file of prompts of different lengths."""
    folder = tmp_path_factory.mktemp("scenario")
    make_checkpoint(folder)
    (folder / "prompts.txt").write_text(PROMPTS)
    return folder


def program(rank: int, argv: list[str]) -> int:
    return generate_samples_gpt.main(argv)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_without_prompts(folder: Path) -> None:
    argv = ["--load", str(folder / "checkpoints"), "--num-samples", "2", "--genfile", str(folder / "samples.json")]
    assert generate_samples_gpt.main(argv) == 0
    found = records(folder / "samples.json")
    assert len(found) == 2 and found[0]["tokens"] != found[1]["tokens"]
    assert all(set(record) == {"prompt", "text", "tokens", "length", "finished"} for record in found)


def test_001_8_two_shards_of_two_stages_write_the_greedy_text_of_one_process(folder: Path) -> None:
    argv = ["--load", str(folder / "checkpoints"), "--sample-input-file", str(folder / "prompts.txt"), "--greedy"]
    assert generate_samples_gpt.main(argv) == 0
    expected = records(folder / "prompts.txt.out")
    assert [record["prompt"] for record in expected] == PROMPTS.split("\n")
    assert len({tuple(record["tokens"]) for record in expected}) == 4
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    output = ["--sample-output-file", str(folder / "split")]
    assert run_ranks(program, 4, [*argv, *split, *output]) == [0] * 4
    assert records(folder / "split") == expected


def test_wikitext(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = folder / "checkpoints"
    (tmp_path / "wiki.test.tokens").write_text(PUBLISHED)
    argv = ["--task", "WIKITEXT103", "--valid-data", str(tmp_path / "wiki.test.tokens"), "--load", str(checkpoints)]
    assert perplexity.main([*argv, "--overlapping-eval", str(STRIDE)]) == 0
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


@pytest.mark.slow
@pytest.mark.xdist_group("turkish")
def test_transformers_loads_the_exported_example(turkish: Guide) -> None:
    transformers = pytest.importorskip("transformers", reason="the export is checked against transformers")
    example = turkish.folder / "turkish-demo"
    model = transformers.GPT2LMHeadModel.from_pretrained(example / "exported", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / "exported")
    loaded = open_checkpoint(str(example / "pretrained"), {}, ParallelMesh.single())
    text = turkish.texts()[0][:80]
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == loaded.tokenizer.encode(text) and tokenizer.decode(ids[0]) == text
    with torch.inference_mode():
        ours = forward(loaded.model, ids, torch.tensor([0]))[..., : loaded.vocab_size]
        assert torch.allclose(model(ids).logits, ours, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.xdist_group("turkish")
def test_the_example_evaluates_and_generates(turkish: Guide) -> None:
    example = turkish.folder / "turkish-demo"
    assert re.search(
        r"validation results on WIKITEXT103 \| avg loss: .* \| adjusted ppl: .* \| token ratio: ", turkish.output
    )
    (task,) = json.loads((example / "results.json").read_text())["tasks"]
    assert task["count"] == 8 and 0 <= task["figures"]["exact_match"] <= 1
    assert len(records(example / "samples.jsonl")) == 2
    assert [record["prompt"] for record in records(example / "prompts.txt.out")] == PROMPTS_OF_THE_EXAMPLE
