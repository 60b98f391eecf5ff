from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from rank_stubs import script_model
from sglang.multimodal_gen.runtime.distributed.process_group import listen_on, serve_store
from sglang.multimodal_gen.runtime.managers.ranks.meeting import (
    Guests,
    common_arguments,
    find_front,
    meet_front,
)
from sglang.multimodal_gen.runtime.managers.ranks.messages import Hello, RankLeft, Stop
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, WorkerDied

MODEL = script_model(num_gpus=2, nnodes=2, dist_init_addr="127.0.0.1:29500")
ARGUMENTS = common_arguments(MODEL)


@pytest.fixture
def meeting():
    store, _ = serve_store()
    guests = Guests(MODEL, "127.0.0.1", store)
    yield guests, find_front(store)
    guests._listener.close()
    for channel in (*guests.ranks.values(), *guests.nodes.values()):
        channel.close()


def test_ranks_and_nodes_come_in_any_order(meeting):
    guests, front = meeting
    lines = [
        meet_front(front, Hello(1, 1, None)),
        meet_front(front, Hello(None, 1, ARGUMENTS)),
    ]
    guests.await_all([1], [1])
    guests.ranks[1].send("to the rank")
    guests.nodes[1].send("to the node")
    assert [line.receive() for line in lines] == ["to the rank", "to the node"]
    for line in lines:
        line.close()


def test_who_does_not_know_the_secret_is_not_heard(meeting):
    guests, front = meeting
    stranger = socket.create_connection((front.host, front.port))
    stranger.sendall(b"x" * 32)
    with socket.create_connection((front.host, front.port)) as silent:
        silent.shutdown(socket.SHUT_WR)
    line = meet_front(front, Hello(1, 1, None))
    guests.await_all([1], [])
    assert stranger.recv(1) == b""
    stranger.close()
    line.close()


def test_a_node_with_other_arguments_is_refused_and_told(meeting):
    guests, front = meeting
    line = meet_front(front, Hello(None, 1, ARGUMENTS | {"precision": "bf16"}))
    with pytest.raises(InvalidArgument, match=r"precision='fp32': is 'bf16' on node 1\. Start"):
        guests.await_all([1], [1])
    told = line.receive()
    assert isinstance(told, Stop)
    assert "is 'bf16' on node 1" in told.failure
    line.close()


def test_a_node_that_goes_again_is_not_waited_for(meeting):
    guests, front = meeting
    line = meet_front(front, Hello(None, 1, ARGUMENTS))
    threading.Timer(0.2, line.close).start()
    with pytest.raises(WorkerDied, match="node 1 ended, or cannot be reached"):
        guests.await_all([1], [1])


def test_a_rank_that_ends_before_it_comes_is_told_by_its_node(meeting):
    guests, front = meeting
    line = meet_front(front, Hello(None, 1, ARGUMENTS))
    line.send(RankLeft(1, "ended with exit code 1", "ImportError: no"))
    with pytest.raises(WorkerDied, match=r"rank 1 ended with exit code 1 on node 1\nImportError"):
        guests.await_all([1], [1])
    line.close()


def test_the_nodes_number_is_no_difference():
    other = script_model(num_gpus=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:29500")
    assert common_arguments(other) == ARGUMENTS


def test_a_front_that_is_gone_is_told(meeting):
    guests, front = meeting
    guests._listener.close()
    with pytest.raises(WorkerDied, match=r"rank 0 cannot be reached at 127\.0\.0\.1:"):
        meet_front(front, Hello(1, 1, None))


def test_the_front_listens_where_it_is_looked_for_and_nowhere_else(meeting):
    """CB-133"""
    guests, front = meeting
    assert guests._listener.getsockname() == ("127.0.0.1", front.port)


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("node0", "0.0.0.0"),  # itself, to itself alone
        ("gateway", "0.0.0.0"),
        ("nowhere", "0.0.0.0"),
    ],
)
def test_which_interface_is_listened_on(host, place, monkeypatch):
    known = {"node0": "127.0.1.1", "gateway": "203.0.113.7"}
    look_up = socket.getaddrinfo

    def found(name, *args, **kwargs):
        if name == "nowhere":
            raise socket.gaierror("no such name")
        return look_up(known.get(name, name), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with listen_on(host, 0) as listener:
        assert listener.getsockname()[0] == place


def test_the_store_listens_there_too():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store, _ = serve_store(("127.0.0.1", port))
    listening = Path("/proc/net/tcp").read_text().split()
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    del store
