"""What the HTTP front counts, as Prometheus text (format 0.0.4). Runs in the driver. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from env.records import STATUSES
from env.serve_front import Front

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of this process since its start; what is on the disk is asked of the front."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.accepted = 0
        self.known = 0
        self.refused: Counter[str] = Counter({"queue_full": 0, "rate": 0})

    def note(self, path: str, status: int) -> None:
        """A request was answered. path: the route's template, never what the asker wrote (that is without bound)."""
        self.requests[path or "other", status] += 1

    def render(self, front: Front) -> str:
        return "\n".join(self._lines(front)) + "\n"

    def _lines(self, front: Front) -> Iterator[str]:
        def family(name: str, kind: str, what: str, values: dict[str, float]) -> Iterator[str]:
            yield f"# HELP env_serve_{name} {what}"
            yield f"# TYPE env_serve_{name} {kind}"
            for labels, value in values.items():
                yield f"env_serve_{name}{labels} {value:.17g}"

        requests = {
            f'{{path="{path}",status="{status}"}}': float(count)
            for (path, status), count in sorted(self.requests.items())
        }
        yield from family("requests_total", "counter", "HTTP requests answered.", requests)
        yield from family(
            "jobs_accepted_total", "counter", "Jobs accepted, repeated ones included.", {"": self.accepted}
        )
        yield from family(
            "jobs_known_total", "counter", "Accepted jobs whose question was there already.", {"": self.known}
        )
        refused = {f'{{reason="{reason}"}}': float(count) for reason, count in sorted(self.refused.items())}
        yield from family("jobs_refused_total", "counter", "Jobs refused for now.", refused)
        verdicts = {f'{{status="{status}"}}': float(front.verdicts.get(status, 0)) for status in STATUSES}
        yield from family("verdicts_total", "counter", "Verdicts reached since the start.", verdicts)
        yield from family(
            "judging_seconds_total", "counter", "Seconds from handing work to the pool to its verdict, summed.",
            {"": front.judging_s},
        )  # fmt: skip
        yield from family("queue_depth", "gauge", "Candidates without a verdict.", {"": front.store.queued})
        yield from family("queue_limit", "gauge", "Candidates that may wait.", {"": front.store.queue_limit})
        yield from family("in_flight", "gauge", "Candidates in the pool's hands.", {"": front.in_flight})
        yield from family("lanes", "gauge", "Candidates that the pool judges at once.", {"": len(front.pool)})
        yield from family("verdicts_per_second", "gauge", "Rate over the last verdicts.", {"": front.rate()})
        yield from family("healthy", "gauge", "1 where accepted jobs are being judged.", {"": not front.trouble()})
        yield from family("start_time_seconds", "gauge", "Unix time of the start.", {"": front.started})
