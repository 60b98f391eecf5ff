"""From start to stop: what a server is doing with its model, and whether it can be asked."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from sglang.multimodal_gen.runtime.managers.dispatcher import Dispatcher
from sglang.multimodal_gen.runtime.managers.job_keeper import JobKeeper
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.runner import Runner
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, DiffusionError, Unavailable
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener

Phase = Literal["loading", "ready", "stopping", "stopped", "failed"]
Opener = Callable[[ProgressListener], GenerationService]
_RETRY_WHILE_LOADING = 5.0


class Lifecycle:
    """Opens a service in a thread of its own, and closes it in order.

    ``open_service`` loads and warms up; it hears progress through a listener that stops it when the
    server is told to stop. ``on_ready``, with the model's name, or ``on_failure`` is called from
    that thread.
    """

    def __init__(
        self,
        open_service: Opener,
        *,
        on_ready: Callable[[str], object] = lambda name: None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self.phase: Phase = "loading"
        self.error: DiffusionError | None = None
        self.started_at = time.time()
        self.observer = Observer()
        """Hears of the service's jobs and batches, from the first one on."""
        self._open_service = open_service
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._service: GenerationService | None = None
        self._dispatcher: Dispatcher | None = None
        self._keeper: JobKeeper | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._load, name="loading", daemon=True)

    @property
    def service(self) -> GenerationService:
        """The service, for new work.

        Raises:
            Unavailable: it is not ready yet, or stops.
        """
        with self._lock:
            if self._service is not None and self.phase == "ready":
                return self._service
        if self.phase == "loading":
            raise Unavailable("the model is loading", retry_after=_RETRY_WHILE_LOADING)
        raise Unavailable("the server is stopping")

    @property
    def opened(self) -> GenerationService | None:
        """The service once it is there, also while it stops."""
        return self._service

    @property
    def problem(self) -> str | None:
        """Why a client should not come now; None if it may."""
        if self.phase != "ready":
            return self.phase
        assert self._service is not None
        assert self._dispatcher is not None
        if not self._dispatcher.alive:
            return "the thread that runs batches is gone"
        return self._service.scheduler.status.problem

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def stop_taking(self) -> None:
        """Refuse new work from now on, and hand back what has not begun."""
        with self._lock:
            if self.phase in ("loading", "ready"):
                self.phase = "stopping"
        if self._service is not None:
            self._service.scheduler.close("the server is stopping; ask again in a moment")
            self._service.scheduler.hand_back()

    def finish(self, grace_seconds: float) -> bool:
        """Wait for what runs, at most so long; whether all was done."""
        self.stop_taking()
        self._thread.join(timeout=max(1.0, grace_seconds))
        done = True if self._dispatcher is None else self._dispatcher.stop(grace_seconds)
        if self._service is not None:
            done = self._service.keeping.close(grace_seconds) and done
        if self._keeper is not None:
            self._keeper.close()
        self.phase = "failed" if self.error else "stopped"
        return done

    def _load(self) -> None:
        try:
            service = self._open_service(self._heard)
        except Cancelled:
            return
        except DiffusionError as error:
            self.error = error
            self.phase = "failed"
            self._on_failure()
            return
        except BaseException:
            self.phase = "failed"
            self._on_failure()
            raise
        with self._lock:
            if self.phase != "loading":
                return
            service.observe(self.observer)
            self._service = service
            self._dispatcher = Dispatcher(service.scheduler)
            self._dispatcher.start()
            self._keeper = JobKeeper(service)
        # What was interrupted comes before what is new; its inputs may come from afar, so the
        # lock is free: whoever asks meanwhile, and be it the event loop, is told that we load.
        self._keeper.start()
        with self._lock:
            if self.phase != "loading":
                return
            self.phase = "ready"
        self._on_ready(service.served_name)

    def _heard(self, event: ProgressEvent) -> None:
        if self.phase != "loading":
            raise Cancelled("the server was told to stop while it loaded")


def warm_up(model: ModelDescription, runner: Runner, *, steps: int) -> float:
    """Make a picture of the model's default size and task, and throw it away; returns its seconds.

    Raises:
        DiffusionError: it cannot be made, so no client's could.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sglang-warmup-") as folder:
        settings = model.info.pipeline_cls.warmup_settings(model.config.task_type, Path(folder))
        if "num_inference_steps" not in settings:
            settings["num_inference_steps"] = steps
        for batch in model.admit(model.sampling_params(settings)):
            runner.run(batch)
    return time.perf_counter() - start
