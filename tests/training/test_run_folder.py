"""A run records the runs that its training began with."""

import json
import shutil
from pathlib import Path

from mtkit.data.prepared import open_prepared
from mtkit.runs import Run
from mtkit.training.run_folder import ancestors
from tests.training.conftest import run, tiny


def test_a_run_records_the_runs_that_it_began_with(prepared_folder: Path, tmp_path: Path) -> None:
    prepared, short = open_prepared(prepared_folder), tiny(training={"max_updates": 1})
    run(short, prepared, tmp_path / "base")
    path = tmp_path / "base" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"imported_from": "Some/model"}), "utf-8")
    run(short, prepared, tmp_path / "one", init_from=Run(tmp_path / "base"))
    run(short, prepared, tmp_path / "two", init_from=Run(tmp_path / "one"))
    shutil.rmtree(tmp_path / "base")
    run(tiny(training={"max_updates": 2}), prepared, tmp_path / "two", init_from=Run(tmp_path / "one"))  # resumed
    one, base = ancestors(Run(tmp_path / "two"))
    assert (one["run"], one["imported_from"]) == ("one", None)
    assert (base["run"], base["imported_from"]) == ("base", "Some/model")
    assert any(line.endswith(" training pairs") for line in one["data"])
