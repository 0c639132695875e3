"""Turkish word forms, each compared with the form in a grammar book."""

from __future__ import annotations

import pytest

from examples.demo_texts import turkish_grammar as grammar
from examples.demo_texts.turkish_grammar import Word, aorist, conjugated, progressive

NOUN_SUFFIXES = (
    grammar.PLURAL,
    grammar.ACCUSATIVE,
    grammar.DATIVE,
    grammar.LOCATIVE,
    grammar.ABLATIVE,
    grammar.GENITIVE,
    grammar.INSTRUMENTAL,
    grammar.POSSESSED,
)


@pytest.mark.parametrize(
    ("entry", "forms"),
    [
        ("kitap>kitab", "kitaplar kitabı kitaba kitapta kitaptan kitabın kitapla kitabı"),
        ("şehir>şehr", "şehirler şehri şehre şehirde şehirden şehrin şehirle şehri"),
        ("araba", "arabalar arabayı arabaya arabada arabadan arabanın arabayla arabası"),
        ("göz", "gözler gözü göze gözde gözden gözün gözle gözü"),
        ("koku", "kokular kokuyu kokuya kokuda kokudan kokunun kokuyla kokusu"),
        ("ışık>ışığ", "ışıklar ışığı ışığa ışıkta ışıktan ışığın ışıkla ışığı"),
        ("ağaç>ağac", "ağaçlar ağacı ağaca ağaçta ağaçtan ağacın ağaçla ağacı"),
    ],
)
def test_nouns(entry: str, forms: str) -> None:
    assert [Word.of(entry).with_suffixes(suffix) for suffix in NOUN_SUFFIXES] == forms.split()


@pytest.mark.parametrize(
    ("entry", "forms"),
    [
        ("gel", "geldi gelmedi gelecek gelmiş geliyor gelmiyor gelir"),
        ("git>gid", "gitti gitmedi gidecek gitmiş gidiyor gitmiyor gider"),
        ("oku", "okudu okumadı okuyacak okumuş okuyor okumuyor okur"),
        ("bekle", "bekledi beklemedi bekleyecek beklemiş bekliyor beklemiyor bekler"),
        ("oyna", "oynadı oynamadı oynayacak oynamış oynuyor oynamıyor oynar"),
        ("söyle", "söyledi söylemedi söyleyecek söylemiş söylüyor söylemiyor söyler"),
        ("çalış", "çalıştı çalışmadı çalışacak çalışmış çalışıyor çalışmıyor çalışır"),
        ("gör", "gördü görmedi görecek görmüş görüyor görmüyor görür"),
        ("yaz", "yazdı yazmadı yazacak yazmış yazıyor yazmıyor yazar"),
    ],
)
def test_verbs(entry: str, forms: str) -> None:
    verb = Word.of(entry)
    found = [conjugated(verb, grammar.PAST), conjugated(verb, grammar.PAST, negative=True)]
    found += [conjugated(verb, grammar.FUTURE), conjugated(verb, grammar.INFERRED)]
    assert [*found, progressive(verb), progressive(verb, negative=True), aorist(verb)] == forms.split()


def test_both_letters_i_keep_their_dots() -> None:
    assert grammar.upper("ılık iğde şıra") == "ILIK İĞDE ŞIRA"
    assert grammar.lower("ILIK İĞDE ŞIRA") == "ılık iğde şıra"
    assert grammar.capitalized("“iğne” ılık") == "“İğne” ılık" and grammar.capitalized("ılık") == "Ilık"
    assert grammar.capitalized("") == ""
