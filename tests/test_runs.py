"""Run folders: which is found, and what is refused."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mtkit import runs
from mtkit.errors import MtkitError, RunError
from mtkit.model.build import build_model
from mtkit.recipe import load_recipe
from mtkit.runs import FORMAT, Run, can_resume, find_run, find_runs, named_run, run_folder
from mtkit.storage.files import digest
from mtkit.storage.weights import check_sum, load_weights, read_tensors
from tests.damage import check_damages


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of an untrained model, found by the name "one"."""
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    folder = tmp_path / "one"
    checkpoint = folder / "checkpoints" / "update-00000010"
    checkpoint.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {d_model: 16, heads: 2, feed_forward: 16}\n")
    (folder / "run.json").write_text(json.dumps({"format": FORMAT, "vocabularies": {"source": 16, "target": 16}}))
    (folder / "best.json").write_text(json.dumps({"checkpoint": "update-00000010"}))
    model = build_model(load_recipe(folder / "recipe.yaml"), source_vocabulary=16, target_vocabulary=16)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, checkpoint / "model.safetensors")
    return folder


def test_a_run_is_found_by_folder_name_or_age(run: Path) -> None:
    assert find_run(folder=run).folder == find_run(name="one").folder == find_run().folder == run
    younger = run.parent / "two"
    younger.mkdir()
    (younger / "run.json").write_text((run / "run.json").read_text())
    os.utime(younger / "run.json", (2**31, 2**31))
    assert find_run().folder == younger
    with pytest.raises(RunError, match="did you mean 'one'"):
        find_run(name="onne")
    with pytest.raises(RunError, match="no run folder"):
        find_run(folder=run / "nowhere")
    with pytest.raises(RunError, match="leave one of them out"):
        find_run(folder=run, name="one")


def test_a_run_whose_name_is_not_utf_8_is_refused_by_it(run: Path) -> None:
    run.rename(run.with_name(os.fsdecode(b"one\xff")))
    with pytest.raises(MtkitError, match=r"one\? is not UTF-8; rename that file, or give a link to it"):
        find_run()


def test_several_runs_are_found_by_folders_and_names(run: Path) -> None:
    folders = [each.folder for each in find_runs([run], ["one", "one"])]
    assert folders == [run] * 3
    assert [each.folder for each in find_runs(None, [])] == [run]
    with pytest.raises(RunError, match="did you mean 'one'"):
        find_runs([run], ["onne"])


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\n", "a\tb", "\x1b[2J", "a\u202eb"])
def test_a_name_that_is_no_folder_or_that_acts_on_the_terminal_is_refused(name: str) -> None:
    with pytest.raises(RunError, match=re.escape(f"--name {name!r}")):
        run_folder(name)


def test_no_run_yet_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    with pytest.raises(RunError, match="mtkit train"):
        find_run()


def test_directions_and_documents_are_those_of_the_data(run: Path) -> None:
    """What was prepared counts; the recipe tells of runs that do not say."""
    assert find_run(run).directions == ["en-de"]
    assert find_run(run).document_pieces is None
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"directions": ["en-fr", "fr-en"], "document_pieces": 90}))
    assert find_run(run).directions == ["en-fr", "fr-en"]
    assert find_run(run).document_pieces == 90


def test_vocabularies_are_compared_by_content(run: Path) -> None:
    (run / "tokenizer").mkdir()
    none = find_run(run).vocabulary
    (run / "tokenizer" / "joint.model").write_bytes(b"a")
    one = find_run(run).vocabulary
    (run / "tokenizer" / "joint.model").write_bytes(b"b")
    assert len({none, one, find_run(run).vocabulary}) == 3


def test_the_model_comes_back(run: Path) -> None:
    model = find_run(name="one").load_model()
    assert not model.training
    assert model.encode(torch.tensor([[4, 3]])).memory.shape == (1, 2, 16)


def test_the_latest_run_is_found_while_a_training_drops_checkpoints(run: Path) -> None:
    (run / "checkpoints" / "update-00000001").symlink_to("gone")  # listed, and no longer there
    assert find_run().folder == run


@pytest.mark.parametrize("damage", ["truncated", "pickle", "missing", "other model"])
def test_damaged_weights_are_refused_in_one_line(run: Path, damage: str) -> None:
    path = run / "checkpoints" / "update-00000010" / "model.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "other model":
        save_file({"a": torch.zeros(2)}, path)
    else:
        path.unlink()
    if damage == "pickle":
        torch.save({"a": torch.zeros(2)}, path.with_name("model.pt"))
    with pytest.raises(RunError, match="pickle" if damage == "pickle" else "model.safetensors") as error:
        find_run(name="one").load_model()
    assert "\n" not in str(error.value)


def test_weights_of_another_account_are_refused_by_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, mode: str = "r") -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", denied)  # the root user reads anything
    path = run / "checkpoints" / "update-00000010" / "model.safetensors"
    with pytest.raises(RunError, match=rf"^cannot read {re.escape(str(path))}: Permission denied; "):
        read_tensors(path)


