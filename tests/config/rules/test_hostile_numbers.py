"""Numbers that no one means: each is accepted or refused by a sentence, within a moment, and never a traceback."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.config.flags.fields import Flag
from megatron.config.parse import known_flags
from megatron.config.schedule import global_batch_size, learning_rate, planned_iterations, planned_samples, weight_decay
from megatron.errors import ConfigError

MACHINE = Machine("cpu", 1, supports_fp16=True, supports_bf16=True)
TOKENIZER = TokenizerFacts(600, 599, "none")
REQUIRED = {
    "--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "2", "--seq-length": "32",
    "--max-position-embeddings": "32", "--micro-batch-size": "2", "--global-batch-size": "4", "--lr": "1e-3",
    "--data-path": "x", "--vocab-file": "x", "--merge-file": "x",
}  # fmt: skip
LENGTHS = (("--train-iters", "8"), ("--train-samples", "64"), ("--train-tokens", "640"))
AROUND = (
    (), ("--use-mup",), ("--fp16",), ("--num-experts", "4"), ("--position-embedding-type", "rope"),
    ("--lr-decay-style", "cosine", "--weight-decay-incr-style", "linear", "--start-weight-decay", "0",
     "--end-weight-decay", "1"), ("--rampup-batch-size", "2", "2", "8"),
    ("--skip-train-iteration-range", "2-9223372036854775807"),
)  # fmt: skip
HOSTILE = (
    "-1", "0", "1", "3", "0.5", "0.999999", "1e-6", "nan", "inf", "-inf", "1e400", "1e300", "3e38", "1e-38", "1e-300",
    "1e-400", "1000000", str(2**31), str(2**32), str(2**63 - 1), str(2**63), str(-(2**63)), "9" * 400, "9" * 5000,
    "0x10", "1_0", "", " ", "\u0661",
)  # fmt: skip
LIMIT_SECONDS = 5.0  # of CPU; a parse takes 0.03


def numeric_flags() -> list[Flag]:
    return [flag for flag in known_flags().values() if flag.element in (int, float)]


def use(argv: list[str]) -> None:
    """Everything that is computed of a configuration before a model is built."""
    config = resolve(parse(argv), MACHINE, TOKENIZER)
    for consumed in (0, 7, 10**6):
        learning_rate(config.optim, consumed)
        weight_decay(config.optim, consumed)
        global_batch_size(config.optim, consumed)
    planned_iterations(config.optim)
    planned_samples(config.optim, config.evaluation)
    text = json.dumps(config.to_json(), allow_nan=False)
    assert RunConfig.from_json(json.loads(text)) == config or config.notices


def test_hostile_numbers_are_refused_or_harmless(pytestconfig: pytest.Config) -> None:
    """A sample of the combinations; more with `--cases`, one for every ten of them."""
    flags = numeric_flags()
    assert len(flags) > 80
    every = list(itertools.product(flags, HOSTILE, LENGTHS, AROUND))
    chosen = random.Random(pytestconfig.getoption("--fuzz-seed"))
    refused = accepted = 0
    for flag, word, length, around in chosen.sample(every, min(len(every), pytestconfig.getoption("--cases") // 10)):
        pairs = {**REQUIRED, **dict([length])}
        if flag.positive_name in pairs:
            del pairs[flag.positive_name]
        words = [text for pair in pairs.items() for text in pair]
        argv = [*words, *around, flag.positive_name, *[word] * (flag.count or 1)]
        began = time.process_time()
        try:
            use(argv)
            accepted += 1
        except ConfigError as failure:
            refused += 1
            assert all(0 < len(text) < 1500 for text in failure.problems), argv
        except Exception as failure:
            raise AssertionError(f"{type(failure).__name__} for {argv}") from failure
        assert time.process_time() - began < LIMIT_SECONDS, argv
    assert min(refused, accepted) > (refused + accepted) // 20
