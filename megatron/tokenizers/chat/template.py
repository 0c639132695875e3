"""Conversations as text and as token ids, and which of the ids are answers."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError, printable
from megatron.tokenizers.chat.named import PLAIN
from megatron.tokenizers.chat.sandbox import BoundedTemplate
from megatron.tokenizers.chat.special_tokens import Guard, SpecialTokens
from megatron.tokenizers.tokenizer import Tokenizer

Message = Mapping[str, str]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)
_PROBE = ({"role": USER, "content": "question"}, {"role": ASSISTANT, "content": "answer"})
# Examples are the same tomorrow: the day that Llama's own templates fall back to.
_DAY_OF_EXAMPLES = datetime.datetime(2024, 7, 26)


class ChatTemplate:
    """How conversations are written.

    An answer is what the assistant says and what ends it: the text from where a prompt for generation ends to the
    first special token after what was said. Where a template marks answers with `{% generation %}`, the marks count.

    Args:
        name: how it was chosen.
        source: the Jinja program.
        tokens: texts of special tokens by their names (`eos_token`), as the tokenizer's files give them.
        needed_tokens: special tokens without which it must not be used.

    Raises:
        ConfigError: the program cannot be used.
    """

    def __init__(
        self,
        name: str,
        source: str,
        tokens: Mapping[str, str] | None = None,
        needed_tokens: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._tokens = dict(tokens or {})
        self._needed_tokens = tuple(needed_tokens)
        self._program = BoundedTemplate(source, f"the chat template {name}")
        self._source = source
        self._prepared: tuple[Tokenizer, SpecialTokens, dict[str, str]] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what decides the text of a conversation."""
        return hashlib.sha256(json.dumps([self._source, sorted(self._tokens.items())]).encode()).hexdigest()

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """What the template writes after an answer, at which generation stops; empty if that is end-of-document."""
        try:
            text = self.render(_PROBE, add_generation_prompt=False)
        except MegatronError:
            return ()
        end = text.rpartition(_PROBE[1]["content"])[2].strip()
        return (end,) if end else ()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, special tokens written out.

        Raises:
            ConfigError: the template fails or does too much work.
            DataError: a message has no role or content that can be used, or the template refuses the conversation.
        """
        _check_messages(messages)
        return self.write(messages, self._tokens, add_generation_prompt=add_generation_prompt)

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
        """Ids of a conversation up to where the assistant's next answer begins, as in an example with that answer.

        Raises:
            ConfigError, DataError: as `render`, or the vocabulary lacks a special token of a template by name.
        """
        _check_messages(messages)
        special, tokens = self._prepare(tokenizer)
        guard = Guard(special, _contents(messages))
        conversation = _Conversation(self, messages, guard, special, tokens)
        text, answers = conversation.whole(add_generation_prompt=True)
        ids, _ = _encoded(text, answers, special, guard)
        return ids

    def example_ids(self, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and for each whether it belongs to an answer.

        End-of-document is added, as part of the last answer, where the template ends it with no special token.

        Raises:
            ConfigError, DataError: as `prompt_ids`, or it cannot be told which part of the text is the answer.
        """
        _check_messages(messages)
        special, tokens = self._prepare(tokenizer)
        guard = Guard(special, _contents(messages))
        conversation = _Conversation(self, messages, guard, special, tokens, now=_DAY_OF_EXAMPLES)
        text, answers = conversation.whole(add_generation_prompt=False)
        ids, is_answer = _encoded(text, answers, special, guard)
        if answers and special.first_after(text, *answers[-1]) is None:
            ids.append(tokenizer.eod_id)
            is_answer.append(True)
        return ids, is_answer

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that end an answer: end-of-document and what the template writes after one."""
        special, _ = self._prepare(tokenizer)
        return frozenset([tokenizer.eod_id, *(special.ids[text] for text in self.stop_texts if text in special.ids)])

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Checks that the vocabulary has the special tokens of a template by name.

        Raises:
            ConfigError: it lacks one, so that any message could contain its text.
        """
        missing = [token for token in self._needed_tokens if token not in tokenizer.special_ids]
        if missing:
            raise ConfigError(
                f"--chat-template {self.name} needs the special tokens {' '.join(self._needed_tokens)}, but the "
                f"vocabulary of {tokenizer.name} has no {' '.join(missing)}: as ordinary text any message could "
                f"contain them. Use --chat-template {PLAIN}, which needs none, or a vocabulary that has them "
                "(tools/train_tokenizer.py --special-tokens)."
            )

    def write(
        self,
        messages: Sequence[Message],
        tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool,
        now: datetime.datetime | None = None,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of messages that were checked.

        Args:
            tokens: texts of special tokens by their names.
            now: see `BoundedTemplate.render`.
        """
        variables: dict[str, Any] = {"bos_token": "", "eos_token": "", **tokens}
        variables |= {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        return self._program.render(variables, now, generation_marks)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what the assistant wrote."""
        return self._program.has_generation_blocks

    def _prepare(self, tokenizer: Tokenizer) -> tuple[SpecialTokens, dict[str, str]]:
        prepared = self._prepared
        if prepared is None or prepared[0] is not tokenizer:
            self.check_tokenizer(tokenizer)
            special = SpecialTokens(tokenizer)
            prepared = self._prepared = tokenizer, special, {**special.names(), **self._tokens}
        return prepared[1], prepared[2]


class _Conversation:
    """One conversation as a template writes it, whole and in part."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        guard: Guard,
        special: SpecialTokens,
        tokens: Mapping[str, str],
        now: datetime.datetime | None = None,
    ) -> None:
        self._template = template
        self._messages = [
            {key: value if key == "role" else guard.applied(value) for key, value in message.items()}
            for message in messages
        ]
        self._guard = guard
        self._special = special
        self._tokens = tokens
        self._now = now or datetime.datetime.now()  # one moment for all of its texts

    def text(self, count: int, *, add_generation_prompt: bool, marks: tuple[str, str] = ("", "")) -> str:
        """What is written for the first messages."""
        return self._template.write(
            self._messages[:count],
            self._tokens,
            add_generation_prompt=add_generation_prompt,
            now=self._now,
            generation_marks=marks,
        )

    def whole(self, *, add_generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text of all messages, and where the answers in it are.

        Raises:
            ConfigError: what the template writes before an answer depends on what comes after it.
        """
        count = len(self._messages)
        if not self._template.marks_answers:
            text = self.text(count, add_generation_prompt=add_generation_prompt)
            try:
                return text, self._answers(text)
            except ConfigError:
                if not add_generation_prompt:
                    raise
                return text, []  # good enough for a prompt, whose earlier answers are then no pieces of their own
        marks = self._guard.generation_marks
        return self._without_marks(self.text(count, add_generation_prompt=add_generation_prompt, marks=marks))

    def _answers(self, text: str) -> list[tuple[int, int]]:
        """Where the answers are in a text that begins with all messages."""
        places = [place for place, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        starts = [self._start(text, place) for place in places]
        return [
            (start, self._end(text, place, start, limit))
            for place, start, limit in zip(places, starts, [*starts, len(text)][1:], strict=True)
        ]

    def _start(self, text: str, place: int) -> int:
        """Where generation would begin in place of a message."""
        for add_generation_prompt in (True, False):
            try:
                before = self.text(place, add_generation_prompt=add_generation_prompt)
            except MegatronError:
                if place:
                    raise
                before = ""  # few templates write no message at all
            if text.startswith(before):
                return len(before)
        raise self._unclear()

    def _end(self, text: str, place: int, start: int, limit: int) -> int:
        """Where an answer has ended: behind the first special token after what was said."""
        said = self._messages[place]["content"].strip()
        found = text.find(said, start, limit)
        ending = self._special.first_after(text, start if found < 0 else found + len(said), limit)
        if ending is not None:
            return ending[1]
        written = self.text(place + 1, add_generation_prompt=False)
        if text.startswith(written) and start < len(written) <= limit:
            return len(written)
        raise self._unclear()

    def _without_marks(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """A text without the marks of its answers, and where they were; what ends an answer belongs to it."""
        begin, end = self._guard.generation_marks
        parts: list[str] = []
        answers = []
        length = 0
        for number, part in enumerate(marked.split(begin)):
            answer, closed, rest = part.partition(end)
            if number and closed:
                answers.append((length, length + len(answer)))
            parts.append(answer + rest)
            length += len(parts[-1])
        text = "".join(parts)
        return text, [(first, self._special.end_at(text, last)) for first, last in answers]

    def _unclear(self) -> ConfigError:
        return ConfigError(
            f"--chat-template {self._template.name} does not tell which part of its text is the answer: what it writes "
            "before an answer is different once there is one. Put {% generation %} and {% endgeneration %} around "
            "answers in it, or use another template."
        )


def _encoded(
    text: str, answers: Sequence[tuple[int, int]], special: SpecialTokens, guard: Guard
) -> tuple[list[int], list[bool]]:
    """Ids of a rendered text and which of them are in an answer; nothing is encoded across the edge of one."""
    ids: list[int] = []
    is_answer: list[bool] = []
    waiting = iter([*answers, (len(text), len(text))])
    first, last = next(waiting)
    for piece in special.pieces(text, [place for answer in answers for place in answer]):
        while piece.first >= last < len(text):
            first, last = next(waiting)
        if piece.token_id is not None:
            found = [piece.token_id]
        else:
            found = special.encode(text[piece.first : piece.last], guard.mark)
        ids += found
        is_answer += [first <= piece.first < last] * len(found)
    return ids, is_answer


def _contents(messages: Sequence[Message]) -> list[str]:
    return [value for message in messages for value in message.values()]


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise DataError("A conversation holds no messages; it must hold at least one.")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(f"Message {number} has the role {printable(role)}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"Message {number} ({role}) has the content {printable(content)}; it must be a text.")
