"""A private line between two processes of one run."""

from __future__ import annotations

import pickle
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any


class Channel:
    """Whole messages, in order, over a stream socket that nobody else has.

    Any thread may send; one thread receives. Messages are pickled, so both ends must be of one run:
    pairs of sockets that were inherited, or connections that showed the run's secret. Buffers of
    numpy arrays travel raw, and arrive writable.
    """

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(True)
        self._connection = Connection(line.detach())
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or this one is closed.
        """
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        with self._sending:
            self._connection.send_bytes(pickle.dumps((body, [len(view) for view in views])))
            for view in views:
                self._connection.send_bytes(view)

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError, OSError: the other end is gone, or this one is closed.
        """
        body, sizes = pickle.loads(self._connection.recv_bytes())
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            self._connection.recv_bytes_into(buffer)
        return pickle.loads(body, buffers=buffers)

    def has_news(self) -> bool:
        """Whether a message has come, or the end of the line."""
        return self._connection.poll()

    def close(self) -> None:
        """Let go of the line. The other end notices once every process that had this one did."""
        with self._sending:
            self._connection.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """This process's end of a new line, and the other end for a process to inherit."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
