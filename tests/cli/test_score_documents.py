"""`mtkit score --documents`, as typed."""

import json
from pathlib import Path

import pytest
import sacrebleu
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.held_out import HeldOut, Speed, save
from mtkit.decoding.translation import Translation
from mtkit.errors import DataError, MtkitError
from mtkit.runs import FORMAT, Run
from tests.evaluation.test_statistics import corpus
from tests.evaluation.test_systems import written

ABOUT = {"format": FORMAT, "vocabularies": {"source": 8, "target": 8}}
IDS = [0] * 12 + [1] * 18
REFERENCES = corpus(30, 0)
BY_FILE = ["--hypothesis", "hypothesis", "--reference", "reference"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `one` has no document ids; run `two` has them."""
    monkeypatch.chdir(tmp_path)
    for name, ids in (("one", None), ("two", IDS)):
        run = Run(Path("mtkit-runs") / name)
        translations = [[Translation(text, 0.0, 0.0, (3,))] for text in corpus(30, 0.2, len(name))]
        save(run, HeldOut("test", REFERENCES, REFERENCES, document_ids=ids), translations, Speed(1, 30, 30), {})
        (run.folder / "run.json").write_text(json.dumps(ABOUT))
        (run.folder / "recipe.yaml").write_text("seed: 1\n")
    written(Path("hypothesis"), corpus(30, 0.3))
    written(Path("reference"), REFERENCES)
    written(Path("ids"), [str(number) for number in IDS])


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["score", "--documents", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_runs_are_compared_by_documents_that_one_of_them_knows() -> None:
    shown = typed("--name", "one", "--name", "two", "--output", "picture.png")
    assert "documents: 2, lines: 30" in shown.stdout
    assert [line.split()[0] for line in shown.stdout.split("\n\n")[1].split("\n")[1::2]] == [
        "d-BLEU",
        "d-chrF",
        "consistency",
    ]
    assert "picture: picture.png" in shown.stderr
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")
    (side,) = json.loads(typed("--name", "one", "--name", "two", "--json").stdout)["sides"]
    assert side["segments"] == 2
    assert side["documents"]["lines"] == 30
    assert [system["name"] for system in side["systems"]] == ["one", "two"]
    assert side["systems"][1]["differences"][0]["metric"] == "d-BLEU"


def test_files_have_ids_or_blank_lines() -> None:
    by_ids = json.loads(typed(*BY_FILE, "--document-ids", "ids", "--metric", "bleu", "--json").stdout)
    texts = [[" ".join(lines[:12]), " ".join(lines[12:])] for lines in (corpus(30, 0.3), REFERENCES)]
    assert by_ids["scores"][0]["value"] == pytest.approx(sacrebleu.corpus_bleu(texts[0], texts[1:]).score)
    for name in ("hypothesis", "reference"):
        lines = Path(name).read_text().splitlines()
        written(Path(name), [*lines[:12], "", *lines[12:]])
    by_gaps = typed(*BY_FILE, "--metric", "bleu", "--json")
    assert json.loads(by_gaps.stdout)["scores"] == by_ids["scores"]
    assert "note: no consistency of terms: the source is unknown; give it with --source" in by_gaps.stderr
    with_source = typed(*BY_FILE, "--source", "reference")
    assert "consistency: pairs of occurrences" in with_source.stdout
    assert "note: no consistency" not in with_source.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "one"], r"test.source.txt has no blank lines between documents.*--document-ids FILE"),
        (BY_FILE, "reference has no blank lines between documents"),
        ([*BY_FILE, "--document-ids", "short"], "hypothesis has 30 lines and short has 2"),
        ([*BY_FILE, "--document-ids", "nowhere"], "nowhere"),
        (["--name", "two", "--metric", "TER"], "documents have no TER; choose one or both of: BLEU, chrF"),
        (["--name", "two", "--by-length"], "--by-length does not go with --documents"),
        (["--name", "two", "--direction", "en-fr"], "--direction does not go with --documents"),
        ([*BY_FILE, "--document-ids", "ids", "--output", "ids"], "ids"),
        (["--contrastive", "x", "--document-ids", "ids"], "--document-ids does not go with --contrastive"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    Path("short").write_text("a\nb\n")
    with pytest.raises((MtkitError, DataError), match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)
    assert Path("ids").read_text() == "".join(f"{number}\n" for number in IDS)


@pytest.mark.parametrize("option", ["--document-ids", "--output"])
def test_options_of_documents_need_documents(option: str) -> None:
    with pytest.raises(MtkitError, match=f"{option} applies to --documents only"):
        CliRunner().invoke(app, ["score", *BY_FILE, option, "ids"], catch_exceptions=False)
