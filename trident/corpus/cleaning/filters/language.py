"""Language identification with the small model in the optional package py3langid, without network access."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from trident.corpus.cleaning.documents.clean_options import LanguageChoice
from trident.corpus.cleaning.filters.rejections import LANGUAGE, Rejection

_SAMPLES = 4


class LanguageFilter:
    """Passes only texts in given languages.

    Args:
        choice: ISO 639 codes of the languages, minimum probability of the best language, and number of characters to
            examine.

    Raises:
        ConfigError: py3langid is not installed, or does not support a language.
    """

    def __init__(self, choice: LanguageChoice) -> None:
        try:
            from py3langid import langid
        except ImportError as failure:
            raise ConfigError("--language requires the py3langid package (pip install py3langid).") from failure
        self._identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        unknown = sorted(set(choice.languages) - set(self._identifier.labels))
        if unknown:
            raise ConfigError(
                f"--language {','.join(choice.languages)}: {', '.join(unknown)} is not supported. Use "
                f"{' '.join(sorted(self._identifier.labels))}."
            )
        self._languages = frozenset(choice.languages)
        self._threshold = choice.threshold
        self._sample_characters = choice.sample_characters

    def best(self, text: str) -> tuple[str, float]:
        """Returns the most probable language of a text and its probability."""
        language, probability = self._identifier.classify(sample(text, self._sample_characters))
        return str(language), float(probability)

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """Returns a rejection for each text, None if it is kept."""
        return [
            None
            if language in self._languages and probability >= self._threshold
            else Rejection(LANGUAGE, f"{language} {probability:.2f}")
            for language, probability in map(self.best, texts)
        ]


def sample(text: str, characters: int) -> str:
    """Returns four evenly spaced excerpts of a text, with this many characters in total; 0 takes the whole text."""
    if not characters or len(text) <= characters:
        return text
    size = max(1, characters // _SAMPLES)
    step = (len(text) - size) / (_SAMPLES - 1)
    starts = (int(step * number) for number in range(_SAMPLES))
    return "\n".join(text[start : start + size] for start in starts)
