"""The Python stacks of this process, and a test for waiting on other ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from megatron.parallel.watch.flight_record import last_messages

# Modules and packages of calls that wait for other ranks.
_WAITING = ("torch.distributed", "deepspeed", "megatron.parallel.messages", "megatron.parallel.rank_tree")
# Modules of calls that wait for another thread of this process.
_HANDING = ("threading", "queue", "concurrent.futures", "torch.autograd.graph")
_MOST_FRAMES = 64
_MESSAGES = "last messages:"


def read_stacks(limit_characters: int) -> tuple[str, bool]:
    """Returns the stacks of all threads but the calling one, the main thread's first, with the last messages after
    them; and whether this rank waits for others.

    It waits if the innermost call of its main thread is communication, or a wait for another thread whose innermost
    call is. Source files are not read: they may be on the file system that hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = {number: frame for number, frame in sys._current_frames().items() if number != threading.get_ident()}
    order = sorted(frames, key=lambda number: (number != main, number))
    text = "\n".join(f"thread {names.get(number, number)}:\n" + "\n".join(_lines(frames[number])) for number in order)
    messages = last_messages()
    if messages:
        messages = f"\n{_MESSAGES}\n{messages[-limit_characters // 2 :]}"
        text = text[: limit_characters - len(messages)] + messages
    waits = main in frames and (
        _is_in(frames[main], _WAITING)
        or (
            _is_in(frames[main], _HANDING)
            and any(_is_in(frame, _WAITING) for number, frame in frames.items() if number != main)
        )
    )
    return text[:limit_characters], waits


def main_stack(text: str) -> str:
    """The main thread's stack in the result of `read_stacks`."""
    return text.partition(f"\n{_MESSAGES}")[0].partition("\nthread ")[0]


def _lines(innermost: FrameType) -> Iterator[str]:
    frame: FrameType | None = innermost
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f"  {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    yield "  ..."


def _is_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == module or name.startswith(module + ".") for module in modules)
