"""Scenario 002.6: samples from a checkpoint with every setting; the same seed gives the same text.

The tool's commands, and the distribution of its draws for top-p against the probabilities of the network.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import forward
from tests.inference.checkpoints import make_checkpoint
from tools import generate_samples_gpt

PROMPT = "def main("
DRAWS = 1000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def loaded(checkpoints: Path) -> LoadedModel:
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def _sample(checkpoints: Path, folder: Path, *flags: str, length: int = 12) -> list[dict[str, Any]]:
    """The records that the tool writes for the prompt."""
    prompts, out = folder / "prompts.txt", folder / "texts.jsonl"
    prompts.write_text(PROMPT + "\n")
    files = ["--sample-input-file", str(prompts), "--sample-output-file", str(out)]
    argv = ["--load", str(checkpoints), *files, "--out-seq-length", str(length), *flags]
    assert generate_samples_gpt.main(argv) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]


def _texts(checkpoints: Path, folder: Path, *flags: str) -> list[list[int]]:
    return [record["tokens"] for record in _sample(checkpoints, folder, *flags)]


def test_002_6_temperature_zero_is_greedy_and_others_are_not(checkpoints: Path, tmp_path: Path) -> None:
    greedy = _texts(checkpoints, tmp_path, "--greedy")
    assert _texts(checkpoints, tmp_path, "--temperature", "0") == greedy
    assert _texts(checkpoints, tmp_path, "--temperature", "0", "--seed", "7") == greedy
    assert _texts(checkpoints, tmp_path, "--temperature", "1.5") != greedy
    assert _texts(checkpoints, tmp_path, "--temperature", "1.5", "--top_k", "1") == greedy


@pytest.mark.parametrize(
    "flags",
    ["--temperature 0.8", "--top_k 20", "--top_p 0.9", "--frequency-penalty 1", "--top_k 50 --top_p 0.9 --min-p 0.01"],
)
def test_the_same_seed_gives_the_same_text(checkpoints: Path, tmp_path: Path, flags: str) -> None:
    first = _texts(checkpoints, tmp_path, *flags.split(), "--seed", "5", "--num-return-sequences", "3")
    assert _texts(checkpoints, tmp_path, *flags.split(), "--seed", "5", "--num-return-sequences", "3") == first
    assert _texts(checkpoints, tmp_path, *flags.split(), "--seed", "6", "--num-return-sequences", "3") != first
    assert len({tuple(text) for text in first}) == 3


def test_a_frequency_penalty_makes_tokens_differ(checkpoints: Path, tmp_path: Path) -> None:
    def repeated(*flags: str) -> int:
        return sum(len(text) - len(set(text)) for text in _texts(checkpoints, tmp_path, *flags))

    common = ("--num-return-sequences", "8", "--temperature", "0.5")
    assert repeated(*common, "--frequency-penalty", "2") < repeated(*common) / 2


def _probabilities(loaded: LoadedModel, text: list[int]) -> torch.Tensor:
    """Of the next token."""
    with torch.inference_mode():
        return forward(loaded.model, torch.tensor([text]), torch.tensor([0]))[0, -1, : loaded.vocab_size].softmax(-1)


def test_draws_with_top_p_follow_the_distribution(checkpoints: Path, tmp_path: Path, loaded: LoadedModel) -> None:
    """Pearson's χ² over the tokens of the nucleus, those expected less than five times taken as one."""
    probabilities = _probabilities(loaded, loaded.tokenizer.encode(PROMPT)).double()
    nucleus: dict[int, float] = {}
    for token in probabilities.argsort(descending=True).tolist():
        nucleus[token] = float(probabilities[token])
        if sum(nucleus.values()) >= 0.6:
            break
    records = _sample(checkpoints, tmp_path, "--top_p", "0.6", "--num-return-sequences", str(DRAWS), length=1)
    drawn = Counter(record["tokens"][0] for record in records)
    assert set(drawn) <= set(nucleus) < set(range(loaded.vocab_size))
    expected = {token: DRAWS * value / sum(nucleus.values()) for token, value in nucleus.items()}
    kinds = [(drawn[token], count) for token, count in expected.items() if count >= 5]
    rare = [(drawn[token], count) for token, count in expected.items() if count < 5]
    kinds += [(sum(found for found, _ in rare), sum(count for _, count in rare))] if rare else []
    statistic = sum((found - count) ** 2 / count for found, count in kinds)
    freedom = len(kinds) - 1
    # Wilson and Hilferty's value that a correct sampler exceeds with one seed in a thousand; the seed is fixed.
    assert freedom >= 5 and statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_beam_search_finds_more_probable_texts_than_greedy(
    checkpoints: Path, tmp_path: Path, loaded: LoadedModel
) -> None:
    def logprob(tokens: list[int]) -> float:
        text, total = loaded.tokenizer.encode(PROMPT), 0.0
        for token in tokens:
            total += float(_probabilities(loaded, text)[token].log())
            text.append(token)
        return total

    (greedy,) = _sample(checkpoints, tmp_path, "--greedy")
    beams = _sample(checkpoints, tmp_path, "--num-beams", "6", "--num-return-sequences", "6", "--length-penalty", "0")
    assert [beam["score"] for beam in beams] == sorted((beam["score"] for beam in beams), reverse=True)
    assert len({tuple(beam["tokens"]) for beam in beams}) == 6
    assert beams[0]["score"] == pytest.approx(logprob(beams[0]["tokens"]), abs=1e-3)
    assert logprob(beams[0]["tokens"]) > logprob(greedy["tokens"])
