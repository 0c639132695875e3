"""Every message of the source code has a paragraph in docs/troubleshooting.md, and is found there by its text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import pytest

from docs.site.messages import VALUE, Message, SourceMessages, read_messages
from docs.site.topics import Topic, assign, find_message, page_with_messages, read_topics

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source() -> SourceMessages:
    """The messages of this project."""
    return read_messages(ROOT)


@pytest.fixture(scope="module")
def topics() -> Sequence[Topic]:
    """The paragraphs of the page."""
    return read_topics(PAGE)


def test_every_message_has_a_paragraph(source: SourceMessages, topics: Sequence[Topic]) -> None:
    found, homeless = assign(source.messages, topics)
    assert not homeless, f"name their files in a comment of docs/troubleshooting.md: {[str(one) for one in homeless]}"
    assert not [title for title, messages in found.items() if not messages], "paragraphs about nothing"
    kinds = {message.error for messages in found.values() for message in messages}
    assert kinds <= {*source.exit_codes} and len(kinds) > 8


def test_every_paragraph_quotes_a_message_of_its_own(source: SourceMessages, topics: Sequence[Topic]) -> None:
    found, _ = assign(source.messages, topics)
    for topic in topics:
        assert topic.quotations, topic.title
        for quotation in topic.quotations:
            assert any(message.matches(quotation) for message in found[topic.title]), (topic.title, quotation)


def test_a_sentence_that_was_printed_leads_to_its_paragraph(source: SourceMessages, topics: Sequence[Topic]) -> None:
    found, _ = assign(source.messages, topics)
    title_of = {message: title for title, messages in found.items() for message in messages}
    for message in source.messages[::5]:
        printed = "error: " + message.template.replace(VALUE, "a/7")
        known = find_message(printed, source.messages)
        assert known is not None and len(known.template) >= len(message.template)
        assert known.template != message.template or title_of[known] in {
            title_of[one] for one in source.messages if one.template == message.template
        }


def test_the_page_of_the_site_has_every_message(source: SourceMessages, topics: Sequence[Topic]) -> None:
    found, _ = assign(source.messages, topics)
    page = page_with_messages(PAGE, found, source.exit_codes)
    assert "<!-- messages" not in page and page.count("<details") == len(topics)
    for message in source.messages:
        shown = html.escape(" ".join(message.template.split()))[:100].rpartition("&")[0]
        assert shown in page
    for topic in topics:
        _, _, after = page.partition(f"### {topic.title}\n")
        assert topic.quotations[0] in after.partition("### ")[0]


def test_claims_by_words_types_and_paths() -> None:
    text = """# Page

## Disk
<!-- messages: StorageError megatron/ -->

> a

## Data
<!-- messages: megatron/data/ -->
<!-- messages: "no more data" -->

## About nothing
"""
    disk, data = read_topics(text)
    assert (disk.title, disk.quotations, data.title) == ("Disk", ["a"], "Data")
    messages = [
        Message("megatron/data/x.py", 1, "StorageError", "cannot read"),
        Message("megatron/data/x.py", 2, "DataError", "is damaged"),
        Message("megatron/train/x.py", 3, "StorageError", "there is no more data"),
        Message("megatron/train/x.py", 4, "DataError", "is odd"),
    ]
    found, homeless = assign(messages, [disk, data])
    assert found == {"Disk": [messages[0]], "Data": [messages[1], messages[2]]} and homeless == [messages[3]]
