"""Checking a recipe: each step is done once, and the verdict is that of its promises."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepared import open_prepared
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.experiments import check as checking
from mtkit.experiments.check import Checked, check
from tests.decoding.trained import make_run

RECIPE = """# Two sides
promises: ["BLEU >= 0 on one after 5 minutes", "{promise}"]
preset: tiny
data:
  train: {{source: train.en, target: train.de}}
  valid: {{source: valid.en, target: valid.de}}
  test:
    one: {{source: valid.en, target: valid.de}}
    two: {{source: valid.en, target: valid.de}}
  tokenizer: {{vocabulary: 400}}
model: {{d_model: 16, heads: 2, feed_forward: 16, encoder_layers: 1, decoder_layers: 1}}
training: {{max_updates: 2, max_minutes: 5, batch_tokens: 200, validate_every: 2, validate_segments: 1}}
decoding: {{method: greedy}}
scoring: {{metrics: [BLEU]}}
"""


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for side, lines in (("train", range(60)), ("valid", range(60, 64))):
        Path(f"{side}.en").write_text("".join(f"the dog sees {number} cats\n" for number in lines))
        Path(f"{side}.de").write_text("".join(f"der Hund sieht {number} Katzen\n" for number in lines))


def checked(promise: str = "exact <= 100 on two after 5 minutes", **limits: Any) -> tuple[Checked, list[str]]:
    path, said = Path("two-sides.yaml"), []
    path.write_text(RECIPE.format(promise=promise))
    return check(path, Path("out"), limits, command=["mtkit"], say=said.append), said


def test_promises_are_checked_against_the_scores_of_their_sides() -> None:
    found, _ = checked("exact >= 101 on two after 5 minutes")
    (bleu, bleu_score), (exact, exact_score) = found.promises
    assert (bleu.side, bleu.kept(bleu_score)) == ("one", True)
    assert (exact.side, exact.kept(exact_score)) == ("two", False)
    assert not found.kept
    written = json.loads(Path("out/check.json").read_text())
    assert [each["kept"] for each in written["promises"]] == [True, False]
    assert [side["name"] for side in written["sides"]] == ["one", "two"]
    scores = {each["name"]: each["value"] for each in written["sides"][1]["systems"][0]["scores"]}
    assert scores["exact"] == exact_score  # a promised metric is computed though the recipe does not ask for it


def test_killed_between_two_sides_it_goes_on_with_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    translate = checking.translate_side

    def killed_at_two(translator: Translator, side: Any, **how: Any) -> Any:
        if side.name == "two":
            raise KeyboardInterrupt
        return translate(translator, side, **how)

    with monkeypatch.context() as patch:
        patch.setattr(checking, "translate_side", killed_at_two)
        with pytest.raises(KeyboardInterrupt):
            checked()
    once = ("data/prepared.json", "run/checkpoints/update-00000002/state.json", "run/translations/one.txt")
    done = [Path("out") / each for each in once]
    before = [path.stat().st_mtime_ns for path in done]
    found, said = checked()
    assert found.kept
    assert [path.stat().st_mtime_ns for path in done] == before
    assert any("up to date" in line for line in said)
    assert any("finished already" in line for line in said)
    assert [line.partition(":")[0] for line in said if line.endswith(".txt")] == ["two"]


def test_longer_training_goes_on_and_its_best_checkpoint_translates() -> None:
    checked(max_updates=1)
    _, said = checked(max_updates=4)
    assert not any(line.startswith("update 1:") for line in said)
    assert Path("out/run/checkpoints/update-00000004").is_dir()
    best = json.loads(Path("out/run/best.json").read_text())["checkpoint"]
    for side in ("one", "two"):
        assert json.loads(Path(f"out/run/translations/{side}.json").read_text())["checkpoint"] == best


def test_it_resumes_when_the_run_that_it_began_with_is_gone() -> None:
    checked()
    base = Path("out").rename("base")
    path = Path("tuned.yaml")
    inherits = [line for line in RECIPE.splitlines() if not line.startswith(("preset:", "model:"))]
    recipe = "\n".join(inherits).format(promise="exact <= 100 on two")
    path.write_text(recipe.replace("training: {", "training: {init_from: base/run, "))
    check(path, Path("out"), {}, command=["mtkit"], say=lambda line: None)
    base.rename("gone")
    said: list[str] = []
    assert check(path, Path("out"), {}, command=["mtkit"], say=said.append).kept
    assert any("finished already" in line for line in said)


def test_a_signal_stops_it_with_nothing_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    train = checking.train

    def told_to_stop(*arguments: Any, say: Any, **rest: Any) -> Any:
        def say_and_signal(line: str) -> None:
            say(line)
            if line.startswith("encoder "):
                signal.raise_signal(signal.SIGTERM)

        return train(*arguments, say=say_and_signal, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(checking, "train", told_to_stop)
        found, _ = checked()
    assert (found.signal, found.sides, found.promises) == (signal.SIGTERM, [], [])
    assert checked()[0].signal is None


def test_a_promise_about_what_is_not_there_is_refused_before_training() -> None:
    with pytest.raises(MtkitError, match=r"promises 'exact <= 100 on three', but it has the sides: one, two"):
        checked("exact <= 100 on three")
    with pytest.raises(MtkitError, match="no metric 'exactly'"):
        checked("exactly <= 100 on two")
    assert not Path("out/run").exists()
    assert checked("EXACT <= 100 on two")[0].promises[1][0].metric == "exact"


def test_another_recipe_in_the_same_folder_is_refused() -> None:
    checked()
    path = Path("other.yaml")
    path.write_text(RECIPE.format(promise="BLEU >= 0 on two").replace("feed_forward: 16", "feed_forward: 32"))
    with pytest.raises(MtkitError, match=r"model\.feed_forward: 16 -> 32\); delete out to start again"):
        check(path, Path("out"), {}, command=["mtkit"], say=lambda line: None)


def test_a_run_s_translations_are_training_text(tmp_path: Path) -> None:
    teacher = make_run(tmp_path / "teacher").run.folder
    path, said = Path("student.yaml"), []
    path.write_text(
        RECIPE.format(promise="exact <= 100 on two").replace(
            "train: {source: train.en, target: train.de}",
            f"train: [{{source: train.en, target: train.de}}, {{source: train.en, translated_by: {teacher}}}]",
        )
    )
    found = check(path, Path("out"), {}, command=["mtkit"], say=said.append)
    assert found.kept
    assert any(f"translating 60 lines of train.en with {teacher}" in line for line in said)
    assert len(Path("out/data-translated/train-2.txt").read_text().splitlines()) == 60
    assert len(open_prepared(Path("out/data")).train) == 120
    again: list[str] = []
    check(path, Path("out"), {}, command=["mtkit"], say=again.append)
    assert not any("translating" in line for line in again)
