"""A conversation with a model in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megatron.inference.generation import Request
from megatron.inference.sampling import Sampling
from megatron.tokenizers.chat import Message
from trident.serve.execution.answer_text import AnswerText
from trident.serve.execution.engine_loop import StepEngine
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel

_TOO_LONG = "context_length_exceeded"


@dataclass
class Conversation:
    """A chat with a model that keeps its history.

    Args:
        new_tokens: most tokens of an answer; None for as many as fit.
        system: the system prompt; empty for none.

    Attributes:
        messages: the history, without the system prompt.
        dropped: messages dropped from the history for the latest answer, because the model has too few positions.
        was_cut: True if the latest answer reached its limit on tokens.
    """

    served: ServedModel
    engine: StepEngine
    sampling: Sampling
    new_tokens: int | None = None
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    was_cut: bool = False
    _answers: int = 0

    def reset(self) -> None:
        """Clears the history; the system prompt stays."""
        self.messages = []

    def answer(self, question: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yields the answer in parts, and adds it with the question to the history, even if it was stopped.

        Args:
            is_stopped: called between tokens.

        Raises:
            Refusal: the question is too long, or the template cannot express it; it is not added to the history.
        """
        prompt, room = self._prompt(question)
        stop_ids = self.served.chat_stop_ids
        text = AnswerText(self.served.tokenizer, prompt, self.served.template.stop_texts, stop_ids)
        name = f"answer/{self._answers}"
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)
        self._answers += 1
        self.engine.add(Request(name, prompt, room, sampling, stop_ids=stop_ids))
        parts = []
        try:
            while text.finish is None and not is_stopped():
                for token in self.engine.step():
                    if token.request_id == name:
                        delta = text.push(token)
                        parts.append(delta.text)
                        yield delta.text
        finally:
            self.engine.cancel(name)
            self.was_cut = text.finish == "length"
            self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _prompt(self, question: str) -> tuple[tuple[int, ...], int]:
        """The tokens of the conversation with the question, and the most tokens of the answer."""
        messages = [*self.messages, {"role": "user", "content": question}]
        self.dropped = 0
        while True:
            try:
                prompt = self.served.prompt_of_messages([*self._instructions(), *messages])
                room = self.served.new_tokens(len(prompt), None, self.new_tokens)
            except Refusal as refusal:
                if refusal.code != _TOO_LONG or len(messages) < 3:
                    raise
                messages = messages[2:]  # the first question and its answer
                self.dropped += 2
            else:
                self.messages = list(messages)
                return prompt, room

    def _instructions(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []
