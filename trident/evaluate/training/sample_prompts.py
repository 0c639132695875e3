"""Continues prompts with the network in training, at every evaluation (--sample-prompts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.config import EvaluationConfig, ModelConfig
from megatron.errors import ConfigError, printable
from megatron.files.plain import open_plain
from megatron.observe.activity import Activity
from megatron.parallel.agreement import run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.prompts import encode_prompt
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.callback import Callback, CallbackSetup, Evaluation
from megatron.train.run import Run
from trident.evaluate.scoring import Query, Scorer
from trident.evaluate.training.engine_scorer import EngineScorer

MOST_PROMPTS = 64
_MOST_BYTES = 1 << 20
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Prompts:
    """Prompts with their tokens, and the most new tokens of each."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    new_tokens: int

    def complete(self, scorer: Scorer, tokenizer: Tokenizer) -> list[str]:
        """The most probable continuations, each up to the end of its document; collective over the scorer's ranks."""
        continued = complete_greedily(scorer, self.tokens, self.new_tokens, tokenizer.eod_id)
        return [tokenizer.decode(tokens) for tokens in continued]


class SamplePrompts(Callback):
    """Continues the prompts with every evaluation of the validation split, and shows and records the texts."""

    def __init__(self, prompts: Prompts, activity: Activity) -> None:
        self._prompts = prompts
        self._activity = activity

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        prompts = open_prompts(setup.config.evaluation, setup.tokenizer, setup.config.model, setup.mesh)
        return None if prompts is None else cls(prompts, setup.activity)

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.split != "valid":
            return
        run.watch.enter("evaluation", run.progress.step)
        prompts = self._prompts.texts
        texts = self._prompts.complete(EngineScorer.of(run), run.data.tokenizer)
        for prompt, text in zip(prompts, texts, strict=True):
            shown = f"{printable(prompt, _SHOWN_CHARACTERS)} -> {printable(text, _SHOWN_CHARACTERS)}"
            log.info(f"sample at {evaluation.prefix}: {shown}")
        self._activity.sampled(run.progress.step, prompts, texts)


def complete_greedily(scorer: Scorer, prompts: Sequence[Sequence[int]], new_tokens: int, end: int) -> list[list[int]]:
    """Continues each prompt greedily, up to its `end` token.

    Each token is a forward pass over the whole text, because a network in training has no key-value caches. This works
    in every layout and ZeRO stage; for a few prompts, ten tokens take about as long as one batch of an evaluation.

    Args:
        prompts: prompts shorter than the network's positions, which limit the continuations.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    growing = list(range(len(prompts)))
    for _ in range(new_tokens):
        growing = [number for number in growing if len(prompts[number]) + len(texts[number]) < scorer.max_length]
        if not growing:
            break
        # The last token is a dummy target; its score includes the most probable token at this position.
        queries = [Query((*prompts[number], *texts[number], end), len(prompts[number])) for number in growing]
        for number, score in zip(list(growing), scorer.score(queries), strict=True):
            if score.predicted[-1] == end:
                growing.remove(number)
            else:
                texts[number].append(score.predicted[-1])
    return texts


def open_prompts(
    evaluation: EvaluationConfig, tokenizer: Tokenizer, model: ModelConfig, mesh: ParallelMesh
) -> Prompts | None:
    """Reads the prompts of --sample-prompts; collective over the mesh.

    A prompt that leaves no room for --sample-tokens is truncated at its start, but keeps half of the positions.

    Raises:
        ConfigError: the file cannot be read, or holds no prompt, or too many.
    """
    path, new_tokens, positions = evaluation.sample_prompts, evaluation.sample_tokens, model.max_position_embeddings
    if path is None:
        return None
    texts = run_on_all(mesh, lambda: read_prompts(Path(str(path))))
    longest = max(positions - new_tokens, positions // 2)
    tokens = tuple(tuple(encode_prompt(tokenizer, text)[-longest:]) for text in texts)
    return Prompts(texts, tokens, new_tokens)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not blank.

    Raises:
        ConfigError: the file cannot be read, or holds no prompt, or too many.
    """
    try:
        with open_plain(path) as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(
                f"--sample-prompts {path} is larger than {_MOST_BYTES} bytes. Give a few prompts, one per line."
            )
        lines = content.decode().splitlines()
    except OSError as failure:
        raise ConfigError(
            f"--sample-prompts {path} cannot be read: {failure.strerror}. Give a text file with one prompt per line."
        ) from failure
    except UnicodeDecodeError as failure:
        raise ConfigError(
            f"--sample-prompts {path} is not UTF-8 ({failure.reason} at byte {failure.start})."
        ) from failure
    prompts = tuple(line for line in lines if line.strip())
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise ConfigError(
            f"--sample-prompts {path} holds {len(prompts)} prompts, one per line. Give 1 to {MOST_PROMPTS}: each costs "
            "forward passes at every evaluation."
        )
    return prompts
