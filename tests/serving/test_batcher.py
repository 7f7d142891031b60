"""Batches of requests: who is decoded together, who waits, and what is stopped."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mtkit.serving.app import make_app
from mtkit.serving.batcher import Batcher, ServingLimits
from mtkit.serving.service import TranslationJob
from tests.serving.slow import Slow, ask


def test_requests_that_arrive_together_are_decoded_together() -> None:
    service = Slow()
    service.go.set()
    limits = ServingLimits(wait=300, pieces=8)
    with TestClient(make_app(service, limits)) as client, ThreadPoolExecutor(8) as pool:  # type: ignore[arg-type]
        found = list(pool.map(lambda k: ask(client, f"text {k}").json()["translatedText"], range(8)))
    assert found == [f"text {k}"[::-1] for k in range(8)]
    assert max(service.batches) > 1
    assert sum(service.batches) == 8


def test_a_request_that_takes_long_to_split_delays_no_other() -> None:
    started, go = threading.Event(), threading.Event()

    class Splitting(Slow):
        def jobs(self, *strings: Any, **how: Any) -> list[TranslationJob]:
            started.set()
            go.wait(10)
            return super().jobs(*strings, **how)

    service = Splitting()
    service.go.set()
    with TestClient(make_app(service)) as client, ThreadPoolExecutor(2) as pool:  # type: ignore[arg-type]
        long = pool.submit(ask, client, "ab")
        assert started.wait(5)
        assert pool.submit(client.get, "/health").result(5).status_code == 200
        assert not long.done()
        go.set()
        assert long.result().json() == {"translatedText": "ba"}


def test_one_bad_request_fails_alone() -> None:
    service = Slow()
    service.go.set()
    app = make_app(service, ServingLimits(wait=300, pieces=3))  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as client, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: ask(client, text), ["ab", "bad", "cd"]))
    assert [each.status_code for each in found] == [200, 500, 200]
    assert [each.json().get("translatedText") for each in found] == ["ba", None, "dc"]
    assert found[1].json() == {"error": "the translation failed; the server's log has the reason"}


def test_a_full_queue_and_a_late_answer_are_said() -> None:
    service = Slow()
    service.stops = False
    limits = ServingLimits(wait=0, queue=1, seconds=1)
    with TestClient(make_app(service, limits)) as client, ThreadPoolExecutor(2) as pool:  # type: ignore[arg-type]
        first = pool.submit(ask, client, "one")
        while not service.batches:
            time.sleep(0.01)
        second = pool.submit(ask, client, "two")
        while client.get("/health").json()["waiting"] < 1:
            time.sleep(0.01)
        third = ask(client, "three")
        assert (third.status_code, third.headers["Retry-After"]) == (503, "1")
        assert "1 requests wait" in third.json()["error"]
        assert [each.result().status_code for each in (first, second)] == [504, 504]
        service.go.set()
        assert ask(client, "four").json() == {"translatedText": "ruof"}
    assert service.batches == [1, 1]  # what was given up while it waited is not worked on


def test_a_request_that_is_given_up_is_stopped() -> None:
    service = Slow()
    limits = ServingLimits(wait=0, seconds=0.3)
    with TestClient(make_app(service, limits)) as client:  # type: ignore[arg-type]
        assert ask(client, "one").status_code == 504
        end = time.monotonic() + 5
        while not service.stopped and time.monotonic() < end:
            time.sleep(0.01)
        assert service.stopped == 1
        service.go.set()
        assert ask(client, "two").json() == {"translatedText": "owt"}


def test_other_requests_have_their_turn_after_each_part_of_a_large_one() -> None:
    service = Slow()
    limits = ServingLimits(wait=0, pieces=8)  # two strings of a request at a time
    with TestClient(make_app(service, limits)) as client, ThreadPoolExecutor(2) as pool:  # type: ignore[arg-type]
        large = pool.submit(ask, client, ["ab", "cd", "ef", "gh", "ij"])
        while not service.batches:
            time.sleep(0.01)
        small = pool.submit(ask, client, "yz")
        while client.get("/health").json()["waiting"] < 1:
            time.sleep(0.01)
        service.go.set()
        assert small.result().json() == {"translatedText": "zy"}
        assert large.result().json() == {"translatedText": ["ba", "dc", "fe", "hg", "ji"]}
    assert service.texts == [["ab", "cd"], ["yz", "ef", "gh"], ["ij"]]


@dataclass(frozen=True)
class Sized:
    """A job of nothing but its size and kind."""

    size: int
    kind: str = "a"


@pytest.mark.parametrize(
    ("waiting", "batches"),
    [
        ([Sized(2)] * 5, [[2, 2, 2, 2], [2]]),
        ([Sized(2), Sized(1), Sized(2), Sized(2), Sized(2), Sized(1)], [[2, 1, 2, 2, 1], [2]]),
        ([Sized(1), Sized(3), Sized(1)], [[1, 1], [3]]),  # more than a quarter of a batch is decoded alone
        ([Sized(3), Sized(1), Sized(1)], [[3], [1, 1]]),
        ([Sized(9), Sized(1)], [[9], [1]]),
        ([Sized(1, "a"), Sized(1, "b"), Sized(1, "a")], [[1, 1], [1]]),
    ],
    ids=str,
)
def test_a_batch_holds_no_more_than_it_may(waiting: list[Sized], batches: list[list[int]]) -> None:
    found: list[list[int]] = []

    def work(jobs: Sequence[Sized], stopped: Callable[[], bool]) -> Sequence[Sized]:
        found.append([job.size for job in jobs])
        return jobs

    async def run() -> list[list[Sized]]:
        batcher = Batcher(work, ServingLimits(wait=0, pieces=8), lambda jobs: None)
        tasks = [asyncio.create_task(batcher.submit([job])) for job in waiting]
        await asyncio.sleep(0)
        batcher.stop()
        await batcher.run()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [[job] for job in waiting]
    assert found == batches
