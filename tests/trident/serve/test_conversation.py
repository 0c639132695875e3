"""A conversation in this process: what the model is told, what is remembered, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megatron.inference.generation import Request
from megatron.inference.sampling import Sampling
from tests.trident.serve.fakes import FakeEngine, saying
from trident.serve.conversation import Conversation
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel


def conversation(served: ServedModel, answer: Callable[[Request], Sequence[int]], **changes: object) -> Conversation:
    """A conversation with an engine that gives this answer."""
    return Conversation(served, FakeEngine(answer), Sampling(seed=5), **changes)  # type: ignore[arg-type]


def prompts(talk: Conversation) -> list[str]:
    """The prompts that the engine received."""
    engine = talk.engine
    assert isinstance(engine, FakeEngine)
    return [talk.served.tokenizer.decode(request.prompt) for request in engine.requests]


def test_the_history_is_kept(served: ServedModel) -> None:
    talk = conversation(served, saying(served.tokenizer, "Yes."), system="Be brief.")
    assert "".join(talk.answer("One?")) == "".join(talk.answer("Two?")) == "Yes."
    assert prompts(talk)[0].startswith("Be brief.\nOne?") and not talk.was_cut
    assert prompts(talk)[1].index("One?") < prompts(talk)[1].index("Yes.") < prompts(talk)[1].index("Two?")
    talk.reset()
    list(talk.answer("Three?"))
    assert "One?" not in prompts(talk)[2] and prompts(talk)[2].startswith("Be brief.")
    engine = talk.engine
    assert isinstance(engine, FakeEngine) and [one.sampling.seed for one in engine.requests] == [5, 6, 7]


def test_a_stopped_answer_is_remembered_as_far_as_it_went(served: ServedModel) -> None:
    talk = conversation(served, saying(served.tokenizer, "and so on and on and on"))
    deltas: list[str] = []
    for delta in talk.answer("Go.", lambda: len(deltas) >= 3):
        deltas.append(delta)
    assert len(deltas) == 3 and talk.messages[-1] == {"role": "assistant", "content": "".join(deltas)}
    engine = talk.engine
    assert isinstance(engine, FakeEngine) and engine.cancelled == ["answer/0"]


def test_what_does_not_fit_is_left_out_from_the_beginning(served: ServedModel) -> None:
    talk = conversation(served, saying(served.tokenizer, "short"), new_tokens=10)
    dropped = []
    for number in range(8):
        list(talk.answer(f"question number {number}, a long one"))
        dropped.append(talk.dropped)
    assert dropped[0] == 0 and dropped[-1] == 2 and "number 0" not in prompts(talk)[-1]
    assert "number 7" in prompts(talk)[-1] and "number 6" in prompts(talk)[-1]
    with pytest.raises(Refusal, match="but this model has 128 positions"):
        list(talk.answer("word " * 200))
    assert talk.messages[-1]["content"] == "short"  # the question that was refused is not remembered


def test_an_answer_without_an_end_is_cut(served: ServedModel) -> None:
    talk = conversation(served, lambda request: [40] * request.max_new_tokens, new_tokens=4)
    assert len("".join(talk.answer("Go."))) == 4 and talk.was_cut
