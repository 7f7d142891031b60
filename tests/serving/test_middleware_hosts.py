"""Host names by which a server may be called."""

import socket

import pytest
from fastapi.testclient import TestClient

from mtkit.errors import MtkitError
from mtkit.serving.app import make_app
from mtkit.serving.middleware import Hosts
from tests.serving.slow import Slow


@pytest.mark.parametrize(
    ("listens", "header", "taken"),
    [
        (("127.0.0.1", "127.0.0.1"), "127.0.0.1:5000", True),
        (("127.0.0.1", "127.0.0.1"), "localhost", True),
        (("127.0.0.1", "127.0.0.1"), "LOCALHOST.:80", True),
        (("127.0.0.1", "127.0.0.1"), "[::1]:5000", True),
        (("127.0.0.1", "127.0.0.1"), "elsewhere.example", False),
        (("127.0.0.1", "127.0.0.1"), "127.0.0.1.elsewhere.example", False),
        (("127.0.0.1", "127.0.0.1"), "10.1.2.3", False),
        (("127.0.0.1", "127.0.0.1"), "", False),
        (("127.0.0.1", "127.0.0.1"), "[", False),
        (("127.0.0.1", "127.0.0.1", ["Mine.Example"]), "mine.example:443", True),
        (("127.0.0.1", "127.0.0.1", ["mine.example"]), "elsewhere.example", False),
        (("127.0.0.1", "127.0.0.1", ["mt.example:8443"]), "mt.example:443", True),
        (("127.0.0.1", "127.0.0.1", ["https://mt.example/"]), "mt.example:443", True),
        (("127.0.0.1", "127.0.0.1", ["München.example"]), "xn--mnchen-3ya.example", True),
        (("127.0.0.1", "127.0.0.1", ["2001:db8::1"]), "[2001:db8::1]:5000", True),
        (("127.0.0.1", "127.0.0.1", ["[2001:db8::1]:5000"]), "[2001:db8::1]", True),
        (("127.0.0.1", "127.0.0.1", ["*"]), "elsewhere.example", True),
        (("server.example", "10.1.2.3"), "server.example:5000", True),
        (("server.example", "10.1.2.3"), "10.1.2.3:5000", True),
        (("server.example", "10.1.2.3"), "localhost", False),
        (("0.0.0.0", "0.0.0.0"), "10.1.2.3:5000", True),
        (("::", "::"), "[2001:db8::1]:5000", True),
        (("0.0.0.0", "0.0.0.0"), socket.gethostname(), True),
        (("0.0.0.0", "0.0.0.0"), "elsewhere.example", False),
    ],
)
def test_a_server_is_called_by_its_own_names(listens: tuple[str, ...], header: str, taken: bool) -> None:
    hosts = Hosts(*listens)  # type: ignore[arg-type]
    assert (hosts.refusal({"host": header}) is None) == taken
    address = f"[{listens[1]}]" if ":" in listens[1] else listens[1]
    assert (hosts.refusal({"host": address, "origin": f"http://{header}"}) is None) == taken
    assert hosts.refusal({}) is None


@pytest.mark.parametrize("name", ["", "a b", "*.mt.example", "ü..x", "ü" * 70, "http://"])
def test_what_no_client_can_send_is_no_name(name: str) -> None:
    with pytest.raises(MtkitError, match="is no host name"):
        Hosts("127.0.0.1", "127.0.0.1", [name])


def test_pages_without_an_origin_may_be_allowed() -> None:
    headers = {"host": "127.0.0.1", "origin": "null"}
    assert Hosts("127.0.0.1", "127.0.0.1").refusal(headers)
    assert Hosts("127.0.0.1", "127.0.0.1", ["null"]).refusal(headers) is None


def test_a_request_of_another_site_is_refused() -> None:
    service = Slow()
    service.go.set()
    app = make_app(service, hosts=Hosts("127.0.0.1", "127.0.0.1"))  # type: ignore[arg-type]
    body = {"q": "ab", "target": "de"}
    with TestClient(app, base_url="http://127.0.0.1:5000") as client:
        assert client.post("/translate", data=body).json() == {"translatedText": "ba"}
        for headers in ({"Host": "elsewhere.example"}, {"Origin": "https://elsewhere.example"}, {"Origin": "null"}):
            answer = client.post("/translate", data=body, headers=headers)
            assert answer.status_code == 403
            assert "--allow-host" in answer.json()["error"]
    assert service.batches == [1]
