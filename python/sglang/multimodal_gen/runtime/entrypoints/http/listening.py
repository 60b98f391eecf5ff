"""The socket that clients connect to: opened before anything slow is imported or loaded."""

from __future__ import annotations

import errno
import socket

from sglang.multimodal_gen.runtime.server_args.serving import HttpArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError

_BACKLOG = 2048


def listen(http: HttpArgs) -> socket.socket:
    """The socket that clients connect to.

    Raises:
        InvalidArgument: the host is not this machine's, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        problem = f"cannot be resolved ({getattr(error, 'strerror', error)})."
        raise InvalidArgument("host", http.host, problem) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _no_listening(http, error) from error
    return listener


def _no_listening(http: HttpArgs, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        problem = f"is in use on {http.host}. Stop what listens there, or choose another --port."
        return InvalidArgument("port", http.port, problem)
    if error.errno == errno.EACCES:
        return InvalidArgument("port", http.port, "needs rights that this user lacks; above 1023?")
    return InvalidArgument("host", http.host, f"cannot be listened on ({error.strerror}).")


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
