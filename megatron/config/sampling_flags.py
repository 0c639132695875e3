"""Sampling flags of all generation tools, and their bounds."""

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
    """Sampling of the next token; the seed is the trainer's `--seed`.

    The defaults do not change the model's distribution. `docs/generation.md` has the formulas and their order.

    Source: names and defaults of the first four, Megatron-DeepSpeed `tools/generate_samples_gpt.py`.
    """

    help_title = "sampling"

    temperature: float = flag(1.0, "sampling temperature; 0 for greedy decoding", at_least=0)
    greedy: bool = flag(False, "greedy decoding: always take the most probable token")
    top_k: int = flag(0, "sample from the k most probable tokens; 0 disables it", at_least=0, spelled=("--top_k",))
    top_p: float = flag(
        0.0, "nucleus sampling: sample from the most probable tokens up to this cumulative probability; 0 disables it",
        at_least=0, at_most=1, spelled=("--top_p",),
    )  # fmt: skip
    min_p: float = flag(
        0.0, "sample from tokens with at least this fraction of the highest probability; 0 disables it", at_least=0,
        at_most=1, spelled=("--min_p",),
    )  # fmt: skip
    typical_p: float = flag(
        0.0, "locally typical sampling: sample from the tokens whose information content is closest to the entropy, up "
        "to this cumulative probability; 0 disables it", at_least=0, at_most=1, spelled=("--typical_p",),
    )  # fmt: skip
    repetition_penalty: float = flag(
        1.0, "repetition penalty of tokens in the prompt or the generated text: divides positive logits and multiplies "
        "negative ones; 1 disables it", at_least=0.01, at_most=100, spelled=("--repetition_penalty",),
    )  # fmt: skip
    frequency_penalty: float = flag(
        0.0, "subtracted from a token's logit for each time it was generated", at_least=-2, at_most=2,
        spelled=("--frequency_penalty",),
    )  # fmt: skip
    presence_penalty: float = flag(
        0.0, "subtracted once from the logit of each token that was generated", at_least=-2, at_most=2,
        spelled=("--presence_penalty",),
    )  # fmt: skip
    logit_bias: tuple[str, ...] = flag(
        (), f"biases added to token logits, as ID=BIAS, from -{LARGEST_LOGIT_BIAS:.0f} (never) to "
        f"{LARGEST_LOGIT_BIAS:.0f} (always)", nargs="+",
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        try:
            read_logit_bias(self.logit_bias)
        except ConfigError as failure:
            yield from failure.problems

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that the tokens of --logit-bias are in the vocabulary.

        Raises:
            ConfigError: one is not.
        """
        for token, _ in read_logit_bias(self.logit_bias):
            if token >= vocab_size:
                raise ConfigError(
                    f"--logit-bias has token {token}, but the tokenizer's ids are 0 to {vocab_size - 1}. Remove it."
                )


@dataclass(frozen=True)
class BeamFlags(SamplingFlags):
    """Sampling, or beam search in its place.

    Source: names and meaning, transformers `GenerationConfig`.
    """

    help_title = "beam search"

    num_beams: int = flag(
        1, "number of beams of beam search; 1 for sampling", at_least=1,
        at_most=MOST_BEAMS, spelled=("--num_beams",),
    )  # fmt: skip
    length_penalty: float = flag(
        1.0, "exponent of the length that divides a beam's log-probability; larger values favor longer texts",
        at_least=-LARGEST_LENGTH_PENALTY, at_most=LARGEST_LENGTH_PENALTY, spelled=("--length_penalty",),
    )  # fmt: skip
    early_stopping: str = flag(
        "false", "when beam search stops after --num-beams beams have finished: at once (true), once no running beam "
        "can still enter the top at its current length (false), or at any length (never)",
        choices=("false", "true", "never"), spelled=("--early_stopping",),
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        sampling = {field.name for field in dataclasses.fields(SamplingFlags)}
        for field in dataclasses.fields(BeamFlags):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name == "num_beams" or value == field.default:
                continue
            shown = f"{option} {' '.join(value)}" if isinstance(value, tuple) else f"{option} {value}"
            if field.name in sampling and self.num_beams > 1:
                yield f"{shown} cannot be combined with --num-beams {self.num_beams}: it is for sampling. Drop one."
            if field.name not in sampling and self.num_beams == 1:
                yield f"{shown} requires beam search. Give --num-beams, or drop {option}."


def read_logit_bias(entries: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Reads pairs of token id and bias from entries such as `50256=-100`.

    Raises:
        ConfigError: an entry is not such a pair, or a bias is out of bounds.
    """
    pairs = []
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            pair = int(token), float(bias)
        except ValueError:
            pair = -1, math.nan
        if pair[0] < 0 or not abs(pair[1]) <= LARGEST_LOGIT_BIAS:
            raise ConfigError(
                f"--logit-bias {printable(entry, quoted=False)} is invalid. Expected a token id and a bias from "
                f"-{LARGEST_LOGIT_BIAS:.0f} to {LARGEST_LOGIT_BIAS:.0f}, for example 50256=-100."
            )
        pairs.append(pair)
    return tuple(pairs)
