"""Trainings that are refused, and data that is left out: one clear error, nothing half-written."""

from pathlib import Path

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, Side, open_prepared
from mtkit.errors import DataError, MtkitError, RecipeError, RunError
from mtkit.recipe.data import DataSettings
from mtkit.runs import Run
from mtkit.training.train import train
from tests.training.conftest import run, tiny


def lengths_of(side: Side) -> list[tuple[int, int]]:
    """The pieces of each pair, without end marks."""
    return list(zip(side.source.lengths.tolist(), side.target.lengths.tolist(), strict=True))


def test_a_device_that_is_not_there_is_one_clear_error(prepared: Prepared, tmp_path: Path) -> None:
    for name in ("gpu", "xpu"):
        with pytest.raises(MtkitError, match=f"no device '{name}' here"):
            train(tiny(), prepared, tmp_path, command=["mtkit"], device=name)


def test_segments_that_are_all_too_long_are_one_clear_error(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 200 have more than 2 pieces"):
        run(tiny(model={"max_length": 2}), prepared, tmp_path)


def test_segments_that_are_too_long_are_counted(prepared: Prepared, tmp_path: Path) -> None:
    longest = sorted(max(a, b) + 1 for a, b in lengths_of(prepared.valid))[-3]
    over = {
        name: sum(max(pair) + 1 > longest for pair in lengths_of(side))
        for name, side in (("train", prepared.train), ("valid", prepared.valid))
    }
    said: list[str] = []
    run(tiny(model={"max_length": longest}, training={"max_updates": 1}), prepared, tmp_path, say=said.append)
    assert Run(tmp_path).about["too_long"] == over
    assert f"{200 - over['train']} training segments" in " ".join(said)
    assert f"{over['valid']} validation segments are not in the validation loss" in " ".join(said)


def test_what_the_recipe_cannot_be_trained_with_leaves_no_folder(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="set max_updates, max_epochs, max_tokens, max_flops or max_minutes"):
        run(tiny(training={"schedule": "cosine", "max_updates": None}), prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_separate_vocabularies_are_trained_without_a_setting(tmp_path: Path) -> None:
    given = {"folder": tmp_path / "data", "builtin": {"train": 60, "valid": 4, "test": 4}}
    prepare(DataSettings.model_validate({**given, "tokenizer": {"vocabulary": 400, "joint": False}}))
    prepared, limit = open_prepared(tmp_path / "data"), {"max_updates": 1}
    for number in (1, 2):  # the second time it goes on
        run(tiny(training={"max_updates": number}), prepared, tmp_path / "run")
        assert Run(tmp_path / "run").recipe.model.tie == "decoder"
    run(tiny(model={"tie": "none"}, training=limit), prepared, tmp_path / "none")
    assert Run(tmp_path / "none").recipe.model.tie == "none"
    with pytest.raises(RecipeError, match=r"model\.tie = all needs one vocabulary for both sides"):
        run(tiny(model={"tie": "all"}, training=limit), prepared, tmp_path / "all")


def test_a_damaged_last_checkpoint_is_refused_with_the_way_out(prepared: Prepared, tmp_path: Path) -> None:
    recipe = tiny(training={"max_updates": 16})
    run(recipe, prepared, tmp_path)
    file = tmp_path / "checkpoints" / "update-00000016" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match=r"damaged.*remove .*update-00000016 and the same command resumes"):
        run(recipe, prepared, tmp_path)


def test_checkpoints_without_the_settings_they_were_trained_with_are_refused(
    prepared: Prepared, tmp_path: Path
) -> None:
    run(tiny(training={"max_updates": 8}), prepared, tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunError, match=r"no run\.json; put it back, choose another --name, or remove .*/checkpoints$"):
        run(tiny(training={"max_updates": 16, "peak_rate": 0.5}), prepared, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000008"]


@pytest.mark.parametrize("average_last", [0, 2])
def test_a_limit_before_the_first_update_is_one_clear_error(
    prepared: Prepared, tmp_path: Path, average_last: int
) -> None:
    recipe = tiny(training={"max_minutes": 1e-9, "average_last": average_last})
    with pytest.raises(RunError, match=r"max_minutes = 1e-09 was reached before the first update; raise that limit"):
        run(recipe, prepared, tmp_path)
    assert run(tiny(training={"max_updates": 1}), prepared, tmp_path).trained == 1


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "run.json", "recipe.yaml", "best.json", "tensorboard", "checkpoints", ".lock"],
)
def test_nothing_is_written_through_a_link_in_the_run_folder(prepared: Prepared, tmp_path: Path, name: str) -> None:
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    run(tiny(training={"max_updates": 1}), prepared, folder)
    (folder / name).rename(theirs) if (folder / name).exists() else theirs.write_text("")
    (folder / name).symlink_to(theirs)
    before = {path: path.is_file() and path.read_bytes() for path in [theirs, *theirs.rglob("*")]}
    with pytest.raises(MtkitError, match=f"run/{name} is a link, and mtkit writes only real files in .*run; replace"):
        run(tiny(training={"max_updates": 2}), prepared, folder)
    assert before == {path: path.is_file() and path.read_bytes() for path in [theirs, *theirs.rglob("*")]}


@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer/notes.txt", "metrics.jsonl"])
def test_files_of_the_user_that_are_named_like_those_of_a_run_stay(
    prepared: Prepared, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("# years of work\n")
    with pytest.raises(RunError, match=r"exists, but .* is not a run, as it has no run\.json; move .* away"):
        run(tiny(training={"max_updates": 1}), prepared, tmp_path)
    assert (tmp_path / name).read_text() == "# years of work\n"
    assert not (tmp_path / "checkpoints").exists()
