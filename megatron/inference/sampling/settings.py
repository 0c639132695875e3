"""Sampling settings of one sequence: their checks, and their conversion from flags and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.flags.command_line import value_from_file
from megatron.config.flags.fields import Flag, FlagFacts, flags_of
from megatron.config.sampling_flags import LARGEST_LOGIT_BIAS, SamplingFlags, read_logit_bias
from megatron.errors import ConfigError, printable

MOST_LOGIT_BIASES = 1024
_LARGEST_SEED = 2**63 - 1
_LONGEST_ID = 20  # digits
_KINDS = {bool: "true or false", int: "an integer", float: "a number"}
_FLAGS = tuple(flag for flag in flags_of(SamplingFlags) if flag.field != "logit_bias")
_SEED = Flag("seed", int, FlagFacts("the seed of the draws"), 1234, required=False, is_tuple=False, count=None)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings; the defaults draw from the network's distribution.

    `docs/generation.md` has the formulas and their order.

    Args:
        greedy: take the highest score after bias and penalties; temperature and cuts have no effect.
        temperature: divisor of the scores; 0 is greedy.
        top_k: keep the k most probable tokens, and ties with the k-th; 0 keeps all.
        top_p: keep the fewest most probable tokens whose probabilities add up to this value; 0 keeps all.
        min_p: keep the tokens with at least this fraction of the highest probability; 0 keeps all.
        typical_p: keep the tokens whose information is nearest to the entropy, until their probabilities add up to
            this value; 0 keeps all.
        repetition_penalty: values above 1 make tokens of the prompt and of the text so far less probable.
        frequency_penalty: subtracted from a token's score for each time it was generated.
        presence_penalty: subtracted once from the score of each generated token.
        logit_bias: pairs of a token id and the bias of its score; integers become floats.
        seed: determines all draws of a sample, together with its index.

    Raises:
        ConfigError: a value is out of bounds; all problems at once.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    typical_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = [*self._bound_problems(), *_bias_problems(self.logit_bias)]
        if not -_LARGEST_SEED <= self.seed <= _LARGEST_SEED:
            problems.append(f"seed {printable(self.seed)} is out of range. Its magnitude must be below 2^63.")
        if problems:
            raise ConfigError(problems)
        for flag in _FLAGS:
            if flag.element is float:
                object.__setattr__(self, flag.field, float(getattr(self, flag.field)))
        object.__setattr__(self, "logit_bias", tuple((token, float(bias)) for token, bias in self.logit_bias))

    @classmethod
    def of_flags(cls, flags: SamplingFlags, seed: int) -> Sampling:
        values = {flag.field: getattr(flags, flag.field) for flag in _FLAGS}
        return cls(**values, logit_bias=read_logit_bias(flags.logit_bias), seed=seed)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Sampling:
        """Settings from a JSON object whose keys are the fields' names; absent or null ones have their default.

        `logit_bias` is an object of biases by token id, or a list of pairs.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or is out of bounds; all problems at once.
        """
        readers = {flag.field: flag for flag in (*_FLAGS, _SEED)}
        values_by_name: dict[str, Any] = {}
        problems = []
        for key, value in values.items():
            try:
                if key == "logit_bias" and value is not None:
                    values_by_name[key] = _biases_from_json(value)
                elif key in readers and isinstance(value, str):
                    raise ConfigError(f"must be {_KINDS[readers[key].element]}, not {printable(value)}")
                elif key in readers and value is not None:
                    values_by_name[key] = value_from_file(readers[key], value)
                elif key not in readers and key != "logit_bias":
                    known = ", ".join([*readers, "logit_bias"])
                    problems.append(f"{printable(key, quoted=False)} is unknown. Use one of: {known}.")
            except ConfigError as failure:
                problems.append(f"{key} {failure}.")
        try:
            checked = cls(**values_by_name)
        except ConfigError as failure:
            problems += failure.problems
        if problems:
            raise ConfigError(problems)
        return checked

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values, for `of_json`."""
        return {**vars(self), "logit_bias": [list(pair) for pair in self.logit_bias]}

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    @property
    def cuts(self) -> bool:
        """True if tokens are excluded before the draw."""
        return self.top_k > 0 or 0 < self.top_p < 1 or self.min_p > 0 or 0 < self.typical_p < 1

    @property
    def adjusts(self) -> bool:
        """True if a bias or the tokens so far change scores."""
        return bool(self.logit_bias) or self.penalizes

    @property
    def penalizes(self) -> bool:
        """True if the tokens so far change scores."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def _bound_problems(self) -> Iterator[str]:
        """Violations of the flags' bounds, with the fields' names."""
        for flag in _FLAGS:
            value, least, most = getattr(self, flag.field), flag.facts.at_least, flag.facts.at_most
            if not abs(value) < math.inf:
                yield f"{flag.field} {value} is not finite. Give a finite number."
            elif least is not None and value < least:
                yield f"{flag.field} {printable(value)} is out of range. It must be at least {least}."
            elif most is not None and value > most:
                yield f"{flag.field} {printable(value)} is out of range. It must be at most {most}."


def _biases_from_json(value: Any) -> tuple[tuple[int, float], ...]:
    """Reads pairs of token id and bias.

    Raises:
        ConfigError: a value of another form.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MOST_LOGIT_BIASES:
        raise ConfigError(
            f"must be an object of at most {MOST_LOGIT_BIASES} biases by token id, not {printable(value)}"
        )
    biases = []
    for pair in pairs:
        token, bias = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < _LONGEST_ID:
            token = int(token)
        if type(token) is not int or not isinstance(bias, (int, float)) or isinstance(bias, bool):
            raise ConfigError(f"must give a number for each token id, not {printable(pair)}")
        biases.append((token, bias))
    return tuple(biases)


def _bias_problems(biases: tuple[tuple[int, float], ...]) -> Iterator[str]:
    if len(biases) > MOST_LOGIT_BIASES:
        yield f"logit_bias has {len(biases)} tokens. It may have at most {MOST_LOGIT_BIASES}."
    for token, bias in biases:
        if token < 0 or not abs(bias) <= LARGEST_LOGIT_BIAS:
            yield (
                f"logit_bias {printable(bias)} of token {printable(token)} is out of range. Token ids begin at 0, and "
                f"a bias is from -{LARGEST_LOGIT_BIAS:.0f} to {LARGEST_LOGIT_BIAS:.0f}."
            )
            return
