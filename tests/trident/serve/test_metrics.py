"""The metrics read back with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron.errors import ConfigError
from tests.trident.serve.fakes import FakeEngine, running
from trident.serve.execution.engine_loop import Load
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.served_model import ServedModel


def test_requests_tokens_and_times_are_counted(served: ServedModel) -> None:
    async def whole() -> str:
        async with running(served, FakeEngine()) as service:
            body = {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}
            await service.http.post("/v1/completions", json=body)
            await service.http.post("/v1/completions", json={"wrong": 1})
            await service.http.get("/generate?sentence=a")
            await service.settle()
            for _ in range(500):  # the gauges follow at the engine's next turn
                text = (await service.http.get("/metrics")).text
                if "megatron_sequences_running 0.0" in text and "megatron_sequences_outstanding 0.0" in text:
                    break
                await asyncio.sleep(0.01)
            return text

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(whole()))}
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["megatron_requests_total", "completions", "200"] == 1
    assert samples["megatron_requests_total", "completions", "400"] == 1
    assert samples["megatron_requests_total", "generate", "200"] == 1
    assert samples["megatron_prompt_tokens_total",] == 3 + 1
    assert samples["megatron_generated_tokens_total",] == 10 + 60
    assert samples["megatron_time_to_first_token_seconds_count",] == 3
    assert samples["megatron_time_per_token_seconds_count",] == 8 + 59
    assert samples["megatron_request_seconds_count",] == 2
    assert samples["megatron_sequences_running",] == samples["megatron_sequences_outstanding",] == 0
    assert samples["megatron_engine_steps",] >= 65 and samples["process_resident_memory_bytes",] > 1 << 20


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = ServerMetrics(Load(), lambda: 1), ServerMetrics(Load(), lambda: 2)
    one.generated_tokens.inc(5)
    assert b"megatron_generated_tokens_total 5.0" in one.exposition("")[0]
    assert b"megatron_generated_tokens_total 0.0" in other.exposition("")[0]
    assert "openmetrics" in one.exposition("application/openmetrics-text; version=1.0.0")[1]


def test_without_the_package_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"prometheus-client package \(pip install trident-megatron\[serve\]\)"):
        ServerMetrics(Load(), lambda: 0)
