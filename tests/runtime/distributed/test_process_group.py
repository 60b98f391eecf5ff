from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.process_group import StoreAddress, serve_store


def test_a_store_for_one_machine_listens_on_loopback_alone_at_a_port_of_its_own():
    stores = [serve_store() for _ in range(3)]
    ports = {address.port for _, address in stores}
    assert len(ports) == 3
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    for port in ports:
        rows = [line for line in listening.splitlines() if f":{port:04X} 0000" in line]
        assert rows
        assert all(" 0100007F:" in row for row in rows)
    store, address = stores[0]
    guest = address.connect(0, 2)
    guest.set("a", "b")
    assert store.get("a") == b"b"


def test_a_port_that_is_taken_is_refused_at_once():
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve_store(("127.0.0.1", taken.getsockname()[1]))


def test_torchruns_store_is_the_one_of_the_environment(monkeypatch):
    store, address = serve_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(address.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    StoreAddress().connect(1, 2).set("a", "b")
    assert any(store.check([name]) for name in ("a", "/worker/attempt_0/a"))


def test_copies_of_the_model_are_neighbours():
    layout = ParallelLayout(dp=2, ulysses=2, tp=2)
    assert layout.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ParallelLayout(tp=3).replicas == ((0, 1, 2),)
