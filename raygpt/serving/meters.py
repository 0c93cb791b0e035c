"""What `/metrics` tells Prometheus, by model: requests and how long they took, tokens, the load of a replica."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """Requests and tokens are counted as they come; `running`, `waiting`, `slots` and `step` are what a replica says
    when Prometheus asks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of_model: dict[str, Any] = {"labelnames": ["model"], "registry": self._registry}
        self.requests = Counter("raygpt_requests", "Answered", labelnames=["model", "status"], registry=self._registry)
        self.in_flight = Gauge("raygpt_requests_in_flight", "Being answered", **of_model)
        self.first_token = Histogram(
            "raygpt_time_to_first_token_seconds", "From request to first token", buckets=SECONDS, **of_model
        )
        self.duration = Histogram("raygpt_request_seconds", "From request to answer", buckets=SECONDS, **of_model)
        self.prompt_tokens = Counter("raygpt_prompt_tokens", "Read", **of_model)
        self.generated_tokens = Counter("raygpt_generated_tokens", "Drawn; its rate is tokens per second", **of_model)
        self.running = Gauge("raygpt_batch_size", "Texts in slots of a replica", **of_model)
        self.waiting = Gauge("raygpt_waiting_texts", "Texts that wait for a slot of a replica", **of_model)
        self.slots = Gauge("raygpt_slots", "Texts that a replica can generate at once", **of_model)
        self.step = Gauge("raygpt_checkpoint_step", "Step of the checkpoint that answers", **of_model)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class RequestMeter:
    """Times one request, and counts it and its tokens."""

    def __init__(self, meters: Meters, model: str):
        self._meters, self._model, self._began, self._has_token = meters, model, time.perf_counter(), False
        meters.in_flight.labels(model).inc()

    def token(self) -> None:
        """The first call is the first token."""
        if not self._has_token:
            self._meters.first_token.labels(self._model).observe(time.perf_counter() - self._began)
            self._has_token = True

    def end(self, prompt: int, drawn: int, status: int) -> None:
        meters, model = self._meters, self._model
        meters.in_flight.labels(model).dec()
        meters.requests.labels(model, str(status)).inc()
        meters.duration.labels(model).observe(time.perf_counter() - self._began)
        meters.prompt_tokens.labels(model).inc(prompt)
        meters.generated_tokens.labels(model).inc(drawn)
