"""Conversations as text and as token ids, with a mask of the answers."""

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
_PROBE_ANSWER = "\U000f0000"  # private use: templates do not contain it
_PROBE = ({"role": USER, "content": "question"}, {"role": ASSISTANT, "content": _PROBE_ANSWER})
# A fixed date makes examples reproducible; this is the default in Llama's templates.
_DAY_OF_EXAMPLES = datetime.datetime(2024, 7, 26)


class ChatTemplate:
    """A chat template.

    An answer is the assistant's text with its end: it extends from the end of the generation prompt to the first
    special token after the content. If a template marks answers with `{% generation %}`, the marks count.

    Args:
        name: its name or path.
        source: the Jinja program.
        tokens: texts of special tokens by name (`eos_token`), from the tokenizer's files.
        needed_tokens: special tokens that the vocabulary must have.

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
            raise ConfigError(f"the chat template {name} is empty. Correct it, or use another with --chat-template.")
        self.name = name
        self._tokens = dict(tokens or {})
        self._needed_tokens = tuple(needed_tokens)
        self._program = BoundedTemplate(source, f"the chat template {name}")
        self._source = source
        self._prepared: tuple[Tokenizer, SpecialTokens, dict[str, str]] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that determines the text of a conversation."""
        return hashlib.sha256(json.dumps([self._source, sorted(self._tokens.items())]).encode()).hexdigest()

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The text after an answer that stops generation; empty if that is end-of-document."""
        try:
            text = self.render(_PROBE, add_generation_prompt=False)
        except MegatronError:
            return ()
        end = text.rpartition(_PROBE_ANSWER)[2].strip()
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
        """Returns the ids of a conversation up to the assistant's next answer, as in an example with that answer.

        Raises:
            ConfigError, DataError: as `render`, or the vocabulary lacks a special token of a built-in template.
        """
        special, tokens = self._prepare(tokenizer)
        (conversation,) = self._conversations([messages], special, tokens, datetime.datetime.now(), is_prompt=True)
        ids, _ = conversation.encoded(*conversation.whole())
        return ids

    def example_ids(self, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation, and a mask of its answers."""
        return next(self.examples([messages], tokenizer))

    def examples(
        self, conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Yields the ids of whole conversations, and a mask of their answers.

        All conversations are rendered in one batch, which is faster in a child process. End-of-document is added, as
        part of the last answer, if the template does not end it with a special token.

        Raises:
            ConfigError, DataError: as `prompt_ids`, or the answer in a text is ambiguous; raised when the iterator
                reaches the conversation concerned.
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
        """Returns the special tokens that end an answer: end-of-document and the template's own."""
        special, _ = self._prepare(tokenizer)
        matches = filter(None, map(special.pattern.search, self.stop_texts))
        return frozenset([tokenizer.eod_id, *(special.ids[match[0]] for match in matches)])

    def standalone(self, tokenizer: Tokenizer) -> str:
        """Returns a template that renders the text of examples without further variables: it sets the special tokens
        that it uses, and adds end-of-document after a last answer that ends without special token.

        Raises:
            ConfigError: the vocabulary lacks a special token of a built-in template.
        """
        special, tokens = self._prepare(tokenizer)
        named = {
            name: text for name, text in {"bos_token": "", "eos_token": "", **tokens}.items() if name in self._source
        }
        header = "".join(
            f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}\n" for name, text in named.items()
        )
        try:
            rendered = self._program.render(_variables(_PROBE, tokens, False))
        except MegatronError:
            return header + self._source
        if special.pattern.search(rendered.rpartition(_PROBE_ANSWER)[2]):
            return header + self._source
        end = json.dumps(special.names()["eos_token"], ensure_ascii=False)
        is_last = f"messages and messages[-1]['role'] == '{ASSISTANT}' and not add_generation_prompt"
        return f"{header}{self._source.removesuffix(chr(10))}{{% if {is_last} %}}{{{{ {end} }}}}{{% endif %}}"

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Checks that the vocabulary has the special tokens of a built-in template.

        Raises:
            ConfigError: a token is missing, so that any message could contain its text.
        """
        missing = [token for token in self._needed_tokens if token not in tokenizer.special_ids]
        if missing:
            raise ConfigError(
                f"--chat-template {self.name} requires the special tokens {' '.join(self._needed_tokens)}, but the "
                f"vocabulary of {tokenizer.name} has no {' '.join(missing)}: as ordinary text any message could "
                f"contain them. Use --chat-template {PLAIN}, which requires none, or a vocabulary that has them "
                "(tools/train_tokenizer.py --special-tokens)."
            )

    def outcomes(self, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        """Renders jobs, see `BoundedTemplate.outcomes`."""
        return self._program.outcomes(jobs)

    @property
    def marks_answers(self) -> bool:
        """True if the template marks answers itself."""
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
        """Yields conversations with the texts that they usually need; a bad one raises when it is reached."""
        prepared = []
        bad: MegatronError | None = None
        for messages in conversations:
            try:
                prepared.append(_Conversation(self, messages, special, tokens, now, is_prompt))
            except MegatronError as failure:
                bad = failure
                break
        jobs = [conversation.job for conversation in prepared]
        for conversation, outcomes in zip(prepared, self.outcomes(jobs), strict=True):
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
    """One conversation, rendered whole and in part.

    Attributes:
        job: the whole text, then the prompt of each answer.
        written: rendered parts.
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
            {key: value if key == "role" else guard.mark_tokens(value) for key, value in message.items()}
            for message in messages
        ]
        self._special = special
        self._tokens = tokens
        self._is_prompt = is_prompt
        self._answer_indices = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        marks = guard.generation_marks if template.marks_answers else ("", "")
        self._whole = RenderPart(len(messages), is_prompt, marks)
        starts = [] if template.marks_answers else [RenderPart(index, True) for index in self._answer_indices]
        self.job = RenderJob(_variables(self._messages, tokens, is_prompt), now, [self._whole, *starts])
        self.written: dict[RenderPart, Outcome] = {}

    def text(self, part: RenderPart) -> str:
        """Returns a rendered part.

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
        """Returns the text of all messages, and the ranges of its answers.

        Raises:
            ConfigError: the text before an answer depends on the text after it.
        """
        text = self.text(self._whole)
        if self._template.marks_answers:
            return self._without_marks(text)
        try:
            return text, self._answers(text)
        except ConfigError:
            if not self._is_prompt:
                raise
            return text, []  # good enough for a prompt: its earlier answers are then not encoded separately

    def _answers(self, text: str) -> list[tuple[int, int]]:
        """Returns the ranges of answers in the text of all messages, which may end with a generation prompt."""
        answers: list[tuple[int, int]] = []
        limit = len(text)
        for index in reversed(self._answer_indices):
            answers.append(self._answer(text, index, limit))
            limit = answers[-1][0]
        return answers[::-1]

    def _answer(self, text: str, index: int, limit: int) -> tuple[int, int]:
        """Returns the range of a message's answer, which ends before `limit`.

        It begins where generation would. If the text does not begin with the generation prompt, or the content does
        not follow verbatim, rendering with a replaced content locates the answer.

        Raises:
            ConfigError: the answer cannot be located.
        """
        start = self._start(text, index)
        if start is not None:
            content = self._messages[index]["content"].strip()
            first = start + len(text[start:limit]) - len(text[start:limit].lstrip())
            if text.startswith(content, first) and first + len(content) <= limit:
                ending = self._special.first_after(text, first + len(content), limit)
                if ending is not None:
                    return start, ending[1]
        changed = self._changed_range(text, index)
        if changed is not None and (start or 0) <= changed[1] <= limit:
            start = changed[0] if start is None else start
            ending = self._special.first_after(text, changed[1], limit)
            if ending is not None:
                return start, ending[1]
        prefix = self.text(RenderPart(index + 1))
        if start is not None and text.startswith(prefix) and start < len(prefix) <= limit:
            endings = [match.end() for match in self._special.pattern.finditer(text, start, len(prefix))]
            return start, endings[-1] if endings else len(prefix)
        raise self._ambiguous()

    def _start(self, text: str, index: int) -> int | None:
        """Returns the position where generation of a message would begin; None if its prompt is not a prefix."""
        try:
            before = self.text(RenderPart(index, True))
        except MegatronError:
            if index:
                raise
            before = ""  # few templates accept no messages
        return len(before) if text.startswith(before) else None

    def _changed_range(self, text: str, index: int) -> tuple[int, int] | None:
        """Returns the range of the text that changes with the content of a message."""
        other = self._guard.generation_marks[0]  # otherwise unused, since the template does not mark answers
        messages = [dict(message) for message in self._messages]
        messages[index]["content"] = other
        variables = _variables(messages, self._tokens, self._is_prompt)
        ((changed,),) = self._template.outcomes([self.job._replace(variables=variables, parts=[self._whole])])
        if not isinstance(changed, str):
            return None
        before, _, after = changed.partition(other)
        is_clear = other not in after and text.startswith(before) and text.endswith(after)
        last = len(text) - len(after)
        return (len(before), last) if is_clear and len(before) <= last else None

    def _without_marks(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns a text without the marks of answers, and the ranges of answers with their end tokens."""
        start, end = self._guard.generation_marks
        parts: list[str] = []
        answers = []
        length = 0
        for number, part in enumerate(marked.split(start)):
            answer, closed, rest = part.partition(end)
            if number and closed:
                answers.append((length, length + len(answer)))
            parts.append(answer + rest)
            length += len(parts[-1])
        text = "".join(parts)
        return text, [(first, self._special.end_at(text, last)) for first, last in answers]

    def encoded(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a rendered text and a mask of its answers; no token crosses the edge of an answer."""
        ids: list[int] = []
        is_answer: list[bool] = []
        edges = [edge for answer in answers for edge in answer]
        for first, last, token_id in self._special.split(text, edges):
            encoded = self._special.encode(text[first:last], self._guard.mark) if token_id is None else [token_id]
            ids += encoded
            is_answer += [bisect.bisect(edges, first) % 2 == 1] * len(encoded)
        return ids, is_answer

    def _ambiguous(self) -> ConfigError:
        return ConfigError(
            f"--chat-template {self._template.name}: the answer in its text is ambiguous, because the text before an "
            "answer depends on it. Put {% generation %} and {% endgeneration %} around answers in the template, or use "
            "another one."
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
        raise DataError("A conversation has no messages; it must have at least one.")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(f"Message {number} has the role {printable(role)}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"Message {number} ({role}) has the content {printable(content)}; it must be a string.")
