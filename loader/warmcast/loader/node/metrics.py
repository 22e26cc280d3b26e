"""What an agent counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """Counters and gauges of one agent, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.chunks = Counter(
            "warmcast_chunks", "Chunks that were wanted, by the tier that had them", ["tier"],
            registry=self.registry,
        )  # fmt: skip
        self.nbytes = Counter(
            "warmcast_chunk_bytes", "Bytes of these", ["tier"], registry=self.registry
        )
        self.errors = Counter(
            "warmcast_errors", "Fetches that failed, by error", ["kind"], registry=self.registry
        )
        self.origin = self._counter("warmcast_origin_bytes", "Bytes read from the origin")
        self.received = self._counter("warmcast_received_bytes", "Bytes received from nodes")
        self.sent = self._counter("warmcast_sent_bytes", "Bytes sent to nodes")
        self.refused = self._counter("warmcast_refused", "Requests without the right to a chunk")
        self.busy = self._counter("warmcast_busy", "Requests put off because there were too many")
        self.saved = self._counter(
            "warmcast_origin_bytes_saved", "Bytes that workers got not from the origin"
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge, asked when somebody looks."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)
