"""Repair gives what ftfy gives, and spaces become plain without touching indentation."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError
from trident.corpus.cleaning.documents.repair import TextRepair, with_plain_spaces

ftfy = pytest.importorskip("ftfy", reason="the ftfy package is not installed")

BROKEN = [
    "schÃ¶n",
    "â€œquotedâ€\x9d",
    "&amp;",
    "&lt;p&gt;",
    "<b>",
    "\r\n",
    "\x1b[31mred\x1b[0m",
    "ﬁ",
    "“",
    "\x00",
    "Ａ",
    "e\u0301",
]
TEXTS = st.lists(st.sampled_from([*BROKEN, "plain", " ", "\n", "\t", "&", ";", "é", "漢"]), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        ("Das ist schÃ¶n", "Das ist schön"),
        ("âœ” No problems", "✔ No problems"),
        ("Ã§a va trÃ¨s bien", "ça va très bien"),
        ("TÃ¼rkÃ§e iyi Ã§alÄ±ÅŸÄ±yor", "Türkçe iyi çalışıyor"),
        ("a\r\nb &amp; c", "a\nb & c"),
        ("plain ASCII stays", "plain ASCII stays"),
        ("già è già", "già è già"),
    ],
)
def test_mojibake_is_repaired(broken: str, whole: str) -> None:
    assert TextRepair().repaired(broken) == whole


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_it_is_ftfy_on_the_whole_text(text: str) -> None:
    assert TextRepair().repaired(text) == ftfy.fix_text(text)
    assert TextRepair(straighten_quotes=False).repaired(text) == ftfy.fix_text(text, uncurl_quotes=False)


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_it_is_ftfy_on_any_text(text: str) -> None:
    assert TextRepair().repaired(text) == ftfy.fix_text(text)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ConfigError, match=r"--fix-text requires the ftfy package \(pip install ftfy\)"):
        TextRepair()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a\u00a0b\u3000c", "a b c"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("a  \nb\t\n", "a\nb"),
        ("a\n\n\n\n\n\nb\n\n\nc", "a\n\n\nb\n\n\nc"),
        ("\ufeffif x:\n    y\x00 = 1\n", "if x:\n    y = 1"),
        ("zero\u200bwidth", "zerowidth"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("a  b", "a  b"),
        ("", ""),
    ],
)
def test_spaces(text: str, plain: str) -> None:
    assert with_plain_spaces(text) == plain


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab \t\n\r\x0b\x85\xa0\u200b\ufeff\u2028漢"), max_size=40))
def test_plain_spaces_stay_plain(text: str) -> None:
    plain = with_plain_spaces(text)
    assert with_plain_spaces(plain) == plain
    assert "".join(plain.split()) == "".join(text.replace("\u200b", "").replace("\ufeff", "").split())
