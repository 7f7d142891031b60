"""The host names by which clients may call a server.

A page of another site can make a browser send requests to a server on the same machine or network. Such a request names
the other site in its header Host (if the site's name leads to the server) or Origin.
"""

import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit


class Hosts:
    """The address that a server listens at, and other names of the server."""

    def __init__(self, host: str, bound: str, others: Iterable[str] = ()) -> None:
        """`bound` is the IP address of the name or address `host`; `*` among the others stands for every name.

        A server that listens at all addresses is called by any IP address or by the machine's name.
        """
        address = ip_address(bound.partition("%")[0])
        self._names = {each.lower().strip("[]").rstrip(".") for each in (host, bound, *others)}
        self._any_address = address.is_unspecified
        if address.is_unspecified or address.is_loopback:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if address.is_unspecified:
            self._names.add(socket.gethostname().lower())

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """The reason to refuse a request with these headers; None if it names this server, or no server."""
        for header, prefix in (("host", "//"), ("origin", "")):
            if header in headers and not self._is_own(prefix + headers[header]):
                named = headers[header][:80]
                return f"{header.title()} '{named}' is no name of this server; start it with --allow-host NAME"
        return None

    def _is_own(self, address: str) -> bool:
        if "*" in self._names:
            return True
        try:
            name = (urlsplit(address).hostname or "").rstrip(".")
        except ValueError:
            return False
        return bool(name) and (name in self._names or (self._any_address and _is_address(name)))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
