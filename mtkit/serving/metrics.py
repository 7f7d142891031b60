"""Numbers of a server in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
JOBS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Observed values, counted up to each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """The histogram's lines."""
        total, lines = 0, []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class ServingMetrics:
    """What a server counts."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        """Answers to translation requests by their status."""
        self.strings = self.pieces = 0
        self.seconds, self.batches = Histogram(SECONDS), Histogram(JOBS)

    def text(self, waiting: int) -> str:
        """All numbers; `waiting` is that of the queue now."""
        blocks = [
            (
                "requests_total",
                "counter",
                "Translation requests by the status of their answer.",
                [
                    f'mtkit_requests_total{{status="{status}"}} {count}'
                    for status, count in sorted(self.requests.items())
                ],
            ),
            ("strings_total", "counter", "Strings translated.", [f"mtkit_strings_total {self.strings}"]),
            (
                "source_pieces_total",
                "counter",
                "Source pieces translated.",
                [f"mtkit_source_pieces_total {self.pieces}"],
            ),
            ("waiting_requests", "gauge", "Requests in the queue.", [f"mtkit_waiting_requests {waiting}"]),
            (
                "request_seconds",
                "histogram",
                "Seconds of answered requests.",
                self.seconds.lines("mtkit_request_seconds"),
            ),
            ("batch_requests", "histogram", "Requests decoded together.", self.batches.lines("mtkit_batch_requests")),
        ]
        lines = [
            line
            for name, kind, what, rows in blocks
            for line in (f"# HELP mtkit_{name} {what}", f"# TYPE mtkit_{name} {kind}", *rows)
        ]
        return "\n".join(lines) + "\n"
