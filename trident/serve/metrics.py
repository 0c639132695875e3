"""The server's counters and timings, in Prometheus' text format.

Written by prometheus-client: it is small, has no dependencies, handles escaping and content negotiation, and adds the
memory and processor time of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from trident.serve.execution.engine_loop import Load

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """The counters and histograms of one server.

    Args:
        load: the engine's load, read with every request for the metrics.
        outstanding: returns the number of waiting and running sequences.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, load: Load, outstanding: Callable[[], int]) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
            from prometheus_client.exposition import choose_encoder
        except ImportError as failure:
            raise ConfigError(
                "serving needs the prometheus-client package (pip install trident-megatron[serve])."
            ) from failure
        self._registry: CollectorRegistry = CollectorRegistry()
        self._choose_encoder = choose_encoder
        ProcessCollector(registry=self._registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"megatron_{name}", text, registry=self._registry).set_function(value)

        gauge("sequences_running", "Sequences in the engine.", lambda: load.running)
        gauge("sequences_waiting", "Sequences waiting for a slot in the engine.", lambda: load.waiting)
        gauge("sequences_outstanding", "Sequences of unfinished requests.", outstanding)
        gauge("engine_steps", "Steps of the engine so far.", lambda: load.steps)
        gauge("engine_step_seconds", "Time spent in all steps so far.", lambda: load.step_seconds)
        labels = ("endpoint", "status")
        self.requests = Counter("megatron_requests", "Requests that were answered.", labels, registry=self._registry)
        self.disconnects = Counter(
            "megatron_disconnects", "Requests whose client disconnected before the answer.", registry=self._registry
        )
        self.prompt_tokens = Counter("megatron_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self.generated_tokens = Counter("megatron_generated_tokens", "Tokens of answers.", registry=self._registry)
        self.request_seconds = Histogram(
            "megatron_request_seconds", "From a request to the end of its answer.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self.first_token_seconds = Histogram(
            "megatron_time_to_first_token_seconds", "From a request to the first token of its answer.",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.token_seconds = Histogram(
            "megatron_time_per_token_seconds", "Between two tokens of an answer.", buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )  # fmt: skip

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their media type, in the format that an Accept header selects."""
        encode, media_type = self._choose_encoder(accept)
        return encode(self._registry), media_type
