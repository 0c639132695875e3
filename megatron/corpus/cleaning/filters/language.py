"""Which language a text is in, with the small model that the optional package py3langid carries: no network."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError

_STRETCHES = 4


class LanguageFilter:
    """Passes only texts in wanted languages.

    Args:
        languages: their ISO 639 codes.
        threshold: least probability, over all languages that the model knows, of the best language.
        sample_characters: how much of a text is looked at, in four stretches from its beginning to its end; 0 is all.

    Raises:
        ConfigError: py3langid is not installed, or does not know a language.
    """

    def __init__(self, languages: Sequence[str], threshold: float, sample_characters: int) -> None:
        try:
            from py3langid import langid
        except ImportError as failure:
            raise ConfigError("--language needs the py3langid package (pip install py3langid).") from failure
        self._identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        unknown = sorted(set(languages) - set(self._identifier.labels))
        if unknown:
            raise ConfigError(
                f"--language {','.join(languages)}: {', '.join(unknown)} is not a language that can be detected. Known "
                f"are "
                f"{' '.join(sorted(self._identifier.labels))}."
            )
        self._languages = frozenset(languages)
        self._threshold = threshold
        self._sample_characters = sample_characters

    def best(self, text: str) -> tuple[str, float]:
        """The most probable language of a text and its probability."""
        language, probability = self._identifier.classify(sample(text, self._sample_characters))
        return str(language), float(probability)

    def fault(self, text: str) -> str | None:
        """Why a text does not pass, or None."""
        language, probability = self.best(text)
        if language in self._languages and probability >= self._threshold:
            return None
        return f"{language} {probability:.2f}"


def sample(text: str, characters: int) -> str:
    """Four stretches of a text, evenly from its beginning to its end, of this many characters in total; 0 is all."""
    if not characters or len(text) <= characters:
        return text
    size = max(1, characters // _STRETCHES)
    step = (len(text) - size) / (_STRETCHES - 1)
    starts = (int(step * number) for number in range(_STRETCHES))
    return "\n".join(text[start : start + size] for start in starts)
