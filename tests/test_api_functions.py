"""mtkit from Python: the page's examples run, and what the functions give is what the rooms below them give."""

import copy
import dataclasses
import doctest
import io
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mtkit
from mtkit.decoding.alignment import align
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.scores import score_corpus
from mtkit.experiments import place
from mtkit.experiments.children import Children
from mtkit.experiments.folder import Folder
from mtkit.recipe import DecodingSettings, make_recipe, merged
from mtkit.runs import Run
from tests.decoding.trained import make_run

PAGE = Path(__file__).parents[1] / "docs/python.md"
LINES = ["The old dog sees a bird.", "", "A green house. \u2028 The tree.", "猫は木の下に。"]


def test_the_pages_examples_give_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(text, {}, "python.md", str(PAGE), 0)
    assert len(examples.examples) > 10
    shown: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=shown.append)
    assert not shown, "".join(shown)


def test_every_exported_name_is_there() -> None:
    assert all(callable(getattr(mtkit, name)) for name in mtkit.EXPORTS)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        getattr(mtkit, "laod")  # noqa: B009


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs")).run.folder


def test_translations_are_the_translators(folder: Path) -> None:
    loaded = mtkit.load(folder)
    found = loaded.translate(LINES, beam=4, n_best=2, length_penalty=0.5)
    settings = loaded.translator.settings.model_copy(update={"beam": 4, "n_best": 2, "length_penalty": 0.5})
    own = Translator(loaded.translator.runs, settings).translate(LINES)
    assert [[each.text, *(other.text for other in each.alternatives)] for each in found] == [
        [each.text for each in line] for line in own
    ]
    assert [each.score for each in found] == [line[0].score for line in own]
    assert [each.source for each in found] == LINES
    assert (found[1].text, found[1].parts, found[1].pieces) == ("", 0, [])
    assert loaded.translator.settings.beam == 3  # settings of one call stay with it
    for idle, method in (({"temperature": 0.5}, "sample"), ({"beam": 4, "method": "greedy"}, "beam")):
        with pytest.raises(MtkitError, match=f'has no effect with method=.*add method="{method}"'):
            loaded.translate(LINES, **idle)
    for joined in ("context", "document_pieces"):
        with pytest.raises(MtkitError, match=rf"{joined} has no effect .* mtkit\.translate_file joins lines"):
            loaded.translate(LINES, **{joined: 2})
    assert len(loaded.translate(LINES, method="greedy", coverage_penalty=0)) == len(LINES)
    greedy = mtkit.load(folder)
    vars(greedy.translator.runs[0])["recipe"] = make_recipe(
        merged(loaded.translator.runs[0].recipe.model_dump(), {"decoding": {"method": "greedy"}})
    )
    assert [each.text for each in greedy.translate(LINES, beam=4)] == [
        each.text for each in loaded.translate(LINES, beam=4)
    ]


