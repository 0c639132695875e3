"""The flags that say how the tokens of a text are chosen, declared once for all tools, and their bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError, printable

LARGEST_LOGIT_BIAS = 100.0
LARGEST_LENGTH_PENALTY = 10.0
MOST_BEAMS = 256
MOST_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True)
class SamplingFlags(ConfigSection):
    """How the next token is chosen; the seed is the trainer's `--seed`.

    The defaults leave the distribution of the network as it is. `docs/generation.md` has the formulas and their order.

    Source: names and defaults of the first four, Megatron-DeepSpeed `tools/generate_samples_gpt.py`.
    """

    help_title = "how the next token is chosen"

    temperature: float = flag(1.0, "divisor of the logits; 0 means --greedy", at_least=0)
    greedy: bool = flag(False, "always take the most probable token")
    top_k: int = flag(0, "sample from the k most probable tokens; 0 from all", at_least=0, spelled=("--top_k",))
    top_p: float = flag(
        0.0, "sample from the most probable tokens up to this cumulative probability; 0 from all", at_least=0,
        at_most=1, spelled=("--top_p",),
    )  # fmt: skip
    min_p: float = flag(
        0.0, "sample from the tokens with at least this fraction of the highest probability; 0 from all", at_least=0,
        at_most=1, spelled=("--min_p",),
    )  # fmt: skip
    typical_p: float = flag(
        0.0, "sample from the tokens whose information is nearest to the entropy, up to this cumulative probability; "
        "0 from all", at_least=0, at_most=1, spelled=("--typical_p",),
    )  # fmt: skip
    repetition_penalty: float = flag(
        1.0, "divisor of the positive logits, and factor of the negative ones, of tokens in the prompt or the text; 1 "
        "changes nothing", at_least=0.01, at_most=100, spelled=("--repetition_penalty",),
    )  # fmt: skip
    frequency_penalty: float = flag(
        0.0, "subtracted from the logit of a token for each time it was generated", at_least=-2, at_most=2,
        spelled=("--frequency_penalty",),
    )  # fmt: skip
    presence_penalty: float = flag(
        0.0, "subtracted once from the logit of every token that was generated", at_least=-2, at_most=2,
        spelled=("--presence_penalty",),
    )  # fmt: skip
    logit_bias: tuple[str, ...] = flag(
        (), f"added to the logits of tokens, as ID=BIAS, from -{LARGEST_LOGIT_BIAS:.0f} (never) to "
        f"{LARGEST_LOGIT_BIAS:.0f} (always)", nargs="+",
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        try:
            read_logit_bias(self.logit_bias)
        except ConfigError as failure:
            yield from failure.problems

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that the tokens of --logit-bias are among those that may be generated.

        Raises:
            ConfigError: one is not.
        """
        for token, _ in read_logit_bias(self.logit_bias):
            if token >= vocab_size:
                raise ConfigError(
                    f"--logit-bias has token {token}, and the tokenizer's ids are 0 to {vocab_size - 1}. Remove it."
                )


@dataclass(frozen=True)
class BeamFlags(SamplingFlags):
    """How the next token is chosen, or how the most probable texts are searched for instead.

    Source: names and meaning, transformers `GenerationConfig`.
    """

    help_title = "search with beams"

    num_beams: int = flag(
        1, "search for the most probable texts with this many beams instead of drawing; 1 draws", at_least=1,
        at_most=MOST_BEAMS, spelled=("--num_beams",),
    )  # fmt: skip
    length_penalty: float = flag(
        1.0, "power of the length by which a beam's log-probability is divided; higher favors longer texts",
        at_least=-LARGEST_LENGTH_PENALTY, at_most=LARGEST_LENGTH_PENALTY, spelled=("--length_penalty",),
    )  # fmt: skip
    early_stopping: str = flag(
        "false", "when a search ends, once --num-beams texts are finished: at once (true), when the best running text "
        "could not get among them if it ended now (false), or at any length (never)",
        choices=("false", "true", "never"), spelled=("--early_stopping",),
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        of_draws = {field.name for field in dataclasses.fields(SamplingFlags)}
        for field in dataclasses.fields(BeamFlags):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "num_beams" or value == field.default:
                continue
            shown = f"{option} {' '.join(value)}" if isinstance(value, tuple) else f"{option} {value}"
            if field.name in of_draws and self.num_beams > 1:
                yield f"{shown} is for drawing tokens, and --num-beams {self.num_beams} searches. Drop one of them."
            if field.name not in of_draws and self.num_beams == 1:
                yield f"{shown} is for beam search. Give --num-beams too, or drop {option}."


def read_logit_bias(words: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The pairs of token id and bias that words such as `50256=-100` give.

    Raises:
        ConfigError: a word is no such pair, or a bias is out of bounds.
    """
    pairs = []
    for word in words:
        token, _, bias = word.partition("=")
        try:
            pair = int(token), float(bias)
        except ValueError:
            pair = -1, math.nan
        if pair[0] < 0 or not abs(pair[1]) <= LARGEST_LOGIT_BIAS:
            raise ConfigError(
                f"--logit-bias {printable(word, quoted=False)} is not a token id and a bias from "
                f"-{LARGEST_LOGIT_BIAS:.0f} to {LARGEST_LOGIT_BIAS:.0f}. Write for example 50256=-100."
            )
        pairs.append(pair)
    return tuple(pairs)
