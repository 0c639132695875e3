"""Messages of the monitoring threads: JSON objects over TCP, each after its length; nothing received is trusted.

A message that is too long, or not a JSON object, ends the connection. `MessageFields` validates one value at a time and
raises `ValueError` for values that no rank sends.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Mapping
from typing import Any

MESSAGE_BYTES = 65_536
TEXT_CHARACTERS = 16_384
_LENGTH_BYTES = 4
_UNSENT_BYTES = 256 * MESSAGE_BYTES  # one rank may relay the stacks of many
_READ_BYTES = 65_536


class Connection:
    """One end of a connection, which never blocks.

    Args:
        opened: the socket; the connection takes ownership.
        limit_bytes: the longest message that is accepted; it may be raised later.

    Attributes:
        blocked: a set shared by several connections, of those with unsent data.
    """

    def __init__(self, opened: socket.socket, limit_bytes: int = MESSAGE_BYTES) -> None:
        opened.setblocking(False)
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_bytes = limit_bytes
        self.is_lost = False
        self.blocked: set[Connection] = set()
        self._socket = opened
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends as much of a message as possible without waiting; `flush` sends the rest."""
        content = json.dumps(message).encode()
        if self.is_lost or len(content) > MESSAGE_BYTES or len(self._unsent) > _UNSENT_BYTES:
            self.is_lost = self.is_lost or len(self._unsent) > _UNSENT_BYTES
            return
        self._unsent += len(content).to_bytes(_LENGTH_BYTES, "big") + content
        self.flush()

    def flush(self) -> None:
        """Sends as much as possible without waiting."""
        while self._unsent and not self.is_lost:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                self.blocked.add(self)
                return
            except OSError:
                self.is_lost = True
                break
            del self._unsent[:sent]
        self.blocked.discard(self)

    def receive(self) -> list[MessageFields]:
        """Returns all messages that have arrived; afterwards `is_lost` is set if no more can arrive."""
        self._read()
        messages: list[MessageFields] = []
        while len(self._unread) >= _LENGTH_BYTES:
            size = int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
            if size > self.limit_bytes:
                self.is_lost = True
                break
            if len(self._unread) < _LENGTH_BYTES + size:
                break
            content = bytes(self._unread[_LENGTH_BYTES : _LENGTH_BYTES + size])
            del self._unread[: _LENGTH_BYTES + size]
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self.is_lost = True
                break
            messages.append(MessageFields(value))
        return messages

    def close(self) -> None:
        """Closes the socket."""
        self.is_lost = True
        self.blocked.discard(self)
        self._socket.close()

    def _read(self) -> None:
        """Reads at most one message at a time, so that a sender cannot fill this rank's memory."""
        while not self.is_lost and len(self._unread) < _LENGTH_BYTES + self.limit_bytes:
            try:
                content = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                content = b""
            if not content:
                self.is_lost = True
            self._unread += content


class MessageFields:
    """The values of a received message."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def kind(self) -> str:
        return self.text("kind", 16)

    def values(self) -> Mapping[str, Any]:
        """All values, unchecked, to relay the message."""
        return self._values

    def has(self, name: str) -> bool:
        return name in self._values

    def whole(self, name: str, limit: int = 2**53) -> int:
        """An integer from 0 to `limit`."""
        value = self._values.get(name)
        if type(value) is not int or not 0 <= value <= limit:
            raise ValueError(f"{name} is not an integer up to {limit}")
        return value

    def seconds(self, name: str) -> float:
        """A time that is finite and not negative."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is not a time")
        return float(value)

    def flag(self, name: str) -> bool:
        """A truth value."""
        value = self._values.get(name)
        if type(value) is not bool:
            raise ValueError(f"{name} is not a boolean")
        return value

    def text(self, name: str, limit: int = TEXT_CHARACTERS) -> str:
        """A text, without control characters."""
        value = self._values.get(name)
        if type(value) is not str or len(value) > limit:
            raise ValueError(f"{name} is not a text of at most {limit} characters")
        return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in value)

    def wholes(self, name: str, limit: int, most: int) -> list[int]:
        """A list of at most `most` integers from 0 to `limit`."""
        value = self._values.get(name)
        if type(value) is not list or len(value) > most:
            raise ValueError(f"{name} is not a list of at most {most} numbers")
        return [MessageFields({name: item}).whole(name, limit) for item in value]
