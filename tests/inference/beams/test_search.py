"""Beam search finds what `transformers` finds on the exported checkpoint, and the same in every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.checkpoint import newest_record
from megatron.checkpoint.record import Record
from megatron.config import RunConfig
from megatron.errors import ConfigError, NumericsError
from megatron.inference.beams import Beam, BeamSettings, beam_search
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.layouts import Layout
from tests.helpers.networks import forward
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tests.inference.networks import load
from trident.convert.hugging_face.exporting import ExportRequest, export_model

PROMPTS = ([5, 80, 7, 300, 2], [17], [400, 401, 402, 403, 404, 405, 406])
PADDING = 599
LLAMA = (
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--num-query-groups", "2", "--untie-embeddings-and-output-weights",
)  # fmt: skip
SHAPES = [(2, 1.0), (3, 0.0), (4, -1.0), (5, 2.5)]  # beams and length penalty
CASES = [
    BeamSettings(beams=beams, max_new_tokens=12, length_penalty=penalty, early_stopping=early, returned=beams)
    for early in ("false", "true", "never")
    for beams, penalty in SHAPES
]


@dataclass(frozen=True)
class Pair:
    """One network in both libraries, and for each prompt some tokens that good texts have."""

    checkpoints: Path
    loaded: LoadedModel
    reference: Any
    stop_ids: list[frozenset[int]]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoints = make_checkpoint(folder, *(LLAMA if request.param == "llama" else ()))
    found = newest_record(checkpoints, ParallelMesh.single())
    assert found is not None
    record = Record.from_json(found.record, found.path)
    config = RunConfig.from_json(record.config)
    choice = TokenizerChoice.of(config.data)
    exported = export_model(ExportRequest(found.path, folder / "exported", config.model, choice, record.tokenizer))
    loaded = open_checkpoint(str(checkpoints), {}, ParallelMesh.single())
    stop_ids = []
    for prompt in PROMPTS:
        beams = beam_search(loaded, prompt, BeamSettings(beams=4, max_new_tokens=12, returned=4))
        stop_ids.append(frozenset(beam.tokens[3 + 2 * rank] for rank, beam in enumerate(beams)))
    reference = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True).eval()
    return Pair(checkpoints, loaded, reference, stop_ids)


def _by_transformers(model: Any, prompt: list[int], settings: BeamSettings) -> list[tuple[list[int], float]]:
    tokens = torch.tensor([prompt])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        num_beams=settings.beams,
        max_new_tokens=settings.max_new_tokens,
        length_penalty=settings.length_penalty,
        early_stopping={"false": False, "true": True, "never": "never"}[settings.early_stopping],
        num_return_sequences=settings.returned,
        eos_token_id=sorted(settings.stop_ids) or None,
        pad_token_id=PADDING,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    texts = [row[: row.index(PADDING)] if PADDING in row else row for row in rows]
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def _assert_equal(pair: Pair, prompt: list[int], settings: BeamSettings) -> None:
    beams = beam_search(pair.loaded, prompt, settings)
    for beam, (row, score) in zip(beams, _by_transformers(pair.reference, prompt, settings), strict=True):
        is_stopped = row[-1] in settings.stop_ids
        assert (list(beam.tokens), beam.finish) == ((row[:-1], "stop") if is_stopped else (row, "length"))
        assert beam.score == pytest.approx(score, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_equal_to_transformers(pair: Pair, case: int) -> None:
    number = case % len(PROMPTS)
    _assert_equal(pair, PROMPTS[number], replace(CASES[case], stop_ids=pair.stop_ids[number]))


def test_equal_to_transformers_without_stop_tokens_and_with_fewer_texts_returned(pair: Pair) -> None:
    _assert_equal(pair, PROMPTS[0], BeamSettings(beams=4, max_new_tokens=9, returned=2))


def test_of_the_compared_texts_some_stop_and_some_do_not(pair: Pair) -> None:
    ended = []
    for case, settings in enumerate(CASES):
        number = case % len(PROMPTS)
        beams = beam_search(pair.loaded, PROMPTS[number], replace(settings, stop_ids=pair.stop_ids[number]))
        ended += [beam.finish for beam in beams]
    assert ended.count("stop") >= 5 and ended.count("length") >= 5


def _found(rank: int, checkpoints: str, tp: int, pp: int, settings: BeamSettings) -> list[Beam]:
    mesh = open_mesh(Layout(tp, pp)) if tp * pp > 1 else ParallelMesh.single()
    return beam_search(open_checkpoint(checkpoints, {}, mesh), PROMPTS[0], settings)


@pytest.mark.full
@pytest.mark.parametrize("pair", ["gpt2"], indirect=True)
def test_every_rank_of_every_layout_finds_the_same(pair: Pair) -> None:
    settings = replace(CASES[3], stop_ids=pair.stop_ids[0])
    expected = _found(0, str(pair.checkpoints), 1, 1, settings)
    results = run_ranks(_found, 4, str(pair.checkpoints), 2, 2, settings)
    assert results == [results[0]] * 4
    assert [(beam.tokens, beam.finish) for beam in results[0]] == [(beam.tokens, beam.finish) for beam in expected]
    assert [beam.score for beam in results[0]] == pytest.approx([beam.score for beam in expected], abs=1e-4)


LONG_ROPE = {
    "position_embedding_type": "rope", "rope_scaling_type": "longrope", "rope_original_max_positions": 8,
    "rope_short_factors": (1.0,) * 3, "rope_long_factors": (3.0,) * 3,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma", "longrope"])
@torch.inference_mode()
def test_a_score_is_the_log_probability_of_the_text(name: str) -> None:
    """The cache, which is reordered in every step, changes nothing."""
    loaded = load(LONG_ROPE if name == "longrope" else ARCHITECTURES[name])
    prompt = [3, 1, 4]
    for beam in beam_search(loaded, prompt, BeamSettings(beams=5, max_new_tokens=10, returned=5, length_penalty=0.5)):
        text = torch.tensor([[*prompt, *beam.tokens]])
        expected = 0.0
        for stop in range(len(prompt), text.shape[1]):
            logits = forward(loaded.model, text[:, :stop], torch.tensor([0]))[0, -1, :101]
            expected += float(logits.log_softmax(-1)[text[0, stop]])
        assert beam.score == pytest.approx(expected / 10**0.5, abs=1e-4)


def test_a_text_ends_at_the_last_position(pair: Pair) -> None:
    prompt = [1] * (POSITIONS - 3)
    (beam,) = beam_search(pair.loaded, prompt, BeamSettings(beams=2, max_new_tokens=99))
    assert (len(beam.tokens), beam.finish) == (3, "length")


@pytest.mark.parametrize(
    ("length", "says"), [(0, "has no tokens"), (16, "has 16 tokens, and the model has 16 positions.*at most 15")]
)
def test_a_prompt_that_cannot_be_continued(length: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        beam_search(load(), [1] * length, BeamSettings(beams=2, max_new_tokens=2))


def test_a_network_that_computes_no_numbers() -> None:
    loaded = load()
    next(loaded.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="the scores of the next tokens are not finite"):
        beam_search(loaded, [1], BeamSettings(beams=2, max_new_tokens=2))
