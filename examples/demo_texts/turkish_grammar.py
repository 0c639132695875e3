"""Turkish word forms: suffixes that follow the vowels of their stem, softened consonants, and upper case with İ and I.

Suffixes are patterns: `A` stands for a or e, `I` for ı, i, u or ü, `D` for d or t, `C` for c or ç. A letter in
parentheses is only there where it is needed: a consonant after a vowel, a vowel after a consonant.

Source: the rules of any grammar of Turkish, among them G. Lewis, Turkish Grammar, chapters 1, 2 and 8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PLURAL = "lAr"
ACCUSATIVE, DATIVE, LOCATIVE, ABLATIVE, GENITIVE, INSTRUMENTAL = "(y)I", "(y)A", "DA", "DAn", "(n)In", "(y)lA"
POSSESSED = "(s)I"  # his, her, its
PAST, INFERRED, FUTURE = "DI", "mIş", "(y)AcAk"
# Persons in order: I, you, he or she, we, you (plural), they.
PAST_PERSONS = ("m", "n", "", "k", "nIz", "lAr")
OTHER_PERSONS = ("(y)Im", "sIn", "", "(y)Iz", "sInIz", "lAr")

_VOWELS = "aıoueiöü"
_FRONT = "eiöü"
_HIGH_AFTER = dict(zip("aıoueiöü", "ııuuiiüü", strict=True))
_VOICELESS = "fstkçşhp"
_UPPER = str.maketrans("iı", "İI")
_LOWER = str.maketrans("İI", "iı")
# Stems of one syllable whose aorist has a high vowel: gelir, but yazar.
_HIGH_AORIST = frozenset(("al", "bil", "bul", "dur", "gel", "gör", "kal", "ol", "öl", "san", "var", "ver", "vur"))


@dataclass(frozen=True)
class Word:
    """A stem, and its form before a vowel: kitap, kitab (kitabı); burun, burn (burnu).

    Args:
        apostrophe: True if suffixes follow an apostrophe, as after names.
    """

    bare: str
    before_vowel: str
    apostrophe: bool = False

    @classmethod
    def of(cls, entry: str) -> Word:
        """Reads a word list's entry: `ev`, or `kitap>kitab` where the stem changes."""
        bare, _, changed = entry.partition(">")
        return cls(bare, changed or bare)

    @classmethod
    def name(cls, text: str) -> Word:
        """A name, whose spelling never changes."""
        return cls(text, text, apostrophe=True)

    def with_suffixes(self, *suffixes: str) -> str:
        """The stem with suffixes in their order, each fitted to what stands before it."""
        if not any(suffixes):
            return self.bare
        text, changed = self.bare, self.before_vowel
        mark = "'" if self.apostrophe else ""
        for suffix in filter(None, suffixes):
            fitted = _fitted(text, changed, suffix)
            text = (changed if fitted[0] in _VOWELS else text) + mark + fitted
            # The future's k softens before a vowel as a noun's does: gelecek, geleceğim.
            changed = text[:-1] + "ğ" if suffix == FUTURE else text
            mark = ""
        return text


def conjugated(verb: Word, tense: str, person: int = 2, *, negative: bool = False) -> str:
    """A verb in the past, the inferred past or the future."""
    stem = Word.of(verb.with_suffixes("mA")) if negative else verb
    return stem.with_suffixes(tense, (PAST_PERSONS if tense == PAST else OTHER_PERSONS)[person])


def progressive(verb: Word, person: int = 2, *, negative: bool = False) -> str:
    """The present: geliyor. It takes the place of a stem's last low vowel: bekle, bekliyor."""
    stem = verb.with_suffixes("mA") if negative else verb.bare
    if stem[-1] in "ae":
        stem = stem[:-1] + _HIGH_AFTER[_last_vowel(stem[:-1])]
    elif stem[-1] not in _VOWELS:
        stem = verb.before_vowel + _HIGH_AFTER[_last_vowel(stem)]
    return Word.of(stem + "yor").with_suffixes(OTHER_PERSONS[person])


def aorist(verb: Word, person: int = 2) -> str:
    """The habitual present: gelir, yazar, bekler."""
    one_syllable = len(re.findall(f"[{_VOWELS}]", verb.bare)) == 1
    vowel = "(A)" if one_syllable and verb.bare not in _HIGH_AORIST else "(I)"
    return verb.with_suffixes(vowel + "r", OTHER_PERSONS[person])


def question_particle(word: str) -> str:
    """The question particle after a word: geldi mi, okudu mu."""
    return _fitted(word, word, "mI")


def upper(text: str) -> str:
    """Turkish upper case: i becomes İ, ı becomes I."""
    return text.translate(_UPPER).upper()


def lower(text: str) -> str:
    """Turkish lower case: İ becomes i, I becomes ı."""
    return text.translate(_LOWER).lower()


def capitalized(text: str) -> str:
    """The text with its first letter in upper case, even after an opening quotation mark."""
    first = next((index for index, letter in enumerate(text) if letter.isalnum()), 0)
    return text[:first] + upper(text[first : first + 1]) + text[first + 1 :]


def _fitted(text: str, changed: str, suffix: str) -> str:
    """The suffix with the vowels and consonants that fit a stem; `changed` is the stem before a vowel."""
    optional = re.match(r"\((.)\)", suffix)
    if optional:
        needed = (optional[1].lower() in _VOWELS) != (text[-1] in _VOWELS)
        suffix = (optional[1] if needed else "") + suffix[3:]
    stem = changed if suffix[0] in "AI" or suffix[0] in _VOWELS else text
    vowel, letters, previous = _last_vowel(stem), [], text[-1]
    for letter in suffix:
        if letter == "A":
            letter = "e" if vowel in _FRONT else "a"
        elif letter == "I":
            letter = _HIGH_AFTER[vowel]
        elif letter in "DC":
            letter = ("tç" if previous in _VOICELESS else "dc")["DC".index(letter)]
        vowel = letter if letter in _VOWELS else vowel
        previous = letter
        letters.append(letter)
    return "".join(letters)


def _last_vowel(text: str) -> str:
    return next(letter for letter in reversed(lower(text)) if letter in _VOWELS)
