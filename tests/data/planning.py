"""What the plan of a large corpus costs: python -m tests.data.planning 20000000

Writes a train.arrow of so many pairs of generated lengths, opens it and takes batches from it.
"""

import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from mtkit.data.prepared import _open_side
from mtkit.recipe.data import DataSettings
from mtkit.training.data_loader import DataLoader
from mtkit.training.world import World
from tests.training.conftest import tiny


def write(path: Path, rows: int) -> None:
    """Pairs of log-normal lengths, 22 pieces a side on average, in record batches as `mtkit prepare` writes them."""
    random = np.random.default_rng(3)
    schema = pa.schema({"source": pa.list_(pa.int32()), "target": pa.list_(pa.int32()), "line": pa.int64()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for first in range(0, rows, 10_000):
            some = min(10_000, rows - first)
            source = np.minimum(np.exp(random.normal(2.9, 0.6, some)).astype(np.int64) + 1, 400)
            target = np.clip((source * random.normal(1.05, 0.2, some)).astype(np.int64), 1, 500)
            lists = [
                pa.ListArray.from_arrays(
                    pa.array(np.cumsum([0, *each], dtype=np.int32)), pa.array(np.full(each.sum(), 5, np.int32))
                )
                for each in (source, target)
            ]
            lines = pa.array(np.arange(first + 1, first + some + 1))
            writer.write_batch(pa.record_batch([*lists, lines], schema=schema))


def own_memory() -> int:
    """Bytes of this process that are not of a mapped file (Linux)."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


class Prepared:
    """As much of prepared data as a feed reads."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.settings = folder, DataSettings()
        record = {"sides": {"train": {"rows": rows}}, "vocabulary": {"source": 100, "target": 100}}
        self.train = _open_side(folder, "train", record)


def batches(folder: Path, rows: int, count: int) -> tuple[float, int]:
    """Seconds from opening to the first batch, and the most bytes until `count` batches are made."""
    began = time.monotonic()
    loader = DataLoader(tiny(training={"batch_tokens": 4_096}), Prepared(folder, rows), 1024, World("cpu"))
    updates = loader.updates(0, 0)
    next(updates)
    seconds, most, done = time.monotonic() - began, [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in islice(updates, count):
        pass
    done.set()
    thread.join()
    updates.close()
    return seconds, most[0]


if __name__ == "__main__":
    rows = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as place:
        write(Path(place) / "train.arrow", 10_000)
        _, before = batches(Path(place), 10_000, 60)  # what any training takes
        write(Path(place) / "train.arrow", rows)
        seconds, most = batches(Path(place), rows, 30_000)
    print(f"first batch {seconds:.1f} s, {(most - before) / rows:.1f} bytes a row more than 10,000 pairs take")
