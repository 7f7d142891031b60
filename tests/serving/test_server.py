"""The process: an address, a clean end, and the page in a browser."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from libretranslatepy import LibreTranslateAPI

from mtkit.errors import MtkitError
from mtkit.serving.server import listen
from tests.decoding.trained import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs")).run.folder


@contextmanager
def served(run: Path, *options: str, files: int = 1024) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of the run, which may open that many files, and its address."""
    command = [sys.executable, "-m", "mtkit", "serve", "--run", str(run), "--port", "0", "--engine", "mtkit", *options]
    command = ["bash", "-c", f'ulimit -n {files}; exec "$0" "$@"', *command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address, line + process.stdout.read()
        yield process, address[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_ends_in_order(run: Path, stop: signal.Signals) -> None:
    with served(run) as (process, address):
        body = json.dumps({"q": ["a dog", ""], "source": "auto", "target": "de"}).encode()
        request = urllib.request.Request(f"{address}translate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["translatedText"][1] == ""
        process.send_signal(stop)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"


def test_unfinished_headers_keep_no_client_of_libretranslate_out(run: Path) -> None:
    with served(run, "--timeout", "10", files=64) as (process, address), ExitStack() as unfinished:
        port = int(re.findall(r"\d+", address)[-1])
        for _ in range(100):
            header = unfinished.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            header.sendall(b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: b")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as left:
            left.sendall(b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        other.request("GET", "/health", headers={"Connection": "Upgrade, close", "Upgrade": "websocket"})
        assert json.load(other.getresponse())["status"] == "ok"
        client = LibreTranslateAPI(address)
        found = client.translate("The old dog.", "en", "de")
        assert client.detect("The old dog.") == [{"confidence": 100.0, "language": "en"}]
        assert client.languages() == [{"code": "en", "name": "English", "targets": ["de"]}]
        for fields in (["q=The old dog.", "source=en", "target=de"], ['{"q": "The old dog.", "target": "de"}']):
            data = [each for field in fields for each in ("-d", field)]
            command = ["curl", "-s", "-m", "30", f"{address}translate", *data]
            answer = subprocess.run(command, capture_output=True, check=True, timeout=60)
            assert json.loads(answer.stdout) == {"translatedText": found}
        request = urllib.request.Request(f"{address}health", headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"


def test_signals_after_the_stop_change_nothing(run: Path) -> None:
    with served(run) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        while process.poll() is None:  # while Python ends
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert process.returncode == 0
        assert process.stdout.read() == ""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped meanwhile"])
def test_a_body_that_does_not_arrive_is_given_up(run: Path, stopped: bool) -> None:
    with served(run, "--timeout", "1.5") as (process, address):
        port = int(re.findall(r"\d+", address)[-1])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(
                b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            if stopped:
                for _ in range(2):  # as launchers send it, to the group and once more
                    time.sleep(0.3)
                    process.send_signal(signal.SIGINT)
            answer = client.makefile("rb").read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive whole within 1.5 seconds" in answer
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"


def test_a_taken_port_is_said(run: Path) -> None:
    with served(run) as (_, address):
        port = re.findall(r"\d+", address)[-1]
        command = [sys.executable, "-m", "mtkit", "serve", "--run", str(run), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert done.stderr.startswith(f"mtkit: cannot serve at 127.0.0.1, port {port}: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["nowhere.invalid", "ü..x", "ü" * 70])
def test_no_such_host_is_said(host: str) -> None:
    with pytest.raises(MtkitError, match=f"cannot serve at {host}, port 0: [^;]"):
        listen(host, 0)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    with served(run) as (_, address):
        with urllib.request.urlopen(f"{address}health", timeout=30) as answer:
            most = json.load(answer)["hypotheses"]
        command = [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"),
            *("--virtual-time-budget=20000", "--dump-dom", address + "#" + quote("The old dog.")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    shown = done.stdout
    assert re.search(r'<p id="error"[^>]*hidden', shown), shown
    assert re.findall(r"<option>(\d+)</option>", shown) == [str(each) for each in (1, 2, 3, 5, 10) if each <= most]
    assert shown.count('<li><button type="button" dir="auto" aria-pressed=') == 3
    assert "mean of the last layer" in shown
    assert len(re.findall(r'<td title="[^"]+ → [^"]+: [01]\.\d+" style="--w: [\d.]+;?">', shown)) > 10
