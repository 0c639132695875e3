"""Conversations as text and as token ids, and which of the ids are answers."""

from __future__ import annotations

import bisect
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError, printable
from megatron.tokenizers.chat.named import PLAIN
from megatron.tokenizers.chat.sandbox import BoundedTemplate, Outcome, RenderJob, RenderPart
from megatron.tokenizers.chat.special_tokens import Guard, SpecialTokens
from megatron.tokenizers.tokenizer import Tokenizer

Message = Mapping[str, str]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)
_SAID = "\U000f0000"  # for private use: no template writes it by itself
_PROBE = ({"role": USER, "content": "question"}, {"role": ASSISTANT, "content": _SAID})
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
        if not source.strip():
            raise ConfigError(f"the chat template {name} is empty. Correct it, or name another with --chat-template.")
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
        end = text.rpartition(_SAID)[2].strip()
        return (end,) if end else ()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, special tokens written out.

        Raises:
            ConfigError: the template fails or does too much work.
            DataError: a message has no role or content that can be used, or the template refuses the conversation.
        """
        _check_messages(messages)
        return self._program.render(_variables(messages, self._tokens, add_generation_prompt))

    def prompt_ids(self, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
        """Ids of a conversation up to where the assistant's next answer begins, as in an example with that answer.

        Raises:
            ConfigError, DataError: as `render`, or the vocabulary lacks a special token of a template by name.
        """
        special, tokens = self._prepare(tokenizer)
        (conversation,) = self._conversations([messages], special, tokens, datetime.datetime.now(), is_prompt=True)
        ids, _ = conversation.encoded(*conversation.whole())
        return ids

    def example_ids(self, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and for each whether it belongs to an answer: `examples` of one."""
        return next(self.examples([messages], tokenizer))

    def examples(
        self, conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Ids of whole conversations, and for each id whether it belongs to an answer.

        A template of unknown origin is asked for all of them at once, which takes less time than one after the other.
        End-of-document is added, as part of the last answer, where the template ends it with no special token.

        Raises:
            ConfigError, DataError: as `prompt_ids`, or it is unclear which part of the text is the answer; raised when
                the iterator reaches the conversation concerned.
        """
        special, tokens = self._prepare(tokenizer)
        for conversation in self._conversations(conversations, special, tokens, _DAY_OF_EXAMPLES, is_prompt=False):
            text, answers = conversation.whole()
            ids, is_answer = conversation.encoded(text, answers)
            if answers and special.first_after(text, *answers[-1]) is None:
                ids.append(tokenizer.eod_id)
                is_answer.append(True)
            yield ids, is_answer

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that end an answer: end-of-document and what the template writes after one."""
        special, _ = self._prepare(tokenizer)
        matches = filter(None, map(special.pattern.search, self.stop_texts))
        return frozenset([tokenizer.eod_id, *(special.ids[match[0]] for match in matches)])

    def standalone(self, tokenizer: Tokenizer) -> str:
        """The program so that it writes by itself what examples hold: with the texts of the special tokens that it
        names, and end-of-document after a last answer that it ends with no special token.

        Raises:
            ConfigError: the vocabulary lacks a special token of a template by name.
        """
        special, tokens = self._prepare(tokenizer)
        named = {
            name: text for name, text in {"bos_token": "", "eos_token": "", **tokens}.items() if name in self._source
        }
        begin = "".join(
            f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}\n" for name, text in named.items()
        )
        try:
            written = self._program.render(_variables(_PROBE, tokens, False))
        except MegatronError:
            return begin + self._source
        if special.pattern.search(written.rpartition(_SAID)[2]):
            return begin + self._source
        end = json.dumps(special.names()["eos_token"], ensure_ascii=False)
        is_last = f"messages and messages[-1]['role'] == '{ASSISTANT}' and not add_generation_prompt"
        return f"{begin}{self._source.removesuffix(chr(10))}{{% if {is_last} %}}{{{{ {end} }}}}{{% endif %}}"

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

    def outcomes(self, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        """See `BoundedTemplate.outcomes`."""
        return self._program.outcomes(jobs)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what the assistant wrote."""
        return self._program.has_generation_blocks

    def _conversations(
        self,
        conversations: Sequence[Sequence[Message]],
        special: SpecialTokens,
        tokens: Mapping[str, str],
        now: datetime.datetime,
        *,
        is_prompt: bool,
    ) -> Iterator[_Conversation]:
        """Conversations with the texts that they need nearly always; one that is bad is an error when it comes."""
        made = []
        bad: MegatronError | None = None
        for messages in conversations:
            try:
                made.append(_Conversation(self, messages, special, tokens, now, is_prompt))
            except MegatronError as failure:
                bad = failure
                break
        for conversation, outcomes in zip(made, self.outcomes([one.job for one in made]), strict=True):
            conversation.written.update(zip(conversation.job.parts, outcomes, strict=True))
            yield conversation
        if bad is not None:
            raise bad

    def _prepare(self, tokenizer: Tokenizer) -> tuple[SpecialTokens, dict[str, str]]:
        prepared = self._prepared
        if prepared is None or prepared[0] is not tokenizer:
            self.check_tokenizer(tokenizer)
            special = SpecialTokens(tokenizer)
            prepared = self._prepared = tokenizer, special, {**special.names(), **self._tokens}
        return prepared[1], prepared[2]


class _Conversation:
    """One conversation as a template writes it, whole and in part.

    Attributes:
        job: the whole text first, then where each answer would begin.
        written: what the template wrote.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        special: SpecialTokens,
        tokens: Mapping[str, str],
        now: datetime.datetime,
        is_prompt: bool,
    ) -> None:
        _check_messages(messages)
        self._template = template
        self._guard = guard = Guard(special, [value for message in messages for value in message.values()])
        self._messages = [
            {key: value if key == "role" else guard.applied(value) for key, value in message.items()}
            for message in messages
        ]
        self._special = special
        self._tokens = tokens
        self._is_prompt = is_prompt
        self._places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        marks = guard.generation_marks if template.marks_answers else ("", "")
        self._whole = RenderPart(len(messages), is_prompt, marks)
        starts = [] if template.marks_answers else [RenderPart(place, True) for place in self._places]
        self.job = RenderJob(_variables(self._messages, tokens, is_prompt), now, [self._whole, *starts])
        self.written: dict[RenderPart, Outcome] = {}

    def text(self, part: RenderPart) -> str:
        """What is written.

        Raises:
            ConfigError, DataError: as `ChatTemplate.render`.
        """
        if part not in self.written:
            self.written[part] = self._template.outcomes([self.job._replace(parts=[part])])[0][0]
        outcome = self.written[part]
        if isinstance(outcome, MegatronError):
            raise outcome
        return outcome if isinstance(outcome, str) else self.text(self._whole)[:outcome]

    def whole(self) -> tuple[str, list[tuple[int, int]]]:
        """The text of all messages, and where the answers in it are.

        Raises:
            ConfigError: what the template writes before an answer depends on what comes after it.
        """
        text = self.text(self._whole)
        if self._template.marks_answers:
            return self._without_marks(text)
        try:
            return text, self._answers(text)
        except ConfigError:
            if not self._is_prompt:
                raise
            return text, []  # good enough for a prompt, whose earlier answers are then no pieces of their own

    def _answers(self, text: str) -> list[tuple[int, int]]:
        """Where the answers are in the text of all messages, which a prompt for generation may end."""
        answers: list[tuple[int, int]] = []
        limit = len(text)
        for place in reversed(self._places):
            answers.append(self._answer(text, place, limit))
            limit = answers[-1][0]
        return answers[::-1]

    def _answer(self, text: str, place: int, limit: int) -> tuple[int, int]:
        """Where the answer of a message is, which ends before a limit.

        It begins where generation would. If the text does not begin with the prompt for generation, or if the message
        does not follow it verbatim, the place is found by writing something else in the message's stead.

        Raises:
            ConfigError: the place cannot be found.
        """
        start = self._start(text, place)
        if start is not None:
            said = self._messages[place]["content"].strip()
            first = start + len(text[start:limit]) - len(text[start:limit].lstrip())
            if text.startswith(said, first) and first + len(said) <= limit:
                ending = self._special.first_after(text, first + len(said), limit)
                if ending is not None:
                    return start, ending[1]
        between = self._between(text, place)
        if between is not None and (start or 0) <= between[1] <= limit:
            start = between[0] if start is None else start
            ending = self._special.first_after(text, between[1], limit)
            if ending is not None:
                return start, ending[1]
        written = self.text(RenderPart(place + 1))
        if start is not None and text.startswith(written) and start < len(written) <= limit:
            endings = [match.end() for match in self._special.pattern.finditer(text, start, len(written))]
            return start, endings[-1] if endings else len(written)
        raise self._unclear()

    def _start(self, text: str, place: int) -> int | None:
        """Where generation would begin in place of a message; None if what is written before it is no beginning."""
        try:
            before = self.text(RenderPart(place, True))
        except MegatronError:
            if place:
                raise
            before = ""  # few templates write no message at all
        return len(before) if text.startswith(before) else None

    def _between(self, text: str, place: int) -> tuple[int, int] | None:
        """Where what is written of a message begins and ends: all that changes when it says something else."""
        other = self._guard.generation_marks[0]  # of templates that mark answers only
        messages = [dict(message) for message in self._messages]
        messages[place]["content"] = other
        variables = _variables(messages, self._tokens, self._is_prompt)
        ((written,),) = self._template.outcomes([self.job._replace(variables=variables, parts=[self._whole])])
        if not isinstance(written, str):
            return None
        before, _, after = written.partition(other)
        is_clear = other not in after and text.startswith(before) and text.endswith(after)
        last = len(text) - len(after)
        return (len(before), last) if is_clear and len(before) <= last else None

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

    def encoded(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Ids of a rendered text and which of them are in an answer; nothing is encoded across the edge of one."""
        ids: list[int] = []
        is_answer: list[bool] = []
        edges = [edge for answer in answers for edge in answer]
        for first, last, token_id in self._special.pieces(text, edges):
            piece_ids = self._special.encode(text[first:last], self._guard.mark) if token_id is None else [token_id]
            ids += piece_ids
            is_answer += [bisect.bisect(edges, first) % 2 == 1] * len(piece_ids)
        return ids, is_answer

    def _unclear(self) -> ConfigError:
        return ConfigError(
            f"--chat-template {self._template.name} does not tell which part of its text is the answer: what it writes "
            "before an answer is different once there is one. Put {% generation %} and {% endgeneration %} around "
            "answers in it, or use another template."
        )


def _variables(messages: Sequence[Message], tokens: Mapping[str, str], add_generation_prompt: bool) -> dict[str, Any]:
    return {
        "bos_token": "",
        "eos_token": "",
        **tokens,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
    }


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise DataError("A conversation holds no messages; it must hold at least one.")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(f"Message {number} has the role {printable(role)}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"Message {number} ({role}) has the content {printable(content)}; it must be a text.")
