from __future__ import annotations

import dataclasses
import io
import json

from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
from sglang.multimodal_gen.runtime.entrypoints.cli.report import json_line, print_times
from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import (
    GenerationResult,
    merge_results,
)

RESULT = GenerationResult(
    images=[], timings={}, load_seconds=0.0, peak_memory_mb=1.0, warnings=[], model="demo",
    parameters={"step_cache": "first-block"}, step_cache=StepCacheUse(56, (20, 30)),
)  # fmt: skip


def test_what_a_step_cache_left_out_is_told():
    both = merge_results([RESULT, dataclasses.replace(RESULT, step_cache=StepCacheUse(56, (7,)))])
    told = json.loads(json_line(both, []))["step_cache"]
    assert told == {"forwards": 56, "reused": [20, 30, 7]}
    assert "step_cache" not in json.loads(json_line(merge_results([_without()]), []))
    stream = io.StringIO()
    print_times(both, stream)
    assert "57 of 168" in stream.getvalue()


def _without() -> GenerationResult:
    return dataclasses.replace(RESULT, step_cache=None)
