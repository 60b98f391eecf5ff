"""A private line between two processes of one run."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from sglang.multimodal_gen.runtime.managers.ranks.wire import OWN_PACKAGES, Reader, write


class _Frame(msgspec.Struct, array_like=True):
    """The head of a message: its body, and how many raw bytes each of its arrays has."""

    body: bytes
    sizes: list[int]


class Channel:
    """Whole messages, in order, over a stream socket that nobody else has.

    Any thread may send; one thread receives. What a message may be, and that reading one runs
    nothing of its sender's, is `wire`'s affair; ``packages`` are those whose names are understood
    here, besides this one's. Arrays and tensors travel raw, and arrive writable.
    """

    def __init__(self, line: socket.socket, packages: frozenset[str] = OWN_PACKAGES) -> None:
        line.setblocking(True)
        self._connection = Connection(line.detach())  # for its framing alone: it gets only bytes
        self._sending = threading.Lock()
        self._reader = Reader(packages)

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            DoesNotTravel: it holds something that cannot be sent; nothing was.
            OSError: the other end is gone, or this one is closed.
        """
        body, views = write(message)
        head = msgspec.msgpack.encode(_Frame(body, [len(view) for view in views]))
        with self._sending:
            self._connection.send_bytes(head)
            for view in views:
                self._connection.send_bytes(view)

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            DoesNotTravel: it cannot be read here; the next one may.
            EOFError, OSError: the other end is gone, or this one is closed.
        """
        head = self._connection.recv_bytes()
        try:
            frame = msgspec.msgpack.decode(head, type=_Frame)
        except msgspec.MsgspecError as error:
            raise OSError(f"the other end does not speak as a rank does: {error}") from error
        buffers = [bytearray(size) for size in frame.sizes]
        for buffer in buffers:
            if self._connection.recv_bytes_into(buffer) != len(buffer):
                raise OSError("the other end announced another size than it sent")
        return self._reader.read(frame.body, buffers)

    def has_news(self) -> bool:
        """Whether a message has come, or the end of the line."""
        return self._connection.poll()

    def close(self) -> None:
        """Let go of the line. The other end notices once every process that had this one did."""
        with self._sending:
            self._connection.close()


def channel_pair(packages: frozenset[str] = OWN_PACKAGES) -> tuple[Channel, socket.socket]:
    """This process's end of a new line, and the other end for a process to inherit."""
    ours, theirs = socket.socketpair()
    return Channel(ours, packages), theirs
