"""Drawn pieces over several interpreters: each has random state, hash seeds and caches of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.recipe.data import DataSettings
from mtkit.training.data_loader import DataLoader
from mtkit.training.world import World
from tests.training.conftest import tiny

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import json, sys
from itertools import islice
from pathlib import Path
import torch
import mtkit.training.data_loader as module
from mtkit.data.prepared import open_prepared
from mtkit.training.world import World
from tests.training.conftest import tiny

module.SAMPLED_TOGETHER = 1000  # several parts an epoch
folder, out, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
prepared = open_prepared(Path(folder))
strength = {"subword_dropout": 0.2} if prepared.settings.tokenizer.kind == "bpe" else {"subword_alpha": 0.3}
with World("cpu") as world:
    source = module.DataLoader(tiny(training={"batch_tokens": 200, **strength}), prepared, 1024, world)
    works = []
    for work in islice(source.updates(0, first), min(last, source.batches_per_epoch) - first):
        own = [
            [int(line), source[valid].tolist(), target[target_valid].tolist()]
            for batch in work.batches
            for line, source, valid, target, target_valid in zip(
                batch.lines, batch.source, batch.source_valid, batch.target_out, batch.target_valid
            )
        ]
        works.append({"rows": [rows.tolist() for rows in work.rows], "tokens": work.tokens, "own": own})
    Path(f"{out}.{world.rank}").write_text(json.dumps(works))
"""


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = {"vocabulary": 400, "kind": request.param}
    given = {"folder": folder, "builtin": {"train": 300, "valid": 8, "test": 8}, "tokenizer": tokenizer}
    prepare(DataSettings.model_validate(given))
    return open_prepared(folder)


def fed(
    prepared: Prepared, out: Path, first: int, last: int, *, hash_seed: int, launch: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The updates from `first` to `last` of the first epoch, as an interpreter of its own feeds them."""
    done = subprocess.run(
        [sys.executable, *launch, str(script_in(out.parent)), str(prepared.folder), str(out), str(first), str(last)],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    works: list[dict[str, Any]] = json.loads(Path(f"{out}.0").read_text())
    return works


def script_in(folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def test_another_interpreter_draws_the_same_and_goes_on_where_the_first_stopped(
    drawn: Prepared, tmp_path: Path
) -> None:
    whole = fed(drawn, tmp_path / "whole", 0, 10_000, hash_seed=1)
    half = len(whole) // 2
    rest = fed(drawn, tmp_path / "rest", half, 10_000, hash_seed=2)
    assert len(whole) > 10
    assert rest == whole[half:]
    trained = np.concatenate([rows for work in whole[:half] + rest for rows in work["rows"]])
    assert sorted(trained) == list(range(len(drawn.train)))


@pytest.mark.parametrize("drawn", ["bpe"], indirect=True)
def test_processes_of_torchrun_share_each_batch_of_one(drawn: Prepared, tmp_path: Path) -> None:
    alone = fed(drawn, tmp_path / "alone", 0, 12, hash_seed=1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    first = fed(drawn, tmp_path / "two", 0, 12, hash_seed=3, launch=torchrun)
    second: list[dict[str, Any]] = json.loads((tmp_path / "two.1").read_text())
    for one, ours, theirs in zip(alone, first, second, strict=True):
        assert ours["rows"] == theirs["rows"] == one["rows"]
        assert ours["tokens"] == theirs["tokens"] == one["tokens"]
        assert sorted(ours["own"] + theirs["own"]) == sorted(one["own"])


@pytest.mark.parametrize("drawn", ["bpe"], indirect=True)
def test_each_epoch_draws_other_pieces(drawn: Prepared) -> None:
    recipe = tiny(training={"batch_tokens": 2000, "subword_dropout": 0.2})
    loader = DataLoader(recipe, drawn, 1024, World("cpu"))

    def pieces(epoch: int) -> dict[int, list[int]]:
        works = islice(loader.updates(epoch, 0), loader.batches_per_epoch)
        batches = [batch for work in works for batch in work.batches]
        return {
            line: source[valid].tolist()
            for batch in batches
            for line, source, valid in zip(batch.lines.tolist(), batch.source, batch.source_valid, strict=True)
        }

    first, again, second = pieces(0), pieces(0), pieces(1)
    assert first == again
    assert sum(first[line] != second[line] for line in first.keys() & second.keys()) > len(first) / 4