@pytest.mark.parametrize(
    "given",
    [
        lambda: (line for line in LINES),
        lambda: io.StringIO("\n".join(LINES)),
        lambda: [f"{line}\r\n" for line in LINES],
        lambda: dict.fromkeys(LINES).keys(),
        lambda: np.array(LINES),
    ],
    ids=["generator", "open file", "line ends", "view", "array"],
)
def test_lines_are_taken_from_what_gives_them(folder: Path, given: Callable[[], Iterable[str]]) -> None:
    loaded = mtkit.load(folder)
    assert loaded.translate(given(), max_pieces=4) == loaded.translate(LINES, max_pieces=4)
    assert mtkit.score(given(), given(), metrics=["exact"])[0].value == 100


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["a", "b", None], "line 3{of} is not text but NoneType; give str"),
        (["a", 3], "line 2{of} is not text but int; give str"),
        (b"Anna", "line 1{of} is not text but int; give str"),
        (["a", "b\ud83d"], "line 2{of} has half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_text_is_said(folder: Path, lines: Any, said: str) -> None:
    with pytest.raises(MtkitError, match=said.format(of="")):
        mtkit.load(folder).translate(lines)
    with pytest.raises(MtkitError, match=said.format(of="")):
        mtkit.translate_file(mtkit.load(folder).translator, lines, io.BytesIO())
    with pytest.raises(MtkitError, match=said.format(of=" of the hypothesis")):
        mtkit.score(lines, ["a"])
    with pytest.raises(MtkitError, match=said.format(of=" of reference 2")):
        mtkit.score(["a"], ["a"], lines)


def test_a_copy_of_a_line_leaves_the_model_behind(folder: Path) -> None:
    line = mtkit.load(folder).translate(["a dog"], n_best=2, max_pieces=5)[0]
    assert [each.name for each in dataclasses.fields(line)][-1] == "alternatives"
    assert dataclasses.asdict(line)["alternatives"][0]["text"] == line.alternatives[0].text
    assert json.loads(json.dumps(dataclasses.asdict(line)))["pieces"] == line.pieces
    assert len(pickle.dumps(line)) < 2000
    for copied in (pickle.loads(pickle.dumps(line)), copy.deepcopy(line)):
        assert copied == line
        with pytest.raises(MtkitError, match="a copied or pickled line has no model"):
            _ = copied.alignment
    wanted = line.alignment
    for copied in (pickle.loads(pickle.dumps(line)), copy.deepcopy(line)):
        torch.testing.assert_close(copied.alignment.weights, wanted.weights)


def test_threads_that_share_a_run_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, entered, most = mtkit.load(folder), [0], [0]
    wanted = loaded.translate(LINES, beam=2)
    whole = Translator.translate

    def counted(*args: Any, **settings: Any) -> Any:
        entered[0] += 1
        most[0] = max(most[0], entered[0])
        time.sleep(0.05)
        try:
            return whole(*args, **settings)
        finally:
            entered[0] -= 1

    monkeypatch.setattr(Translator, "translate", counted)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: loaded.translate(LINES, beam=2), range(6)))
    assert found == [wanted] * 6
    assert most == [1]
    for copied in (pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert copied.translate(LINES, beam=2) == wanted


@pytest.mark.parametrize("engine", ["mtkit", "ctranslate2"])
def test_forked_processes_and_copies_translate(folder: Path, engine: str) -> None:
    loaded, context, in_use = mtkit.load(folder, engine=engine), get_context("fork"), threading.Event()
    ours, theirs = context.Pipe()
    wanted = loaded.translate(["a dog"], max_pieces=4)
    assert copy.deepcopy(loaded).translate(["a dog"], max_pieces=4) == wanted

    def use() -> None:
        with loaded._turn:
            in_use.set()
            time.sleep(0.02)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1_000_000).sum()  # begins OpenMP's threads, which are not copied
        with ThreadPoolExecutor(1) as pool:
            pool.submit(use)
            in_use.wait()
            child = context.Process(target=lambda: theirs.send(loaded.translate(["a dog"], max_pieces=4)))
            child.start()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    answered = ours.poll(10)
    child.kill()
    child.join()
    assert answered
    assert ours.recv() == wanted


def test_a_run_can_be_loaded_in_inference_mode(folder: Path) -> None:
    wanted = [line.text for line in mtkit.load(folder).translate(LINES)]
    with torch.inference_mode():
        loaded = mtkit.load(folder)
        assert [line.text for line in loaded.translate(LINES)] == wanted
    assert [line.text for line in loaded.translate(LINES)] == wanted


def test_a_loaded_run_no_longer_reads_its_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    loaded = mtkit.load(Path(folder.name))
    monkeypatch.chdir(tmp_path)
    (found,) = loaded.translate(["a dog"], max_pieces=4)
    assert found.pieces
    assert found.alignment.target
    mtkit.translate_file(loaded.translator, ["a dog"], tmp_path / "out")
    assert loaded.translator.identity["vocabulary"] == Run(folder).vocabulary


def test_an_alignment_is_that_of_the_pieces(folder: Path) -> None:
    loaded = mtkit.load(folder)
    first, blank = loaded.translate(["a dog", ""], max_pieces=5)
    ((best, *_),) = loaded.translator.with_settings(DecodingSettings(max_pieces=5)).translate(["a dog"])
    wanted = align(loaded.translator.network, loaded.translator.tokenizers, "a dog", best.pieces)
    assert first.alignment.target == wanted.target == [*first.pieces, "</s>"]
    torch.testing.assert_close(first.alignment.weights, wanted.weights)
    with pytest.raises(MtkitError, match="blank"):
        _ = blank.alignment


