"""What a request's log line says of the job that it led to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.visit import current_visit
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


class RequestFacts(Observer):
    """Writes a job's facts into the visit that asked for it, as they become known."""

    def job(self, record: JobRecord, parts: Sequence[Req], result: Future[Any]) -> None:
        """Note the job, and its times once it ends."""
        visit = current_visit()
        if visit is None:
            return
        facts = visit.facts
        facts |= {
            "job": record.id,
            "outputs": sum(part.batch_size for part in parts),
            "steps": parts[0].num_inference_steps,
        }

        def ended(result: Future[Any]) -> None:
            if result.exception() is None:
                finished = result.result()
                facts["queue_seconds"] = round(finished.queue_seconds, 4)
                facts["run_seconds"] = round(finished.run_seconds, 4)
            else:
                facts["job_error"] = type(result.exception()).__name__

        result.add_done_callback(ended)
