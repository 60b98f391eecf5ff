from __future__ import annotations

import dataclasses

from runtime.managers.stubs import flat_output, parts
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
from sglang.multimodal_gen.runtime.entrypoints.http.metrics import Metrics


def test_forwards_with_a_step_cache_are_counted_by_what_became_of_their_blocks():
    metrics = Metrics()
    (batch,) = parts()
    for used in (None, StepCacheUse(10, (4,)), StepCacheUse(10, (3,))):
        with metrics.batch(batch, ["job"]) as made:
            made(dataclasses.replace(flat_output(batch), step_cache=used))
    text = metrics.text().decode()
    assert 'sglang_step_cache_forwards_total{blocks="computed"} 13.0' in text
    assert 'sglang_step_cache_forwards_total{blocks="left_out"} 7.0' in text
