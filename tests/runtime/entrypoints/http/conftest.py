"""Real servers on free ports: uvicorn and real admission, and a runner that needs no model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from runtime.managers.stubs import StubRunner
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.entrypoints.http.app import create_app
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.listening import address_of, listen
from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
from sglang.multimodal_gen.runtime.entrypoints.http.server import Server
from sglang.multimodal_gen.runtime.managers.file_store import LocalFileStore
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

SMALL = {"num_inference_steps": 2, "max_sequence_length": 16, "size": "64x48"}


@dataclass
class SlowRunner(StubRunner):
    """Takes ``step_seconds`` of real time a step."""

    step_seconds: float = 0.0
    began: threading.Event = field(default_factory=threading.Event)

    def run(self, batch):
        def wait(batch, step):
            self.began.set()
            time.sleep(self.step_seconds)

        self.on_step = wait
        return super().run(batch)


@dataclass
class Live:
    """A server that runs in a thread."""

    url: str
    context: Context
    runner: Any
    http: httpx.Client
    server: Server

    @property
    def service(self) -> GenerationService:
        return self.context.lifecycle.service

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def generate(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/images/generations", json={"prompt": "a fox"} | SMALL | body)

    def refusal(self, response: httpx.Response, status: int = 400) -> dict[str, Any]:
        """The error object of a refused request, sound in form; the server lives on."""
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error"}
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in response.text
        for place in ("/tmp", "/home", "/work", "site-packages", ".py"):
            assert place not in error["message"], error
        assert self.http.get("/health").status_code == 200
        return error


def store_of(serving: ServingArgs) -> LocalFileStore | None:
    keep = serving.keep.file_store
    return None if keep == "off" else LocalFileStore(Path(keep) if keep else None)


@contextlib.contextmanager
def running(
    open_service: Callable[[Any], GenerationService],
    serving: ServingArgs,
    runner: Any,
    files: LocalFileStore | None = None,
) -> Iterator[Live]:
    listener = listen(serving.http)
    files = store_of(serving) if files is None else files
    lifecycle = Lifecycle(open_service)
    context = Context(lifecycle, serving, files)
    server = Server(create_app(context), lifecycle, serving.http)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    url = address_of(listener)
    lifecycle.start()
    thread.start()
    with httpx.Client(base_url=url, timeout=30) as http:
        while not server.started:
            time.sleep(0.005)
        try:
            yield Live(url, context, runner, http, server)
        finally:
            lifecycle.stop_taking()
            if lifecycle.opened:
                lifecycle.opened.scheduler.abandon()
            lifecycle.finish(2.0)
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
            listener.close()
            if files is not None:
                files.close()


@pytest.fixture(scope="session")
def description(folder) -> ModelDescription:
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32")
    return ModelDescription.find(args)


@pytest.fixture(scope="session")
def editor(description) -> ModelDescription:
    """The same model, said to take pictures as well."""
    config = description.config

    @dataclass
    class Editing(type(config)):
        supported_task_types = (ModelTaskType.T2I, ModelTaskType.TI2I, ModelTaskType.I2I)

    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    args = dataclasses.replace(description.server_args, pipeline_config=Editing(**values))
    return dataclasses.replace(description, server_args=args)


@pytest.fixture
def start(description) -> Iterator[Callable[..., Live]]:
    """Starts servers with flags: ``start(runner, model, max_queued_requests=1)``."""
    with contextlib.ExitStack() as stack:

        def run(runner: Any = None, model: Any = None, *, ready: bool = True, **flags: Any) -> Live:
            runner = SlowRunner() if runner is None else runner
            serving = ServingArgs.from_flat(**{"port": 0, "served_model_name": "tiny"} | flags)
            model = description if model is None else model
            files = store_of(serving)
            live = stack.enter_context(
                running(
                    lambda _: service_of(model, runner, serving, files=files),
                    serving,
                    runner,
                    files,
                )
            )
            while ready and live.context.lifecycle.phase == "loading":
                time.sleep(0.005)
            return live

        yield run


@pytest.fixture(scope="module")
def shared(description) -> Iterator[Live]:
    """One server for tests that leave it as it is."""
    runner = SlowRunner()
    serving = ServingArgs.from_flat(port=0, served_model_name="tiny")
    with running(lambda _: service_of(description, runner, serving), serving, runner) as live:
        while live.context.lifecycle.phase == "loading":
            time.sleep(0.005)
        yield live


def picture(size=(8, 6), color=(200, 30, 40), mode="RGB", format="PNG") -> bytes:
    """An image file."""
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, format)
    return buffer.getvalue()