def test_a_run_with_several_directions(tmp_path: Path) -> None:
    loaded = mtkit.load(make_run(tmp_path, directions=("en-de", "en-fr")).run.folder)
    assert loaded.directions == ["en-de", "en-fr"]
    assert len(loaded.translate(["a dog"], direction="en-fr", max_pieces=5)) == 1
    with pytest.raises(MtkitError, match="several directions"):
        loaded.translate(["a dog"])


def test_scores_are_those_of_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    path.write_text("我喜欢猫。\n他走了。\n")
    hypotheses, references = ["我喜欢狗。", "他走了。"], ["我喜欢猫。", "他走了。"]
    wanted = score_corpus(hypotheses, [references], languages=["zh", "zh"])
    assert mtkit.score(hypotheses, path, language="zh") == wanted
    assert mtkit.score(hypotheses, references) == wanted
    assert wanted[0].value > mtkit.score(hypotheses, references, metrics=["BLEU"], bootstrap=0, language="de")[0].value


def test_metrics_are_given_by_one_name_or_several() -> None:
    wanted = mtkit.score(["a dog"], ["a dog"], metrics=["exact"], bootstrap=0)
    assert mtkit.score(["a dog"], ["a dog"], metrics="exact", bootstrap=0) == wanted
    assert mtkit.score(["a dog"], ["a dog"], metrics=(name for name in ["exact"]), bootstrap=0) == wanted


