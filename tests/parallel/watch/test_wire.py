"""Messages between watching threads: what arrives is read in full or not at all, and nothing in it is trusted."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.parallel.watch.wire import MESSAGE_BYTES, Connection, MessageFields


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Connection]]:
    """Two ends of a connection, the first one bare."""
    bare, other = socket.socketpair()
    connection = Connection(other)
    yield bare, connection
    bare.close()
    connection.close()


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def test_messages_arrive_in_order_however_they_are_cut() -> None:
    one, two = (Connection(end) for end in socket.socketpair())
    one.send({"kind": "beat", "step": 1})
    one.send({"kind": "report", "text": "ü" * 5000})
    messages = two.receive()
    assert [message.kind for message in messages] == ["beat", "report"]
    assert messages[0].whole("step") == 1
    assert messages[1].text("text") == "ü" * 5000
    one.close()
    assert two.receive() == [] and two.is_lost
    two.close()


def test_a_message_in_pieces_is_read_when_it_is_whole(ends: tuple[socket.socket, Connection]) -> None:
    bare, connection = ends
    content = framed(b'{"kind": "beat"}')
    for number in range(len(content) - 1):
        bare.send(content[number : number + 1])
        assert connection.receive() == []
    bare.send(content[-1:])
    assert [message.kind for message in connection.receive()] == ["beat"]
    assert not connection.is_lost


@pytest.mark.parametrize(
    "content",
    [
        (MESSAGE_BYTES + 1).to_bytes(4, "big"),
        framed(b"not JSON"),
        framed(b"[1]"),
        framed(b"[" * 60_000),
        framed(b"\xff\xfe"),
    ],
    ids=["too long", "no JSON", "no object", "deep", "no text"],
)
def test_what_is_no_message_ends_the_connection(ends: tuple[socket.socket, Connection], content: bytes) -> None:
    bare, connection = ends
    bare.sendall(framed(b'{"kind": "beat"}') + content)
    assert [message.kind for message in connection.receive()] == ["beat"]
    assert connection.is_lost


def test_random_bytes_are_never_an_error_of_ours() -> None:
    drawn = random.Random(5)
    for _ in range(300):
        bare, other = socket.socketpair()
        connection = Connection(other, limit_bytes=drawn.choice([16, 256, MESSAGE_BYTES]))
        bare.sendall(bytes(drawn.choice([0, 1, 34, 91, 123, 255]) for _ in range(drawn.randrange(200))))
        bare.close()
        connection.receive()
        assert connection.is_lost
        connection.close()


def test_a_peer_that_does_not_read_is_given_up() -> None:
    bare, other = socket.socketpair()
    connection = Connection(other)
    for _ in range(10_000):
        connection.send({"text": "x" * 60_000})
        if connection.is_lost:
            break
    assert connection.is_lost
    connection.close()
    bare.close()


@pytest.mark.parametrize(
    ("ask", "value", "says"),
    [
        (lambda fields: fields.whole("a", 5), 6, "integer up to 5"),
        (lambda fields: fields.whole("a"), True, "integer"),
        (lambda fields: fields.whole("a"), 1.5, "integer"),
        (lambda fields: fields.whole("a"), -1, "integer"),
        (lambda fields: fields.whole("a"), None, "integer"),
        (lambda fields: fields.seconds("a"), float("inf"), "not a time"),
        (lambda fields: fields.seconds("a"), float("nan"), "not a time"),
        (lambda fields: fields.seconds("a"), -0.5, "not a time"),
        (lambda fields: fields.seconds("a"), True, "not a time"),
        (lambda fields: fields.flag("a"), 1, "not a boolean"),
        (lambda fields: fields.text("a", 3), "four", "at most 3 characters"),
        (lambda fields: fields.text("a"), 4, "not a text"),
        (lambda fields: fields.wholes("a", 5, 2), [1, 2, 3], "list of at most 2"),
        (lambda fields: fields.wholes("a", 5, 2), "12", "list"),
        (lambda fields: fields.wholes("a", 5, 2), [9], "integer up to 5"),
    ],
)
def test_a_value_that_no_rank_sends_is_refused(ask: Any, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask(MessageFields({"a": value}))


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    assert MessageFields({"a": "red \x1b[31m\r\x00\n\tnext\u202e"}).text("a") == "red ?[31m??\n\tnext?"
