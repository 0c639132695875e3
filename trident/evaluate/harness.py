"""A loaded checkpoint as `lm_eval.api.model.LM`: log-likelihoods, rolling log-likelihoods, generation.

Texts are tokenized by the rules of the harness's `hf` model, so that both give the same figures: blanks at the end of a
context belong to the continuation, the continuation's tokens are those of the whole text after as many as the context
has, and an empty context is the beginning-of-sequence token, or else the end-of-document token. The one
difference: a token that the tokenizer appends to texts (`</s>`) is skipped here, while the harness takes it for the end
of the continuation and loses the continuation's first token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron.errors import ConfigError, DataError, printable
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import broadcast_json
from megatron.tokenizers.prompts import encode_prompt, start_ids
from trident.evaluate.completer import LoadedCompleter
from trident.evaluate.loaded_scorer import LoadedScorer
from trident.evaluate.scoring import Progress, Query

_NEW_TOKENS = 256  # if a task sets no limit, as in the `hf` model
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_WITHOUT_EFFECT = ("until", "do_sample", "num_beams", "use_cache", *_LIMITS)
_KEPT = ("results", "versions", "n-shot", "n-samples", "higher_is_better")


def harness_model(loaded: LoadedModel, batch_size: int = 8, on_progress: Progress | None = None) -> Any:
    """Returns an `lm_eval.api.model.LM` for `lm_eval.simple_evaluate(model=...)`.

    On several ranks all call the harness with the same tasks and get all results; the harness sees one process.

    Args:
        batch_size: texts of full length per forward pass; more if they are shorter.
        on_progress: called with the queries scored so far, and all of them.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as failure:
        raise ConfigError(
            f"the evaluation harness requires lm-eval, which cannot be imported ({failure}). Install it with: "
            "pip install lm-eval"
        ) from failure
    model_class = type("CheckpointModel", (_Methods, TemplateLM), {})
    return model_class(loaded, batch_size, on_progress)


class _Methods:
    """The methods of the model; `TemplateLM` adds the pairs of context and continuation."""

    cache_hook: Any

    def __init__(self, loaded: LoadedModel, batch_size: int, on_progress: Progress | None) -> None:
        super().__init__()
        self.loaded = loaded
        self.tokens = loaded.tokenizer
        self._scorer = LoadedScorer(loaded, batch_size)
        self._on_progress = on_progress

    @property
    def max_length(self) -> int:
        """Most tokens that the network can read."""
        return self.loaded.positions

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return (start_ids(self.tokens) or [self.eot_token_id])[0]

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness caches requests."""
        return self.tokens.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, with the tokenizer's leading special tokens unless present or disabled."""
        if add_special_tokens is False or not string:
            return self.tokens.encode_bare(string)
        return encode_prompt(self.tokens, string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and True if greedy generation would produce it.

        Raises:
            DataError: a continuation is empty, or longer than the network's positions.
        """
        queries = [self._query(context, continuation, texts) for texts, context, continuation in requests]
        scores = self._scorer.score(queries, self._on_progress)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _query(self, context: list[int], continuation: list[int], texts: tuple[str, str]) -> Query:
        """A query, whose context is truncated at its start if it is too long."""
        if not 1 <= len(continuation) <= self.max_length:
            raise DataError(
                f"the continuation {printable(texts[1])} has {len(continuation)} tokens; it must have at least 1 and "
                f"at most the {self.max_length} positions of the network (--max-position-embeddings). Remove this task."
            )
        tokens = (context + continuation)[-(self.max_length + 1) :]
        return Query(tuple(tokens), len(tokens) - len(continuation))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each token once, in windows of the network's positions."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        queries: list[Query] = []
        counts = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            window_queries = [
                self._query(before, after, (text, text)) for before, after in map(make_disjoint_window, windows)
            ]
            queries += window_queries
            counts.append(len(window_queries))
        scores = iter(self._scorer.score(queries, self._on_progress))
        totals = [sum(next(scores).logprob for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts up to a stop text, greedy unless a request sets sampling.

        Raises:
            ConfigError: an unknown setting, or more new tokens than positions.
        """
        texts: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda number: repr(requests[number].args[1]))
        for _, numbers in groupby(order, key=lambda number: repr(requests[number].args[1])):
            group = list(numbers)
            settings = requests[group[0]].args[1]
            contexts = [requests[number].args[0] for number in group]
            continuations = self._continuations(contexts, settings)
            texts.update(zip(group, continuations, strict=True))
            for number, text in zip(group, continuations, strict=True):
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [texts[number] for number in range(len(requests))]

    def _continuations(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> Sequence[str]:
        unknown = sorted(set(settings) - {*_SAMPLING, *_WITHOUT_EFFECT})
        if unknown or settings.get("num_beams", 1) != 1:
            wrong = ", ".join(unknown) or f"num_beams {settings['num_beams']}"
            raise ConfigError(f"the generation settings of a task have {wrong}, which is not supported. Remove it.")
        until = settings.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        new_tokens = next((settings[name] for name in _LIMITS if settings.get(name) is not None), _NEW_TOKENS)
        if not 1 <= new_tokens < self.max_length:
            raise ConfigError(
                f"a task generates up to {new_tokens} tokens, but the network has {self.max_length} positions "
                f"(--max-position-embeddings {self.max_length}), prompt included. Set max_gen_toks in the task's "
                f"generation_kwargs to at most {self.max_length - 1}."
            )
        room = self.max_length - new_tokens
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        completer = LoadedCompleter(self.loaded, _sampling(settings), keeps_blanks=True)
        return completer.continue_tokens(prompts, new_tokens, stops)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Refuses chats.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the adapter to the evaluation harness does not support chats. Remove apply_chat_template, or export the "
            "checkpoint with tools/convert/export_hf.py and use the harness's hf model."
        )


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """The sampling of a task's settings; greedy by default."""
    draws = settings.get("do_sample") or (settings.get("do_sample") is None and settings.get("temperature"))
    if not draws:
        return Sampling(greedy=True)
    return Sampling.of_json({name: settings[name] for name in _SAMPLING if settings.get(name) is not None})


def run_harness(
    model: Any,
    mesh: ParallelMesh,
    names: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    bootstrap_iters: int = 100_000,
) -> dict[str, dict[str, Any]]:
    """Runs tasks of the harness; collective over all ranks, with the results on each.

    Args:
        model: the result of `harness_model`.
        names: names of the tasks.
        include_path: folder of additional tasks.
        num_fewshot: solved examples before each question; None for the task's default.
        limit: use only the first items of each task.
        bootstrap_iters: bootstrap draws for the standard errors of metrics without a formula.

    Returns:
        `results` and their descriptions (`versions`, `n-shot`, `n-samples`, `higher_is_better`), each by task.

    Raises:
        ConfigError: an unknown task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Indexing the harness's own tasks takes seconds, so skip it if the folder has all tasks.
    index = TaskManager(include_path=include_path, include_defaults=False)
    if not set(names) <= set(index.all_tasks):
        index = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in index.all_tasks]
    if unknown:
        raise ConfigError(
            f"the evaluation harness has no task {', '.join(unknown)}. `lm_eval ls tasks` lists them; tasks over "
            "local files are YAML files in the folder --include_path."
        )
    evaluated = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=bootstrap_iters,
        task_manager=index,
        log_samples=False,
    )
    # The harness returns results only on the first process of a node.
    kept = {key: evaluated[key] for key in _KEPT if key in evaluated} if evaluated is not None else {}
    results: dict[str, dict[str, Any]] = broadcast_json(json.loads(json.dumps(kept, default=str)), mesh.world)
    return results
