"""What a server takes at most, of a request and of all that wait."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingLimits:
    """The limits of a server."""

    wait: float = 5.0
    """Milliseconds for which the first request of a batch waits for others."""
    pieces: int = 4096
    """Source pieces of the requests that are decoded together."""
    queue: int = 256
    """Requests that wait; a further one is refused (503)."""
    strings: int = 256
    """Strings of a request."""
    characters: int = 20_000
    """Characters of all strings of a request."""
    seconds: float = 60.0
    """Seconds until a request is given up that is not whole (408), and after that one that has no answer (504)."""

    connections: int = 1000
    """Open connections, and at most half of the files that the process may open."""

    @property
    def share(self) -> int:
        """Source pieces of one request in a batch; a line that has more is split."""
        return max(1, min(1024, self.pieces // 4))

    @property
    def header_seconds(self) -> float:
        """Seconds in which the header of a request must arrive, from the connection or the previous answer on."""
        return min(10.0, self.seconds)

    @property
    def bytes(self) -> int:
        """Bytes of the body of a request: each character may be escaped as 12 bytes of JSON."""
        return 12 * self.characters + 16 * self.strings + 4096
