"""Wrong inputs by the hundred, made from the server's own schema: none is a 500."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase

EXAMPLES = 60
"""For each route; there are more than a dozen."""


@pytest.fixture(scope="module")
def operations(shared):
    schema = schemathesis.openapi.from_url(f"{shared.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.slow
def test_no_input_that_the_schema_leads_to_is_a_500(shared, operations):
    assert len(operations) >= 15
    statuses: dict[int, int] = {}
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def send(case):
            response = case.call(base_url=shared.url)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            said = f"{case.method} {case.path} {response.status_code} {response.text[:300]}"
            assert response.status_code < 500, said
            assert "Traceback" not in response.text, said
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}, said
                assert "site-packages" not in response.text, said

        send()
    assert sum(statuses.values()) > 300, statuses
    assert statuses.get(400, 0) > 50, statuses
    assert shared.http.get("/health").status_code == 200