def test_a_run_of_another_version_is_refused(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"format": FORMAT + 1, "mtkit": "9.9"}))
    with pytest.raises(RunError, match=r"mtkit '9\.9'"):
        find_run(name="one")
    (run / "run.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        find_run(name="one")


def test_damaged_records_are_named(run: Path) -> None:
    def use() -> None:
        found = find_run(name="one")
        assert found.load_model() is not None
        assert (found.directions, found.document_pieces) is not None

    about = json.loads((run / "run.json").read_text())
    more = {"directions": ["en-de"], "document_pieces": 90, "data": "a", "init_from": None, "commands": ["mtkit train"]}
    (run / "run.json").write_text(json.dumps(about | more))
    assert check_damages(run / "run.json", use, names=run) > 60
    assert check_damages(run / "best.json", use, names=run) > 10
    (run / "best.json").write_text(json.dumps({"checkpoint": "../../elsewhere"}))
    with pytest.raises(RunError, match=r"best\.json.*checkpoint = '\.\./.*elsewhere': is not a .*remove that file"):
        use()
    (run / "best.json").unlink()
    use()


@pytest.mark.parametrize("content", [None, "", "model: {", "\0"], ids=["missing", "empty", "cut", "zeros"])
def test_a_damaged_recipe_says_what_to_do(run: Path, content: str | None) -> None:
    (run / "recipe.yaml").unlink()
    if content is not None:
        (run / "recipe.yaml").write_text(content)
    with pytest.raises(RunError, match=r"one/recipe\.yaml.*; copy the run again, or choose another --run"):
        find_run(name="one").load_model()


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml", "checkpoints/update-00000010/model.safetensors", "new"])
def test_a_pipe_in_a_run_is_refused_without_waiting(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(MtkitError, match=rf"{name} is a pipe"):
        find_run(name="one")


def test_an_unknown_checkpoint_lists_those_there(run: Path) -> None:
    with pytest.raises(RunError, match="update-00000010"):
        find_run(name="one").checkpoint("average")
    with pytest.raises(RunError, match=r"'latest' \(did you mean 'last'\?\); it has: update-00000010"):
        find_run(name="one").checkpoint("latest")


def test_a_copy_of_a_checkpoint_with_another_name_is_not_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "update-00000010-backup").mkdir()
    assert Run(run).checkpoint("last").name == "update-00000010"
    assert can_resume(run)
    (run / "checkpoints" / "update-00000010").rename(run / "checkpoints" / "update-old")
    assert not can_resume(run)


@pytest.mark.parametrize(("weights", "name"), [({"weight": torch.zeros(2, 3)}, "bias"), ({}, "bias")])
def test_weights_of_another_model_are_refused(weights: dict[str, torch.Tensor], name: str) -> None:
    with pytest.raises(RunError, match=name):
        load_weights(nn.Linear(3, 2), weights, Path("there"))
    with pytest.raises(RunError, match=r"weight is \(2, 2\) in the file and \(2, 3\)"):
        load_weights(nn.Linear(3, 2, bias=False), {"weight": torch.zeros(2, 2)}, Path("there"))
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(RunError, match=f"weight is {dtype} in the file and torch.float32 in the recipe"):
            load_weights(nn.Linear(3, 2, bias=False), {"weight": torch.zeros(2, 3, dtype=dtype)}, Path("there"))


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    Path("one").mkdir()
    assert named_run(Path("one")).folder == run
    (Path("one") / "run.json").write_text((run / "run.json").read_text())
    assert named_run(Path("one")).folder == Path("one")
    assert named_run(run).folder == run
    with pytest.raises(RunError, match="no run 'two'"):
        named_run(Path("two"))


@pytest.mark.parametrize("checksum", ["right", "other", "none"])
def test_weights_are_checked_against_their_checksum(run: Path, checksum: str) -> None:
    weights = run / "checkpoints" / "update-00000010" / "model.safetensors"
    sums = {} if checksum == "none" else {weights.name: digest(weights)}
    weights.with_name("state.json").write_text(json.dumps({"format": 1, "sha256": sums, "update": 10}))
    if checksum == "other":
        content = bytearray(weights.read_bytes())
        content[-9] ^= 0x40
        weights.write_bytes(content)
    if checksum == "right":
        Run(run).load_model()
        return
    with pytest.raises(RunError, match=r"model\.safetensors is damaged: its checksum is not the one in state\.json"):
        Run(run).load_model()


def test_a_checkpoint_that_a_running_training_replaces_is_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (run / "checkpoints" / f"update-000000{update}" for update in (10, 20))

    def replaced(file: Path, advice: str) -> bool:
        if old.exists():
            old.rename(new)
            (run / "best.json").write_text(json.dumps({"checkpoint": new.name}))
            raise FileNotFoundError(file)
        return check_sum(file, advice)

    monkeypatch.setattr(runs, "check_sum", replaced)
    assert Run(run).tensors()


def test_a_checkpoint_that_stays_damaged_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, advice: str) -> bool:
        raise RunError("damaged")

    monkeypatch.setattr(runs, "check_sum", fail)
    with pytest.raises(RunError, match="damaged"):
        Run(run).tensors()
