"""Texts in the wanted languages pass; the model is asked, not the network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.trident.corpus.cleaning.runs import clean_texts
from trident.corpus.cleaning.documents.clean_options import CleanOptions, LanguageChoice
from trident.corpus.cleaning.filters.language import LanguageFilter, sample
from trident.corpus.cleaning.filters.rejections import Rejection

pytest.importorskip("py3langid", reason="the py3langid package is not installed")

ENGLISH = (
    "The committee has decided that the meeting will take place on the first Monday of every month in the town hall."
)
TURKISH = "Komite, toplantının her ayın ilk pazartesi günü belediye binasında yapılmasına karar verdi ve bunu duyurdu."
GERMAN = (
    "Der Ausschuss hat beschlossen, dass die Sitzung an jedem ersten Montag des Monats im Rathaus stattfinden wird."
)
CHINESE = "委员会决定会议将于每月第一个星期一在市政厅举行，并邀请所有市民参加。"
FRENCH = "Le comité a décidé que la réunion aura lieu le premier lundi de chaque mois à la mairie de la ville."


@pytest.mark.parametrize(
    ("wanted", "stays"),
    [(("en", "tr"), [ENGLISH, TURKISH]), (("zh", "de"), [GERMAN, CHINESE])],
)
def test_mixed_languages(tmp_path: Path, wanted: tuple[str, ...], stays: list[str]) -> None:
    options = CleanOptions(language=LanguageChoice(wanted, 0.5, 1000))
    kept, report = clean_texts(tmp_path, [ENGLISH, TURKISH, GERMAN, CHINESE, FRENCH], options)
    assert kept == stays
    assert report.dropped["language"].documents == 5 - len(stays)
    assert report.dropped["language"].examples[-1]["detail"].startswith("fr ")


def test_the_threshold_is_a_probability() -> None:
    strict = LanguageFilter(LanguageChoice(("en",), 0.9, 0))
    language, probability = strict.best(ENGLISH)
    assert language == "en" and 0.9 < probability <= 1 and strict.rejections([ENGLISH]) == [None]
    language, probability = strict.best(ENGLISH[:13])
    assert strict.rejections([ENGLISH[:13]]) == [Rejection("language", f"{language} {probability:.2f}")]
    assert probability < 0.9


def test_an_unknown_language() -> None:
    with pytest.raises(ConfigError, match="--language en,klingon: klingon is not supported.* de .* tr "):
        LanguageFilter(LanguageChoice(("en", "klingon"), 0.5, 0))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(ConfigError, match=r"--language requires the py3langid package \(pip install py3langid\)"):
        LanguageFilter(LanguageChoice(("en",), 0.5, 0))


def test_a_sample_reaches_from_the_beginning_to_the_end() -> None:
    text = "".join(chr(ord("a") + number // 100) for number in range(2600))
    taken = sample(text, 40)
    assert taken.startswith("a" * 10) and taken.endswith("z" * 10) and len(taken) == 43
    assert sample(text, 0) == sample(text, 2600) == text
