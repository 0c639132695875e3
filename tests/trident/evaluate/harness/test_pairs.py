"""Pairs of context and continuation, with tokenizers that put `<s>` and `</s>` around texts, against the harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.prompts import encode_continuation, encode_prompt
from tests.helpers.web.serving import start_server
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tests.tokenizers.framed import framed_choice, framed_tokenizer
from tests.trident.evaluate.harness.harness_tasks import offline
from tools.convert import export_hf
from trident.evaluate.harness import harness_model
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Query

pytest.importorskip("lm_eval")

PAIRS = [
    ("def choose(", "self, seq)"),
    ("def choose( ", "self, seq)"),
    ("", "import os"),
    ("a cat sat on the", " mat"),
    ("é 漢", " and the rest"),
    ("<s>return", " seq"),
]


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


def opened(folder: Path, frame: str) -> tuple[LoadedModel, Path]:
    """A checkpoint whose tokenizer has this frame, and its export."""
    checkpoints = make_checkpoint(folder, choice=framed_choice(folder, frame))
    assert export_hf.main(["--load", str(checkpoints), "--output", str(folder / "exported")]) == 0
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single()), folder / "exported"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    return opened(tmp_path_factory.mktemp("begun"), "<s> $A")


@pytest.fixture(scope="module")
def theirs(begun: tuple[LoadedModel, Path]) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(begun[1]), device="cpu", dtype="float32", batch_size=1)


def asked_of(model: Any, method: str, requests: list[Any]) -> Any:
    """The tokens of context and continuation that a model of the harness makes of requests, and its answers."""
    splits: list[tuple[list[int], list[int]]] = []
    answer = model._loglikelihood_tokens

    def noted(pairs: list[Any], **options: Any) -> Any:
        splits.extend((list(context), list(continuation)) for _, context, continuation in pairs)
        return answer(pairs, **options)

    model._loglikelihood_tokens = noted
    try:
        return splits, getattr(model, method)(requests)
    finally:
        del model._loglikelihood_tokens


@pytest.mark.parametrize("frame", ["<s> $A", "<s> $A </s>"])
def test_pairs_are_split_and_scored_as_by_the_harness(
    frame: str, begun: tuple[LoadedModel, Path], theirs: Any, tmp_path: Path
) -> None:
    """The end that the other tokenizer adds is left out, so both have the splits of the one without."""
    loaded, tokenizer = begun[0], framed_tokenizer(tmp_path, frame)
    requests = [SimpleNamespace(args=pair) for pair in PAIRS]
    wanted, answers = asked_of(theirs, "loglikelihood", requests)
    ours = [encode_continuation(tokenizer, *pair) for pair in PAIRS]
    assert [(tokens[:first], tokens[first:]) for tokens, first in ours] == wanted
    scores = LoadedScorer(loaded).score([Query(tuple(tokens), first) for tokens, first in ours])
    assert [score.logprob for score in scores] == pytest.approx([answer[0] for answer in answers], abs=1e-4)
    assert [score.is_greedy for score in scores] == [answer[1] for answer in answers]
    for text in ("a cat", "<s>a cat", "é"):
        assert encode_prompt(tokenizer, text) == theirs.tok_encode(text)


def test_the_adapter_gives_the_figures_of_the_hf_model(begun: tuple[LoadedModel, Path], theirs: Any) -> None:
    model = harness_model(begun[0])
    requests = [SimpleNamespace(args=pair) for pair in PAIRS]
    assert asked_of(model, "loglikelihood", requests)[0] == asked_of(theirs, "loglikelihood", requests)[0]
    found, expected = (one.loglikelihood(requests) for one in (model, theirs))
    assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
    whole = [SimpleNamespace(args=("def choose(self, seq): return seq[0] " * 6,))]
    assert model.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), abs=1e-3)


def test_the_end_of_a_text_is_no_part_of_a_continuation(tmp_path: Path) -> None:
    loaded, _ = opened(tmp_path, "<s> $A </s>")
    model = harness_model(loaded)
    splits, _ = asked_of(model, "loglikelihood", [SimpleNamespace(args=pair) for pair in PAIRS])
    end = loaded.tokenizer.eod_id
    assert all(end not in (*context, *continuation) for context, continuation in splits)
    ours = [encode_continuation(loaded.tokenizer, *pair) for pair in PAIRS]
    assert [(tokens[:first], tokens[first:]) for tokens, first in ours] == splits


def test_the_server_gives_the_harness_the_figures_of_the_hf_model(
    begun: tuple[LoadedModel, Path], theirs: Any, tmp_path: Path
) -> None:
    """`local-completions` sends echo and logprobs, and takes the last token for a generated one.

    The pair whose text begins with `<s>` is left out: this client puts another one before it, unlike `hf`.
    """
    pytest.importorskip("tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    loaded, exported = begun
    server = start_server(loaded.path.parent, tmp_path / "log")
    try:
        client = LocalCompletionsAPI(
            base_url=f"{server.address}/v1/completions",
            model=loaded.path.parents[1].name,
            tokenizer=str(exported),
            tokenizer_backend="huggingface",
            batch_size=2,
            max_length=POSITIONS,
            max_retries=1,
            add_bos_token=True,
        )
        requests = [SimpleNamespace(args=pair, cache_key=None) for pair in PAIRS[:-1]]
        found, expected = client.loglikelihood(requests), theirs.loglikelihood(requests)
        assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
        assert [answer[1] for answer in found] == [answer[1] for answer in expected]
        tokens, first = encode_continuation(loaded.tokenizer, *PAIRS[0])
        body = {"prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = httpx.post(f"{server.address}/v1/completions", json=body).json()
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None and len(logprobs) == len(tokens) and choice["finish_reason"] == "length"
        assert sum(logprobs[first:]) == pytest.approx(expected[0][0], abs=1e-4)
        assert answer["usage"]["completion_tokens"] == 0 and choice["text"].endswith("".join(PAIRS[0]))
    finally:
        assert server.stop() == 0
