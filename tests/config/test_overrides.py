"""A tool's flags with the trainer's, over the configuration of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron.config import ConfigSection, Machine, ParallelRequest, RunConfig, TokenizerFacts, flag, resolve
from megatron.config.program_flags import parse_over, with_overrides
from megatron.errors import ConfigError
from tests.config.command_lines import small


@dataclass(frozen=True)
class ToolFlags(ConfigSection):
    """A tool that has a --load of its own."""

    load: str = flag(help="the checkpoint")
    count: int = flag(1, "how many", at_least=1)


def saved() -> RunConfig:
    """What a checkpoint holds."""
    return resolve(small("--fp16"), Machine("cuda", 1, True, True), TokenizerFacts(1000, 999, "f"))


def test_own_flags_are_separated_from_the_trainers() -> None:
    request = parse_over(
        ToolFlags, ["--load", "x", "--count", "3", "--seed", "7", "--sync-tp-duplicated-parameters"], "tool.py"
    )
    assert request.flags == ToolFlags(load="x", count=3)
    assert request.given == {"random.seed": 7}


def test_the_layout_is_the_given_one_and_not_the_checkpoints() -> None:
    words = ["--load", "x", "--seed", "7", "--tensor-model-parallel-size", "2"]
    assert parse_over(ToolFlags, words, "tool.py").layout == ParallelRequest(tensor_model_parallel_size=2)
    assert parse_over(ToolFlags, words[:4], "tool.py").layout == ParallelRequest()


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("--count 0", ["--load is required", "--count 0 is out of range"]),
        ("--load x --decoupled-lr 1", ["--decoupled-lr 1.0 is refused"]),
        ("--load x --swiglu --squared-relu", ["--squared-relu cannot be combined with --swiglu"]),
        ("--load x --seed many", ['--seed expects an integer, got "many"']),
    ],
)
def test_all_problems_are_shown(words: str, sentences: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_over(ToolFlags, words.split(), "tool.py")
    assert len(caught.value.problems) == len(sentences)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_a_shorthand_is_read_as_the_fields_it_stands_for() -> None:
    given = parse_over(ToolFlags, ["--load", "x", "--swiglu", "--hidden-size", "48"], "tool.py").given
    assert given == {"model.hidden_size": 48, "model.activation_function": "silu", "model.gated_linear_unit": True}


def test_fields_that_may_change_are_changed() -> None:
    given = {"random.seed": 7, "data.vocab_file": "moved.json", "precision.bf16": True, "optim.lr": 9.0}
    found = with_overrides(saved(), {**given, "parallel.make_vocab_size_divisible_by": 64, "parallel.zero_stage": 0})
    assert (found.random.seed, found.data.vocab_file, found.precision.dtype_name) == (7, "moved.json", "bfloat16")
    assert found.parallel.make_vocab_size_divisible_by == 64
    assert (found.optim.lr, found.parallel.zero_stage) == (1e-3, 1), "how it was trained stays"


def test_another_architecture_is_refused() -> None:
    assert with_overrides(saved(), {"model.hidden_size": 64}) == saved()
    with pytest.raises(ConfigError, match="--hidden-size 32 contradicts the checkpoint, whose network has 64"):
        with_overrides(saved(), {"model.hidden_size": 32})
