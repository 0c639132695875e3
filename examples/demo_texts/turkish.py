"""Rule-based Turkish stories, descriptions and dialogs, and questions with answers.

A document depends only on the seed and its number. Descriptions state the facts of the questions (regions, number
plates, word forms, sums, upper case), so that a network trained on the corpus can be fine-tuned to answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo_texts import turkish_grammar as grammar
from examples.demo_texts import turkish_words as words
from examples.demo_texts.turkish_grammar import Word, capitalized
from megatron.files.failures import storage_error
from megatron.files.replacing import check_writable, write_atomically

_CASES = {
    "belirtme": grammar.ACCUSATIVE,
    "yönelme": grammar.DATIVE,
    "bulunma": grammar.LOCATIVE,
    "ayrılma": grammar.ABLATIVE,
    "tamlayan": grammar.GENITIVE,
}
_QUESTION_SEED = "questions"


@dataclass(frozen=True)
class TurkishDocument:
    """A text, its kind (story, description or talk) and its title."""

    kind: str
    title: str
    text: str


@dataclass(frozen=True)
class TurkishCorpus:
    """The size of a written corpus: documents, held-out documents, questions, and bytes of all files."""

    documents: int
    held_out: int
    questions: int
    size_bytes: int


def documents(seed: int) -> Iterator[TurkishDocument]:
    """An infinite sequence of distinct documents, which depends only on the seed."""
    seen: set[str] = set()
    number = 0
    while True:
        drawn = random.Random(f"{seed}/{number}")
        kind = drawn.choices(("story", "description", "talk"), (5, 2, 3))[0]
        title, text = {"story": _story, "description": _description, "talk": _talk}[kind](drawn)
        number += 1
        if text not in seen:
            seen.add(text)
            yield TurkishDocument(kind, title, text)


def questions() -> list[tuple[str, str]]:
    """Every question with its answer, mixed; always the same."""
    shuffled = [*_questions_on_cities(), *_questions_on_forms(), *_questions_on_sums()]
    random.Random(_QUESTION_SEED).shuffle(shuffled)
    return shuffled


def write_turkish_corpus(
    path: Path, count: int, seed: int, *, held_out: Path | None = None, pairs: Path | None = None
) -> TurkishCorpus:
    """Writes documents as jsonl lines {"src", "text", "type", "id", "title"}.

    Args:
        held_out: plain text of further documents, a tenth as many.
        pairs: the questions as jsonl lines {"prompt", "answer"}.

    Raises:
        StorageError: a file cannot be written; checked before the work where possible.
    """
    written = documents(seed)
    files = {path: "".join(_line(number, next(written)) for number in range(count))}
    others = [next(written).text for _ in range(-(-count // 10))]
    answered = questions()
    if held_out is not None:
        files[held_out] = "\n\n".join(others) + "\n"
    if pairs is not None:
        rows = ({"prompt": question, "answer": answer} for question, answer in answered)
        files[pairs] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for target in files:
        check_writable(target)
    size_bytes = sum(_write(target, text.encode()) for target, text in files.items())
    return TurkishCorpus(count, len(others) if held_out else 0, len(answered) if pairs else 0, size_bytes)


def _write(path: Path, content: bytes) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise storage_error(path, failure) from failure
    write_atomically(path, content)
    return len(content)


def _line(number: int, document: TurkishDocument) -> str:
    fields = {
        "src": f"turkish {document.kind}",
        "text": document.text,
        "type": "Tur",
        "id": str(number),
        "title": document.title,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _word(drawn: random.Random, entries: Sequence[str]) -> Word:
    return Word.of(drawn.choice(entries))


def _name(drawn: random.Random, entries: Sequence[str]) -> Word:
    return Word.name(drawn.choice(entries))


def _story(drawn: random.Random) -> tuple[str, str]:
    """Somebody loses or finds something somewhere, and an animal or a friend takes part."""
    hero, friend = (Word.name(name) for name in drawn.sample(words.PEOPLE, 2))
    city, place, other = _name(drawn, list(words.CITIES)), _word(drawn, words.PLACES), _word(drawn, words.PLACES)
    thing, animal = _word(drawn, words.THINGS), _word(drawn, words.ANIMALS)
    quality, trade = drawn.choice(words.QUALITIES), drawn.choice(words.TRADES)
    verb, rest = _word(drawn, words.VERBS_WITH_OBJECT), _word(drawn, words.VERBS_OF_REST)
    motion, lively = _word(drawn, words.VERBS_OF_MOTION), _word(drawn, words.VERBS_OF_ANIMALS)
    past, at, to = grammar.PAST, grammar.LOCATIVE, grammar.DATIVE
    name, of = hero.bare, grammar.GENITIVE
    title = f"{hero.with_suffixes(of)} {thing.with_suffixes(grammar.POSSESSED)}"
    openings = (
        f"Bir varmış, bir yokmuş. {city.with_suffixes(at)} {name} adında bir {trade} varmış.",
        f"{name}, {city.with_suffixes(grammar.ABLATIVE)} gelen genç bir {trade} idi.",
        f"Geçen yaz {city.with_suffixes(at)} {drawn.choice(words.WEATHER)}.",
        f"{name} o sabah erkenden {place.with_suffixes(to)} {grammar.conjugated(motion, past)}.",
    )
    middles = (
        f"{name} {place.with_suffixes(at)} {quality} bir {thing.bare} buldu.",
        f"O gün {drawn.choice(words.WEATHER)}, ama {name} yine de {place.with_suffixes(to)} gitti.",
        f"{quality} {thing.with_suffixes(grammar.ACCUSATIVE)} {grammar.conjugated(verb, past)} ve "
        f"{other.with_suffixes(to)} götürdü.",
        f"Yolda {quality} bir {animal.bare} gördü; {animal.bare} {other.with_suffixes(at)} "
        f"{grammar.progressive(lively)}du.",
        f"{friend.bare} “{capitalized(thing.with_suffixes(grammar.ACCUSATIVE))} "
        f"{grammar.conjugated(verb, past, 1)} {grammar.question_particle(grammar.conjugated(verb, past, 1))}?” "
        f"diye sordu.",
        f"{name} “{capitalized(grammar.conjugated(motion, grammar.FUTURE, 0))}, sonra {place.with_suffixes(at)} "
        f"{grammar.conjugated(rest, grammar.FUTURE, 3)},” dedi.",
        f"{animal.with_suffixes(grammar.PLURAL)} {other.with_suffixes(grammar.ABLATIVE)} kaçtı, {name} arkalarından "
        f"{grammar.conjugated(motion, past)}.",
        f"{friend.with_suffixes(of)} {animal.with_suffixes(grammar.POSSESSED)} hiç "
        f"{grammar.conjugated(lively, past, negative=True)}.",
        f"Akşam olunca {friend.bare} ile {name} {place.with_suffixes(at)} {grammar.conjugated(rest, past, 5)}.",
    )
    endings = (
        f"Sonunda {name} {thing.with_suffixes(grammar.ACCUSATIVE)} {friend.with_suffixes(to)} verdi.",
        f"O günden beri {animal.bare} {hero.with_suffixes(of)} en iyi dostudur.",
        f"{name} bir daha {other.with_suffixes(to)} {grammar.conjugated(motion, past, negative=True)}.",
        f"{drawn.choice(words.MORALS)}",
    )
    chosen = [drawn.choice(openings), *drawn.sample(middles, drawn.randint(3, 6)), *drawn.sample(endings, 2)]
    return title, " ".join(capitalized(sentence) for sentence in chosen)


def _description(drawn: random.Random) -> tuple[str, str]:
    """Statements about a city, a word and a sum, which answer the questions."""
    city, thing = _name(drawn, list(words.CITIES)), _word(drawn, [*words.THINGS, *words.PLACES, *words.ANIMALS])
    region, plate = words.CITIES[city.bare]
    first, second = drawn.randint(1, 9), drawn.randint(1, 9)
    case, suffix = drawn.choice(list(_CASES.items()))
    people = drawn.sample(words.PEOPLE, 2)
    sentences = [
        f"{city.bare} {region} Bölgesi'ndedir.",
        f"{city.with_suffixes(grammar.GENITIVE)} plaka kodu {plate}.",
        f"“{thing.bare}” sözcüğünün çoğulu “{thing.with_suffixes(grammar.PLURAL)}” olur.",
        f"“{thing.bare}” sözcüğü {case} durumunda “{thing.with_suffixes(suffix)}” olur.",
        f"{words.NUMBERS[first]} artı {words.NUMBERS[second]} {words.NUMBERS[first + second]} eder.",
        f"“{thing.bare}” büyük harflerle “{grammar.upper(thing.bare)}” diye yazılır.",
        f"{people[0]} {city.with_suffixes(grammar.LOCATIVE)} yaşar, {people[1]} ise oraya her yaz gider.",
    ]
    chosen = drawn.sample(sentences, drawn.randint(3, 6))
    return city.bare, " ".join(capitalized(sentence) for sentence in chosen)


def _talk(drawn: random.Random) -> tuple[str, str]:
    """A dialog of questions and answers, a line each."""
    first, second = drawn.sample(words.PEOPLE, 2)
    lines = []
    for question, answer in (_exchange(drawn) for _ in range(drawn.randint(2, 4))):
        lines += [f"{first}: {capitalized(question)}", f"{second}: {capitalized(answer)}"]
    return f"{first} ile {second}", "\n".join(lines)


def _exchange(drawn: random.Random) -> tuple[str, str]:
    """A question, and an answer that fits it."""
    verb, motion = _word(drawn, words.VERBS_WITH_OBJECT), _word(drawn, words.VERBS_OF_MOTION)
    it = _word(drawn, words.THINGS).with_suffixes(grammar.ACCUSATIVE)
    location = _word(drawn, words.PLACES)
    there, to = location.with_suffixes(grammar.LOCATIVE), location.with_suffixes(grammar.DATIVE)
    you_did, i_did = (grammar.conjugated(verb, grammar.PAST, person) for person in (1, 0))
    exchanges = (
        (f"{it} {you_did} {grammar.question_particle(you_did)}?", f"evet, {there} {i_did}."),
        (
            f"{it} {you_did} {grammar.question_particle(you_did)}?",
            f"hayır, {grammar.conjugated(verb, grammar.PAST, 0, negative=True)}.",
        ),
        (f"{it} nerede {you_did}?", f"{there} {i_did}."),
        (
            f"yarın {to} kim {grammar.conjugated(motion, grammar.FUTURE)}?",
            f"{to} {drawn.choice(words.PEOPLE)} {grammar.conjugated(motion, grammar.FUTURE)}.",
        ),
        (f"{there} ne yapıyorsun?", f"{it} {grammar.progressive(verb, 0)}."),
        (f"{it} kim {grammar.aorist(verb)}?", f"herkes {it} {grammar.aorist(verb)}."),
    )
    return drawn.choice(exchanges)


def _questions_on_cities() -> Iterator[tuple[str, str]]:
    for name, (region, plate) in words.CITIES.items():
        city = Word.name(name)
        yield f"{name} hangi bölgededir?", f"{name} {region} Bölgesi'ndedir."
        yield f"{city.with_suffixes(grammar.GENITIVE)} plaka kodu kaçtır?", f"{plate}."
        yield f"“{grammar.lower(name)}” büyük harflerle nasıl yazılır?", f"{grammar.upper(name)}."


def _questions_on_forms() -> Iterator[tuple[str, str]]:
    for entry in (*words.THINGS, *words.PLACES, *words.ANIMALS):
        word = Word.of(entry)
        yield f"“{word.bare}” sözcüğünün çoğulu nedir?", f"{capitalized(word.with_suffixes(grammar.PLURAL))}."
        for case, suffix in _CASES.items():
            form = capitalized(word.with_suffixes(suffix))
            yield f"“{word.bare}” sözcüğü {case} durumunda nasıl yazılır?", f"{form}."


def _questions_on_sums() -> Iterator[tuple[str, str]]:
    for first in range(1, 10):
        for second in range(1, 10):
            total = capitalized(words.NUMBERS[first + second])
            yield f"{capitalized(words.NUMBERS[first])} artı {words.NUMBERS[second]} kaç eder?", f"{total} eder."
