"""What the HTTP path adds to a request, over a call of the Python API.

One process, one loaded model (the bundled one), turns taken request by request: the worker as
`DiffGenerator` calls it, and the same settings through a socket, the queue and back as JSON. The
HTTP side also encodes the picture (PNG, base64), which is shown apart. On a busy machine every
hand-over between threads waits for a core: the CPU time that HTTP adds tells more there.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator

import httpx

from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.http.app import create_app
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.listening import address_of, listen
from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
from sglang.multimodal_gen.runtime.entrypoints.http.server import Server
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.storage.opening import open_storage
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.image_file import encode_image

LIMIT_MS = 10.0


@contextlib.contextmanager
def served(generator: DiffGenerator) -> Iterator[str]:
    """The generator's worker behind a real server."""
    worker = generator._open()
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())  # on a disk, as servers have it
        serving = ServingArgs.from_flat(port=0, state_dir=state)
        listener = stack.enter_context(contextlib.closing(listen(serving.http)))
        storage = stack.enter_context(open_storage(serving))
        lifecycle = Lifecycle(lambda _: service_of(worker.model, worker, serving, storage))
        context = Context(lifecycle, serving, storage.files)
        server = Server(create_app(context), lifecycle, serving.http)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        lifecycle.start()
        thread.start()
        try:
            yield address_of(listener)
        finally:
            lifecycle.finish(5.0)
            server.should_exit = True
            thread.join()


def ready(client: httpx.Client) -> None:
    while client.get("/health").status_code != 200:
        time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--size", type=int, default=16, help="edge of the picture")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT_MS:g} ms")
    options = parser.parse_args()
    settings = {"prompt": "a red circle", "seed": 1, "num_inference_steps": options.steps,
                "width": options.size, "height": options.size}  # fmt: skip
    times: dict[str, list[float]] = {"python": [], "http": [], "png": [], "cpu": []}
    with (
        DiffGenerator.from_pretrained("demo", device="cpu") as generator,
        served(generator) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        ready(client)
        for round_number in range(options.requests + 5):
            cpu = time.process_time()
            start = time.perf_counter()
            array = generator.generate(settings)[0].array
            python = time.perf_counter()
            python_cpu = time.process_time() - cpu
            cpu = time.process_time()
            reply = client.post("/v1/images/generations", json=settings)
            http = time.perf_counter()
            http_cpu = time.process_time() - cpu
            encode_image(array)
            png = time.perf_counter()
            assert reply.status_code == 200, reply.text
            if round_number >= 5:
                times["python"].append(python - start)
                times["http"].append(http - python)
                times["png"].append(png - http)
                times["cpu"].append(http_cpu - python_cpu)
    median = {name: 1000 * statistics.median(values) for name, values in times.items()}
    added = 1000 * statistics.median(
        h - p for h, p in zip(times["http"], times["python"], strict=True)
    )
    print(
        f"{options.requests} requests of {options.steps} step(s), medians in ms: "
        f"python {median['python']:.2f}, http {median['http']:.2f}; "
        f"http adds {added:.2f} (of which PNG {median['png']:.2f}); "
        f"CPU time of server and client {median['cpu']:.2f}"
    )
    return int(options.check and added > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
