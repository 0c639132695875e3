"""Writes a corpus to try dsGPT2's pipeline on: documents and questions with answers in Korean, Turkish and English.

    python examples/dsgpt2/generate_texts.py --output-folder dsgpt2-demo/raw

`web.jsonl` and `news.jsonl` hold documents, some of them too short or duplicated, for cleaning to remove; `chat.jsonl`
holds a question and its answer per line. The same flags give the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags

_SENTENCES = (
    "{name}은(는) 오늘 {place}에서 {thing}을(를) 샀다.",
    "{place}의 날씨는 {day} 아주 맑았다.",
    "{name}은(는) {day} {place}(으)로 가서 {thing}을(를) 보았다.",
    "{name} bugün {place} pazarından {thing} aldı.",
    "{place} şehrinde hava {day} çok açıktı.",
    "{name}, {day} İstanbul yolunda {thing} gördü ve güldü.",
    "{name} bought {thing} in {place} today.",
    "The weather in {place} was very clear {day}.",
    "{name} went to {place} {day} and saw {thing}.",
)
_WORDS = (
    {
        "name": ("민수", "지은", "서연", "현우"),
        "place": ("서울", "부산", "대구", "인천"),
        "thing": ("책", "사과", "우산", "자전거"),
        "day": ("어제", "월요일에", "주말에"),
    },
    {
        "name": ("Işıl", "Çağrı", "Ömer", "Gülşen"),
        "place": ("Ankara", "İzmir", "Muğla", "Iğdır"),
        "thing": ("kitap", "elma", "şemsiye", "bisiklet"),
        "day": ("dün", "pazartesi günü", "hafta sonu"),
    },
    {
        "name": ("Anna", "Peter", "Maria", "James"),
        "place": ("London", "Leeds", "Dublin", "Oxford"),
        "thing": ("a book", "an apple", "an umbrella", "a bicycle"),
        "day": ("yesterday", "on Monday", "at the weekend"),
    },
)
_LANGUAGES = 3
_CAPITALS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "{capital} 어디?",
        "{country}!",
        {"서울": "한국", "도쿄": "일본", "파리": "프랑스", "로마": "이탈리아"},
    ),
    (
        "{capital} hangi ülkede?",
        "{capital}, {country} başkenti.",
        {"Ankara": "Türkiye", "Atina": "Yunanistan", "Sofya": "Bulgaristan", "Tiflis": "Gürcistan"},
    ),
    (
        "Where is {capital}?",
        "{capital} is in {country}.",
        {"London": "England", "Dublin": "Ireland", "Lima": "Peru", "Oslo": "Norway"},
    ),
)


@dataclass(frozen=True)
class TextFlags(ConfigSection):
    """Flags of this program."""

    output_folder: str = flag(help="folder for the three files; created if missing", path=PathUse.FOLDER)
    documents: int = flag(2000, "documents of each of the two collections", at_least=10)
    seed: int = flag(1234, "of the draw")


def documents(count: int, seed: int) -> Iterator[str]:
    """Documents of one to four sentences in one language; some are too short, and some come twice."""
    drawn = random.Random(seed)
    last = ""
    for number in range(count):
        language = drawn.randrange(_LANGUAGES)
        if number % 50 == 49:
            yield drawn.choice((".", "네", "ok"))
            continue
        if number % 20 == 19:
            yield last
            continue
        last = " ".join(_sentence(drawn, language) for _ in range(drawn.randint(1, 4))) + f" ({number})"
        yield last


def pairs() -> Iterator[dict[str, str]]:
    """Questions and answers about capitals, and greetings."""
    for question, answer, capitals in _CAPITALS:
        for capital, country in capitals.items():
            yield {
                "question": question.format(capital=capital),
                "answer": answer.format(capital=capital, country=country),
            }
    for question, answer in (("안녕?", "안녕하세요!"), ("Merhaba!", "Merhaba, nasılsın?"), ("Hello!", "Hello to you!")):
        yield {"question": question, "answer": answer}


def _sentence(drawn: random.Random, language: int) -> str:
    sentence = drawn.choice(_SENTENCES[3 * language : 3 * language + 3])
    return sentence.format(**{key: drawn.choice(words) for key, words in _WORDS[language].items()})


def _write(path: Path, records: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    log.line(f"{path}: {len(records)} lines")


def main() -> int:
    """Writes the files and returns the exit code."""
    flags = parse_flags(TextFlags, sys.argv[1:], prog="generate_texts.py", description=__doc__ or "")
    folder = Path(flags.output_folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("web", "news")):
        _write(folder / f"{name}.jsonl", [{"text": text} for text in documents(flags.documents, flags.seed + number)])
    _write(folder / "chat.jsonl", list(pairs()))
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
