"""64 clients at once: every answer is that of its own text, and faster than one request after the other."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from mtkit.decoding.translator import Translator
from tests.decoding.trained import make_run, sentences
from tests.serving.test_server import served

CLIENTS, EACH = 64, 4

pytestmark = pytest.mark.slow


async def answers(address: str, texts: list[list[str]]) -> list[list[str]]:
    """What each client gets for its texts, which it sends one after the other."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits, trust_env=False) as http:

        async def client(own: list[str]) -> list[str]:
            found = []
            for text in own:
                answer = await http.post("translate", json={"q": text, "source": "auto", "target": "de"})
                assert answer.status_code == 200, answer.text
                found.append(answer.json()["translatedText"])
            return found

        return await asyncio.gather(*map(client, texts))


def test_nothing_is_lost_or_swapped_and_batches_are_fast(tmp_path: Path) -> None:
    run = make_run(tmp_path).run
    flat = [f"{text} {number}" for number, text in enumerate(sentences(CLIENTS * EACH, seed=7))]
    texts = [flat[first : first + EACH] for first in range(0, len(flat), EACH)]
    wanted = [each[0].text for each in Translator([run]).translate(flat)]
    with served(run.folder) as (_, address):
        asyncio.run(answers(address, [flat[:4]]))  # connections and first use
        seconds, found = {}, {}
        for name, clients in (("together", texts), ("one by one", [flat])):
            started = time.perf_counter()
            found[name] = [text for own in asyncio.run(answers(address, clients)) for text in own]
            seconds[name] = time.perf_counter() - started
    assert found["together"] == found["one by one"] == wanted
    rates = {name: len(flat) / each for name, each in seconds.items()}
    print(*(f"{name}: {rate:.1f} requests/s" for name, rate in rates.items()), sep="\n")
    assert rates["together"] > 3 * rates["one by one"]
