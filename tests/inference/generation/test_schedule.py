"""The schedule: who takes part in a step, with how many tokens."""

from __future__ import annotations

from megatron.inference.generation.request import Request
from megatron.inference.generation.schedule import EngineLimits, Text, TextSchedule
from megatron.inference.sampling import Chooser, Sampling
from megatron.model.interface.key_value_cache import TextCache

SAMPLING = Sampling()


def text(name: str, prompt: int, new: int = 4) -> Text:
    request = Request(name, (1,) * prompt, new, SAMPLING)
    return Text(request, list(request.prompt), prompt + new, TextCache(8), Chooser(SAMPLING, request.prompt))


def schedule(*texts: Text, sequences: int = 8, tokens: int = 1000, short_context: int | None = None) -> TextSchedule:
    planned = TextSchedule(
        EngineLimits(sequences, tokens, chunk_tokens=10, block_tokens=8, short_context=short_context)
    )
    planned.waiting.extend(texts)
    return planned


def run(planned: TextSchedule) -> list[tuple[str, int, int, bool]]:
    """One step: (request, first position, tokens, whether a token is chosen); chosen tokens are appended."""
    parts = planned.next_chunks()
    said = [(part.text.request.id, part.text_part.first, part.count, part.is_last) for part in parts]
    for part in parts:
        is_last = part.is_last
        part.text.cache.length += part.count
        if is_last:
            part.text.tokens.append(2)
    return said


def test_prompts_are_computed_in_chunks_while_texts_go_on() -> None:
    planned = schedule(text("a", 3), text("long", 24), text("b", 6))
    assert run(planned) == [("a", 0, 3, True), ("b", 0, 6, True)]  # the budget has no room for a chunk of ten more
    assert run(planned) == [("a", 3, 1, True), ("long", 0, 10, False), ("b", 6, 1, True)]
    assert run(planned) == [("a", 4, 1, True), ("long", 10, 10, False), ("b", 7, 1, True)]
    assert run(planned)[1] == ("long", 20, 4, True)
    assert run(planned)[1] == ("long", 24, 1, True)


def test_admission_keeps_the_order_and_the_room() -> None:
    planned = schedule(text("a", 3), text("big", 30), text("b", 1), sequences=2, tokens=40)
    planned.next_chunks()
    assert [one.request.id for one in planned.running] == ["a"]  # 8 + 40 tokens do not fit, and "b" may not overtake
    assert planned.reserved_tokens == 8 and "big" in planned and "c" not in planned
    planned.remove(planned.running[0])
    planned.next_chunks()
    assert [one.request.id for one in planned.running] == ["big"] and planned.reserved_tokens == 40
    waiting = planned.find("b")
    assert waiting is not None
    planned.remove(waiting)
    assert planned.find("b") is None and planned.reserved_tokens == 40


def test_a_text_is_computed_anew_where_its_rotations_change() -> None:
    planned = schedule(text("a", 4), short_context=5)
    assert run(planned) == [("a", 0, 4, True)]
    assert run(planned) == [("a", 4, 1, True)]
    assert run(planned) == [("a", 0, 6, True)]  # six tokens are more than the short context
    assert run(planned) == [("a", 6, 1, True)]


def test_a_prompt_beyond_the_short_context_is_computed_once() -> None:
    planned = schedule(text("a", 24), short_context=5)
    assert [run(planned)[0][1:3] for _ in range(4)] == [(0, 10), (10, 10), (20, 4), (24, 1)]
