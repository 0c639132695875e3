"""The paragraphs of docs/troubleshooting.md, and which messages of the source code each of them is about.

A heading of the page is followed by comments that say so:

    <!-- messages: megatron/checkpoint/ "in use by" -->
    <!-- messages: DamagedError megatron/ -->

Words in quotes claim the messages that contain them. Beginnings of paths claim the messages of those files; where error
types follow them, only messages of these types. A message belongs to the paragraph that claims it by its words;
else to one that names its type; else to the one with the longest beginning of its path.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from docs.site.messages import Message

_HEADING = re.compile(r"^#{2,4} +(?P<title>.+?) *$", flags=re.MULTILINE)
_CLAIM = re.compile(r"^<!-- messages: (?P<claim>.+?) -->$", flags=re.MULTILINE)
_MOST_SHOWN = 600  # letters of a template


@dataclass(frozen=True)
class Claim:
    """What one comment claims: phrases, error types, and beginnings of paths."""

    phrases: tuple[str, ...]
    errors: tuple[str, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Claim:
        """Reads the words of a comment."""
        words = shlex.split(text, posix=False)
        phrases = tuple(word.strip('"') for word in words if word.startswith('"'))
        rest = [word for word in words if not word.startswith('"')]
        paths = tuple(word for word in rest if "/" in word)
        return cls(phrases, tuple(word for word in rest if "/" not in word), paths)

    def fit(self, message: Message) -> tuple[bool, bool, int] | None:
        """Whether it claims a message by its words, or by its type, and by how many letters of its path."""
        if any(phrase in message.template for phrase in self.phrases):
            return True, True, 0
        begun = [len(path) for path in self.paths if message.path.startswith(path)]
        if not begun or (self.errors and message.error not in self.errors):
            return None
        return False, bool(self.errors), max(begun)


@dataclass(frozen=True)
class Topic:
    """A paragraph: its heading, its text, and its claims."""

    title: str
    text: str
    claims: tuple[Claim, ...]

    def claim_on(self, message: Message) -> tuple[bool, bool, int] | None:
        """How well this paragraph fits a message: a greater value fits better, None does not fit."""
        return max((fit for claim in self.claims if (fit := claim.fit(message)) is not None), default=None)

    @property
    def quotations(self) -> list[str]:
        """The messages that the paragraph quotes, in lines that begin with `>`."""
        return [line[1:].strip() for line in self.text.splitlines() if line.startswith(">") and line[1:].strip()]


def read_topics(page: str) -> list[Topic]:
    """The paragraphs of the page that claim messages, in their order."""
    headings = list(_HEADING.finditer(page))
    ends = [*(heading.start() for heading in headings), len(page)][1:]
    topics = []
    for heading, end in zip(headings, ends, strict=False):
        text = page[heading.end() : end]
        claims = tuple(Claim.of(claim.group("claim")) for claim in _CLAIM.finditer(text))
        if claims:
            topics.append(Topic(heading.group("title"), text, claims))
    return topics


def assign(messages: Iterable[Message], topics: Sequence[Topic]) -> tuple[dict[str, list[Message]], list[Message]]:
    """The messages of each paragraph by its title, and those that no paragraph is about."""
    by_topic: dict[str, list[Message]] = {topic.title: [] for topic in topics}
    homeless = []
    for message in messages:
        claims = [(claim, topic.title) for topic in topics if (claim := topic.claim_on(message)) is not None]
        if claims:
            by_topic[max(claims, key=lambda entry: entry[0])[1]].append(message)
        else:
            homeless.append(message)
    return by_topic, homeless


def find_message(text: str, messages: Iterable[Message]) -> Message | None:
    """The message that a text shows: of those that match, the one with most words of its own."""
    return max((one for one in messages if one.matches(text)), key=lambda one: len(one.template), default=None)


def page_with_messages(page: str, by_topic: Mapping[str, Sequence[Message]], exit_codes: Mapping[str, str]) -> str:
    """The page with a folded list of all messages at the end of each paragraph, in place of its comment."""
    for topic in reversed(read_topics(page)):
        listed = _folded(by_topic[topic.title], exit_codes)
        page = page.replace(topic.text, _CLAIM.sub("", topic.text).rstrip() + f"\n\n{listed}\n", 1)
    return page


def _folded(messages: Sequence[Message], exit_codes: Mapping[str, str]) -> str:
    lines = sorted({(message.template, message.error) for message in messages}, key=lambda one: one[0].lower())
    errors = sorted({f"{error} ({exit_codes[error]})" for _, error in lines})
    entries = "".join(f"<li>{html.escape(_one_line(template))}</li>\n" for template, _ in lines)
    count = f"All {len(lines)} messages" if len(lines) > 1 else "The message"
    return (
        f'<details class="messages" markdown="0"><summary>{count} of this kind: {", ".join(errors)}</summary>\n'
        f"<ul>\n{entries}</ul>\n</details>"
    )


def _one_line(template: str) -> str:
    text = " ".join(template.split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
