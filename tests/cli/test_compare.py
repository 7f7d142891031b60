"""`mtkit compare`, as typed."""

import csv
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.cli.compare import compare
from mtkit.errors import DataError, MtkitError
from mtkit.experiments import compare as comparing
from mtkit.experiments.folder import Folder
from tests.experiments.results import row

OPTIONS = {
    "searched",
    "attention", "study", "recipe", "data", "task", "output", "attention-option", "seeds", "search", "search-method",
    "search-trials", "search-share", "pruner", "match", "max-updates", "max-minutes", "max-tokens", "max-flops",
    "batch-tokens", "columns", "jobs", "ray", "join", "reproduce", "row", "device", "threads",
}  # fmt: skip
SCORES = {"full": 80.0, "longformer": 90.0, "em-routing": 70.0}
OUT = Path("mtkit-compare")


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared_folder: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.02)
    model = {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1}
    training = {"batch_tokens": 200, "max_updates": 2, "validate_segments": 2, "log_every": 1, "precision": "float32"}
    decoding = {"method": "greedy", "max_pieces": 5}
    recipe = {"data": {"folder": str(prepared_folder)}, "model": model, "training": training, "decoding": decoding}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))


def typed(*arguments: str) -> Result:
    common = ["--recipe", "r.yaml", "--threads", "1"] if "--attention" in arguments else []
    return CliRunner().invoke(app, ["compare", *common, *arguments])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows are known instead of computed; an entry without one fails, and "signal" is one to be stopped by."""
    chosen: dict[str, Any] = {"scores": SCORES, "signal": None}

    def record(folder: Folder, plan: Any, data: Any, runner: Any, *, show: Any, done: Any, pruning: Any) -> int | None:
        for trial in plan.due([]):
            folder.add(trial, data[trial.task])
            name = re.split(r"[\[@+]", trial.entry)[0]
            if name in chosen["scores"]:
                folder.keep(trial.name, None, **row(chosen["scores"][name]))
            else:
                folder.fail(trial.name, "diverged")
            done(trial.name)
        number: int | None = chosen["signal"]
        return number

    monkeypatch.setattr("mtkit.experiments.compare.compare", record)
    return chosen


def test_for_real_it_leaves_rows_tables_and_a_run_that_translates() -> None:
    shown = typed("--attention", "grouped-query@encoder+norm=post")
    assert shown.exit_code == 0, shown.output
    name = "grouped-query-encoder-norm-post.seed-1"
    assert f"[1/1] {name} (mtkit-compare/logs/{name}.log): training" in shown.stderr
    assert all((OUT / f"compare.{end}").is_file() for end in ("md", "csv", "tex"))
    (line,) = (OUT / "results.jsonl").read_text().splitlines()
    score = json.loads(line)["scores"]["test"]["BLEU"]["value"]
    assert f"{score:.2f}" in shown.stdout
    (record,) = csv.DictReader((OUT / "compare.csv").open())
    assert float(record["BLEU"]) == score
    translated = CliRunner().invoke(app, ["translate", "--run", f"mtkit-compare/runs/{name}"])
    assert translated.exit_code == 0, translated.output


def test_a_task_is_prepared_in_the_folder() -> None:
    Path("r.yaml").write_text(yaml.safe_dump({key: value for key, value in _settings().items() if key != "data"}))
    shown = typed("--attention", "full", "--task", "copy")
    assert shown.exit_code == 0, shown.output
    (found,) = (json.loads(line) for line in (OUT / "results.jsonl").read_text().splitlines())
    assert found["trial"] == "copy.full.seed-1"
    assert found["task"] == "copy"
    assert next(iter(found["scores"]["test"])) == "exact"
    assert "exact match" in shown.stdout
    assert (OUT / "data" / "copy" / "prepared.json").exists()


def test_the_pictures_of_tasks_are_where_the_output_names_them(known: Any) -> None:
    pytest.importorskip("matplotlib")
    Path("r.yaml").write_text(yaml.safe_dump({key: value for key, value in _settings().items() if key != "data"}))
    shown = typed("--attention", "full,longformer", "--task", "copy", "--task", "reverse")
    assert shown.exit_code == 0, shown.output
    files = " ".join(shown.stdout.rpartition("in mtkit-compare: ")[2].split())
    assert files == (
        "results.jsonl, compare.md, compare.csv, compare.tex, compare-ranks.png; "
        "pictures in pictures/copy, pictures/reverse; logs in logs"
    )
    assert (OUT / "compare-ranks.png").is_file()
    assert all((OUT / "pictures" / task / "compare.png").is_file() for task in ("copy", "reverse"))


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(Path("r.yaml").read_text())
    return settings


def test_rows_are_sorted_and_later_entries_are_added(known: Any) -> None:
    typed("--attention", "full,em-routing", "--output", "there")
    shown = typed("--attention", "longformer", "--output", "there")
    assert shown.exit_code == 0
    rows = [line.split()[0] for line in shown.stdout.split("\n") if "1,234,567" in line]
    assert rows == ["longformer", "full", "em-routing"]
    lines = Path("there/compare.md").read_text().split("\n")
    assert [line.split()[1] for line in lines if "1,234,567" in line] == rows


def test_the_same_mechanism_stands_several_times(known: Any) -> None:
    shown = typed("--attention", "longformer,longformer[window_radius=3],longformer@encoder")
    assert shown.exit_code == 0
    for entry in ("longformer ", "longformer[window_radius=3] ", "longformer@encoder "):
        assert shown.stdout.count(entry) == 1


def test_a_failure_shows_in_the_exit_code_and_the_table(known: Any) -> None:
    shown = typed("--attention", "full,band")
    assert shown.exit_code == 1
    assert "band.seed-1: failed: diverged; see mtkit-compare/logs/band.seed-1.log" in shown.stdout
    assert shown.stdout.endswith("; logs in logs\n")
    assert "80.00" in shown.stdout
    assert typed("--attention", "full").exit_code == 0  # another's failure is not this call's


def test_a_signal_shows_in_the_exit_code(known: Any) -> None:
    known["signal"] = signal.SIGTERM
    shown = typed("--attention", "full")
    assert shown.exit_code == 143
    assert "the same command resumes" in shown.stderr
    assert "80.00" in (OUT / "compare.md").read_text()


def test_options_go_where_they_belong(known: Any) -> None:
    shown = typed(
        "--attention", "full,longformer", "--attention-option", "window_radius=3", "--max-updates", "7",
        "--max-minutes", "0.5", "--batch-tokens", "300", "--seeds", "5,2", "--match", "parameters",
        "--search", "training.peak_rate=1e-3,3e-3", "dropout=0,0.1", "--search-share", "0.5", "--columns", "BLEU,loss",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    study = Folder(OUT).study()
    training = study.base["training"]
    assert (training["max_updates"], training["max_minutes"], training["batch_tokens"]) == (7, 0.5, 300)
    assert study.entries[1].settings["attention"]["options"] == {"window_radius": 3}
    assert "options" not in study.entries[0].settings["attention"]
    settings = study.settings
    assert (study.seeds, settings.match, settings.columns) == ((5, 2), "parameters", ("BLEU", "loss"))
    assert settings.search is not None
    assert settings.search.share == 0.5
    assert settings.search.settings == {"training.peak_rate": (1e-3, 3e-3), "model.dropout": (0, 0.1)}


def test_a_study_file_says_it_all_and_options_override_it(known: Any) -> None:
    study = {
        "entries": ["full", {"name": "wide", "attention": "longformer", "model": {"feed_forward": 64}}],
        "seeds": 3,
    }
    Path("s.yaml").write_text(
        yaml.safe_dump(study | {"recipe": "r.yaml", "settings": {"training": {"max_updates": 5}}})
    )
    shown = CliRunner().invoke(app, ["compare", "--study", "s.yaml", "--seeds", "2", "--max-updates", "6"])
    assert shown.exit_code == 1  # `wide` has no known score
    found = Folder(OUT).study()
    assert (found.seeds, found.base["training"]["max_updates"]) == ((1, 2), 6)
    assert [entry.name for entry in found.entries] == ["full", "wide"]


def test_without_entries_the_results_so_far_are_printed(known: Any) -> None:
    typed("--attention", "full,longformer")
    (OUT / "compare.md").unlink()
    shown = typed("--columns", "chrF,parameters")
    assert shown.exit_code == 0, shown.output
    head = shown.stdout.split("\n")[-6].split()
    assert head == ["entry", "chrF", "95%", "interval", "parameters"]
    assert "longformer" in (OUT / "compare.md").read_text()
    (OUT / "results" / "longformer.seed-1.json").write_text("{")
    assert "note: mtkit-compare/results/longformer.seed-1.json is damaged and left out" in typed().stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "3"], "--seeds is for trials"),
        (["--join", ".", "--recipe", "r.yaml"], "--recipe is for trials"),
        (["--jobs", "2"], "give one of these too"),
        (["--attention", "full", "--reproduce", "rows.jsonl", "--row", "1"], "does not go with --reproduce"),
        (["--study", "s.yaml", "--data", "there"], "the study's tasks have their own data"),
    ],
)
def test_options_without_effect_are_refused(known: Any, arguments: list[str], message: str) -> None:
    typed("--attention", "full")
    before = (OUT / "results.jsonl").read_bytes()
    Path("s.yaml").write_text("{entries: [full], tasks: [copy]}")
    with pytest.raises(MtkitError, match=message):
        raise typed(*arguments).exception or AssertionError("nothing was refused")
    assert (OUT / "results.jsonl").read_bytes() == before


def test_folders_are_joined_and_printed(known: Any) -> None:
    typed("--attention", "full", "--output", "one")
    typed("--attention", "full,longformer", "--seeds", "2,", "--output", "two")
    shown = typed("--join", "one", "--join", "two", "--output", "both")
    assert shown.exit_code == 0, shown.output
    assert "3 rows added to both" in shown.stderr
    assert shown.stdout.count("longformer") == 1
    assert len(Path("both/results.jsonl").read_text().splitlines()) == 3
    assert "no study for the rows of one/results.jsonl" in str(
        typed("--join", "one/results.jsonl", "--output", "new").exception
    )
    gone = typed("--attention", "full", "--join", "one/results.jsonl", "--output", "new")
    assert gone.exit_code == 0, gone.output
    assert "1 rows added to new" in gone.stderr
    assert not Path("new/runs").exists()  # nothing was trained again
    damaged = next(Path("two/results").glob("full*.json"))
    damaged.write_text("{")
    partly = typed("--join", "two", "--output", "part")
    assert "1 rows added to part" in partly.stderr
    assert f"note: {damaged} is damaged and left out" in partly.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--attention", "bnad"], "did you mean 'band'"), (["--attention", "band", "--max-updates", "9"], "2 -> 9")],
)
def test_a_wrong_study_joins_nothing(known: Any, arguments: list[str], message: str) -> None:
    typed("--attention", "full", "--output", "one")
    with pytest.raises(MtkitError, match=message):
        raise typed(*arguments, "--join", "one").exception or AssertionError("nothing was refused")
    assert not OUT.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "full,bnad"], "did you mean 'band'"),
        (["--attention", "band", "--attention-option", "window_radis=3"], "did you mean 'window_radius'"),
        (["--attention", "band", "--attention-option", "window_radius"], "KEY=VALUE"),
        (["--attention", "full", "--max-updates", "0"], "training.max_updates"),
        (["--attention", ","], "--attention is empty"),
        ([], "nothing to compare; give --attention"),
        (["--attention", "full", "--device", "gpu9"], "no device 'gpu9'"),
        (["--attention", "full", "--data", "nowhere"], "mtkit prepare"),
        (["--attention", "full", "--seeds", "x"], "--seeds x: write a number of seeds"),
        (["--attention", "full", "--seeds", "0"], "seeds"),
        (["--attention", "full", "--search", "peak_rate"], "SETTING=A,B"),
        (["full"], "full belongs to --search"),
        (["mine.yaml"], "mine.yaml belongs to --study, as in --study mine.yaml"),
        (["--attention", "full", "--task", "copy", "--data", "there"], "leave --data out"),
        (["--attention", "full", "--search", "peak_rat=1,2"], "did you mean 'peak_rate'"),
        (["--attention", "full", "--search-share", "0.5"], "no setting to search; give --search"),
        (["--attention", "full", "--search", "peak_rate=[1"], "--search peak_rate"),
        (["--attention", "full", "--search", "peak_rate=1", "--search", "peak_rate=2"], "peak_rate is given twice"),
        (["--attention", "full", "--columns", "BLUE"], "did you mean 'BLEU'"),
        (["--attention", "full", "--columns", "loss@test"], "no column 'loss@test'"),
        (["--attention", "full", "--match", "size"], "match"),
        (["--attention", "full", "--ray", "auto", "--jobs", "2"], "leave out jobs"),
        (["--reproduce", "rows.jsonl"], "go together"),
        (["--row", "1"], "go together"),
        (["--reproduce", "rows.jsonl", "--row", "1"], "cannot read rows.jsonl"),
        (["--join", "nowhere"], "no results to join; give a folder"),
        (["--study", "nowhere.yaml"], "cannot read"),
        (["--attention", "full", "--task", "cpoy"], "did you mean 'copy'"),
    ],
)
def test_mistakes_are_named_before_anything_trains(arguments: list[str], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        raise typed(*arguments).exception or AssertionError("nothing was refused")
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, DataError) == ("nowhere" in arguments and "--data" in arguments)
    assert not (OUT / "study.json").exists()


def test_another_recipe_is_refused(known: Any) -> None:
    typed("--attention", "full")
    with pytest.raises(MtkitError, match=r"training\.max_updates: 2 -> 9"):
        raise typed("--attention", "full", "--max-updates", "9").exception or AssertionError("nothing was refused")


def test_the_list_of_options_does_not_grow_by_accident() -> None:
    alone = typer.Typer(add_completion=False)
    alone.command()(compare)
    command = typer.main.get_command(alone)
    assert {name.removeprefix("--") for each in command.params for name in each.opts} == OPTIONS