def test_mistakes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="no run"):
        mtkit.load("mine")
    with pytest.raises(RunError, match="no run folder"):
        mtkit.load(tmp_path / "mine")
    with pytest.raises(MtkitError, match="one string"):
        mtkit.load(folder).translate("a dog")
    with pytest.raises(MtkitError, match=r"not a file; mtkit\.translate_file"):
        mtkit.load(folder).translate(Path("text"))
    with pytest.raises(MtkitError, match=r"takes a Translator, not LoadedRun; write run\.translator"):
        mtkit.translate_file(mtkit.load(folder), ["a dog"], tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(MtkitError, match="one string"):
        mtkit.score("a dog", ["a dog"])
    with pytest.raises(RunError, match="without slashes"):
        mtkit.train(name="../mine")
    with pytest.raises(AttributeError, match="translat"):
        _ = mtkit.translat  # type: ignore[attr-defined]


def test_importing_mtkit_loads_nothing_heavy() -> None:
    script = (
        "import sys, mtkit; assert 'load' in dir(mtkit); assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_training_begins_with_the_model_of_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"max_updates": 1, "validate_segments": 1, "precision": "float32"}
    recipe = {"data": {"folder": folder.parents[1] / "mtkit-data"}, "training": few}
    outcome = mtkit.train(recipe, name="tuned", init_from=folder, device="cpu")
    assert Run(outcome.folder).recipe.model == Run(folder).recipe.model
    assert Run(outcome.folder).about["init_from"] == folder.name


def test_variables_in_nested_settings_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPORA", str(tmp_path))
    with pytest.raises(MtkitError, match=re.escape(f"no prepared data in {tmp_path}/none")):
        mtkit.train({"data": {"folder": "${CORPORA}/none"}})
    monkeypatch.delenv("CORPORA")
    with pytest.raises(MtkitError, match="recipe: the environment variable CORPORA is not set"):
        mtkit.prepare({"data": {"folder": "$CORPORA/data"}})


def test_ctrl_c_in_a_training_reaches_the_caller_after_a_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"max_updates": 1_000_000, "validate_segments": 1, "precision": "float32", "log_every": 1}
    recipe = {"data": {"folder": folder.parents[1] / "mtkit-data"}, "training": few}

    def interrupt(line: str) -> None:
        if line.startswith("update 2"):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            mtkit.train(recipe, name="stopped", device="cpu", say=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Run(tmp_path / "mtkit-runs/stopped").checkpoint("last").name.startswith("update-")


def test_training_on_data_of_other_settings_is_noted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"max_updates": 1, "validate_segments": 1, "precision": "float32"}
    data = {"folder": folder.parents[1] / "mtkit-data", "tokenizer": {"vocabulary": 77}}
    said: list[str] = []
    mtkit.train({"data": data, "training": few}, name="noted", device="cpu", say=said.append)
    (note,) = (line for line in said if line.startswith("note: "))
    assert f"{data['folder']} was prepared with other settings than the recipe has (tokenizer.vocabulary: " in note
    assert note.endswith("to replace it: mtkit.prepare(recipe, overwrite=True)")


@pytest.mark.parametrize("words", [None, ["mine", Path("run.py"), 3]])
def test_training_needs_no_command_line(
    words: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that embeds Python may have none, or put there what it likes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(sys, "argv") if words is None else monkeypatch.setattr(sys, "argv", words)
    few = {"max_updates": 1, "validate_segments": 1, "precision": "float32"}
    recipe = {"data": {"folder": folder.parents[1] / "mtkit-data"}, "training": few}
    assert mtkit.train(recipe, name="embedded", device="cpu").progress.update == 1


def test_training_goes_on_when_the_run_that_it_began_with_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = Path(shutil.copytree(folder, tmp_path / "mtkit-runs" / "base"))
    few = {"max_updates": 1, "validate_every": 1, "validate_segments": 1, "precision": "float32"}
    recipe = {"data": {"folder": folder.parents[1] / "mtkit-data"}, "training": few}
    mtkit.train(recipe, name="tuned", init_from="base", device="cpu")
    base.rename(tmp_path / "gone")
    more = {**recipe, "training": {**few, "max_updates": 2}}
    assert mtkit.train(more, name="tuned", init_from="base", device="cpu").progress.update == 2
    with pytest.raises(RunError, match="init_from: base -> another"):
        mtkit.train(more, name="tuned", init_from="another", device="cpu")
    with pytest.raises(RunError, match="no run"):
        mtkit.train(more, name="new", init_from="base", device="cpu")


def test_settings_of_a_call_lie_over_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder, tmp_path / "run")
    recipe = json.loads((run / "recipe.yaml").read_text())
    recipe["decoding"]["max_pieces"] = 2
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    (found,) = mtkit.load(run).translate(LINES[:1], beam=4)
    assert found.cut
    assert len(found.pieces) <= 2


def test_a_line_is_aligned_in_its_own_direction(tmp_path: Path) -> None:
    loaded = mtkit.load(make_run(tmp_path, directions=("en-de", "en-fr")).run.folder)
    for direction in ("en-de", "en-fr"):
        (found,) = loaded.translate(LINES[:1], direction=direction, max_pieces=6)
        assert direction.removeprefix("en-") in found.alignment.source[0]


TINY: dict[str, Any] = {
    "data": {"builtin": {"train": 200, "valid": 8, "test": 8}, "tokenizer": {"vocabulary": 400}},
    "model": {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1},
    "training": {"batch_tokens": 200, "max_updates": 2, "precision": "float32"},
    "decoding": {"method": "greedy", "max_pieces": 5},
}


def test_compare_gives_a_record_per_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = TINY
    mtkit.prepare(recipe)
    said: list[str] = []
    entries = ["full", {"name": "narrow", "model": {"feed_forward": 8}}]
    records = mtkit.compare(entries, recipe, seeds=[3], out="here", threads=1, say=said.append)
    assert {record["entry"] for record in records} == {"full", "narrow"}
    assert {line.split(":")[0] for line in said} == {"full.seed-3", "narrow.seed-3"}
    assert records == mtkit.compare(entries, recipe, seeds=[3], out="here", threads=1)
    with pytest.raises(mtkit.MtkitError, match="did you mean 'seeds'"):
        mtkit.compare(entries, recipe, seedz=2)
    for wrong in ({"jobs": 0}, {"threads": -1}):
        with pytest.raises(mtkit.MtkitError, match="give 1 or more"):
            mtkit.compare(entries, recipe, out="ray", **wrong)
    with pytest.raises(mtkit.MtkitError, match='out = "" is no folder'):
        mtkit.compare(entries, recipe, out="")
    with pytest.raises(mtkit.MtkitError, match="a Ray cluster runs as many trials as it has room for"):
        mtkit.compare(entries, recipe, out="ray", jobs=2, ray="auto")
    assert not Path("ray").exists()


def test_compare_runs_on_a_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner of clusters gets the address, the folder of the data, and the device and the threads as they are."""
    given: list[Any] = []

    class Recorded(Children):
        def __init__(self, folder: Folder, device: str, threads: int | None, address: str, paths: set[Path]) -> None:
            given.append((device, threads, address, paths))
            super().__init__(folder, "cpu", 1, 1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, "Cluster", Recorded)
    mtkit.prepare(TINY)
    (record,) = mtkit.compare("full", TINY, ray="head:6379")
    assert record["entry"] == "full"
    assert given == [("auto", None, "head:6379", {Path("mtkit-data")})]
