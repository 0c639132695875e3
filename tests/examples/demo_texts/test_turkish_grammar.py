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


def test_suffixes_follow_each_other() -> None:
    assert Word.of("göz").with_suffixes(grammar.PLURAL, grammar.POSSESSED, "nDA") == "gözlerinde"
    assert Word.of("kedi").with_suffixes(grammar.POSSESSED) == "kedisi"
    assert Word.of("yol").with_suffixes("CI") == "yolcu" and Word.of("iş").with_suffixes("CI") == "işçi"
    assert Word.of("ev").with_suffixes() == Word.of("ev").with_suffixes("") == "ev"


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("İstanbul", "İstanbul'u İstanbul'a İstanbul'da"),
        ("Ayşe", "Ayşe'yi Ayşe'ye Ayşe'de"),
        ("Iğdır", "Iğdır'ı Iğdır'a Iğdır'da"),
        ("Tokat", "Tokat'ı Tokat'a Tokat'ta"),
    ],
)
def test_names_keep_their_spelling(name: str, forms: str) -> None:
    suffixes = (grammar.ACCUSATIVE, grammar.DATIVE, grammar.LOCATIVE)
    assert [Word.name(name).with_suffixes(suffix) for suffix in suffixes] == forms.split()


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


def test_persons() -> None:
    come, go = Word.of("gel"), Word.of("git>gid")
    past, future = ([conjugated(come, tense, person) for person in range(6)] for tense in ("DI", "(y)AcAk"))
    assert " ".join(past) == "geldim geldin geldi geldik geldiniz geldiler"
    assert " ".join(future) == "geleceğim geleceksin gelecek geleceğiz geleceksiniz gelecekler"
    assert [progressive(go, person) for person in (0, 3)] == ["gidiyorum", "gidiyoruz"]
    assert [aorist(go, person) for person in (0, 5)] == ["giderim", "giderler"]


def test_a_question_particle_follows_the_vowels_of_its_word() -> None:
    assert [grammar.question_particle(word) for word in ("aldı", "geldi", "okudu", "gördü")] == ["mı", "mi", "mu", "mü"]


def test_both_letters_i_keep_their_dots() -> None:
    assert grammar.upper("ılık iğde şıra") == "ILIK İĞDE ŞIRA"
    assert grammar.lower("ILIK İĞDE ŞIRA") == "ılık iğde şıra"
    assert grammar.capitalized("“iğne” ılık") == "“İğne” ılık" and grammar.capitalized("ılık") == "Ilık"
    assert grammar.capitalized("") == ""
