"""Command lines that users already have: they parse, or are refused for stated reasons."""

from pathlib import Path

import pytest

from docs.site.published_commands import LIST, Outcome, check, read_commands, subject, table_lines, totals

PAGE = Path(__file__).resolve().parents[3] / "docs" / "published_commands.md"
BEGIN, END = "<!-- the table -->", "<!-- end of the table -->"
SHOWN = "python docs/site/published_commands.py --markdown"


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [check(command) for command in read_commands(LIST)]


def test_the_page_says_what_becomes_of_every_command(outcomes: list[Outcome]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join(table_lines(outcomes))
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table, f"put the table between the marks: {SHOWN}"
    (accepted,) = {row[1] for row in totals(outcomes) if row[0] == "all"}
    assert accepted >= 50 and len(outcomes) >= 80
    names = [(outcome.command.repository, outcome.command.name) for outcome in outcomes]
    assert len(set(names)) == len(names)


def test_a_refusal_names_a_flag_or_a_key_and_a_way_out(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for sentence, name in ((text, subject(text)) for text in outcome.refusals):
            assert name in sentence and name != sentence, (outcome.command.name, sentence)
            assert sentence.endswith((".", "?")), sentence
