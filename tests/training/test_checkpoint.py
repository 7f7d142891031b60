import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from mtkit.errors import MtkitError, RunError
from mtkit.recipe.settings import BestBy
from mtkit.storage.weights import load_weights
from mtkit.training.checkpoint import (
    Checkpoints,
    read_progress,
    read_state,
    verified_tensors,
)
from mtkit.training.progress import Progress
from tests.damage import check_damages


def save(checkpoints: Checkpoints, update: int, bleu: float | None = None, nll: float = 1.0) -> Path:
    tensors = {"model": {"w": torch.full((3,), float(update))}}
    return checkpoints.save(Progress(update=update, bleu=bleu, nll=None if bleu is None else nll, score=bleu), tensors)


def kept(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name[-8:]) for path in checkpoints.all()]


def test_a_checkpoint_gives_back_exactly_what_was_saved(tmp_path: Path) -> None:
    progress = Progress(
        update=7, epoch=2, batch=5, seconds=1 / 3, training_seconds=1 / 7, tokens=99, validated=7, bleu=0.1,
        nll=1 / 9, score=0.2, best_score=0.3, best_nll=0.7,
        patience_score=0.25, best_by="exact", stale=4, baseline=(-0.1, 1 / 7), scaler={"scale": 2.0},
    )  # fmt: skip
    tensors = {"model": {"w": torch.randn(4, 3), "n": torch.tensor(3)}, "optimizer": {"m/w": torch.randn(4, 3).t()}}
    path = Checkpoints(tmp_path, keep_last=1, keep_best=1).save(progress, tensors)
    assert read_progress(path) == progress
    for name, content in tensors.items():
        found = verified_tensors(path, name)
        assert found.keys() == content.keys()
        assert all(torch.equal(found[key], content[key]) for key in content)


def test_tied_weights_are_saved_and_stay_tied(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    model["two"].weight = model["one"].weight
    path = Checkpoints(tmp_path, keep_last=1, keep_best=1).save(Progress(update=1), {"model": model.state_dict()})
    wanted = model["one"].weight.detach().clone()
    nn.init.zeros_(model["one"].weight)
    load_weights(model, verified_tensors(path, "model"), path)
    assert torch.equal(model["two"].weight, wanted)
    assert model["two"].weight is model["one"].weight


def test_the_last_few_and_the_best_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    for update, bleu in [(1, 5.0), (2, 30.0), (3, 7.0), (4, 31.0), (5, 30.0), (6, None), (7, 1.0)]:
        save(checkpoints, update, bleu)
    assert kept(checkpoints) == [2, 4, 5, 7]  # a signal left 6, and 7 is further
    assert json.loads((tmp_path / "best.json").read_text()) == {"checkpoint": "update-00000004", "bleu": 31.0}
    assert checkpoints.last() == tmp_path / "checkpoints" / "update-00000007"
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_copy_of_a_checkpoint_with_another_name_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    path = save(checkpoints, 2, bleu=9.0)
    for name in ("update-00000002-backup", "update-2", "update-new"):
        shutil.copytree(path, checkpoints.folder / name)
    assert checkpoints.last() == path
    save(checkpoints, 3, bleu=1.0)
    assert kept(checkpoints) == [2, 3]
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "update-00000002"
    assert len(list(checkpoints.folder.iterdir())) == 5


def test_the_last_checkpoint_before_a_divergence_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    for update, diverging in [(1, 0), (2, 0), (3, 4), (4, 9), (5, 14)]:
        progress = Progress(update=update, bleu=0.0, nll=1.0, score=float(update), diverging=diverging)
        checkpoints.save(progress, {"model": {"w": torch.zeros(1)}})
    assert kept(checkpoints) == [2, 5]
    assert checkpoints.last_good() == checkpoints.folder / "update-00000002"
    save(checkpoints, 6, bleu=6.0)
    assert kept(checkpoints) == [6]


def test_of_equal_bleu_the_lowest_loss_is_the_best_and_of_equal_losses_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    for update, nll in enumerate([9.0, 5.0, 3.0, 4.0, 3.0, 6.0, 9.0], start=1):
        save(checkpoints, update, bleu=0.0, nll=nll)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "update-00000003"
    assert kept(checkpoints) == [3, 5, 6, 7]
    checkpoints.save_average({"w": torch.ones(3)}, updates=[6, 7], bleu=0.0, nll=2.0, score=0.0)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "average"


def test_what_a_kill_left_too_many_goes_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    monkeypatch.setattr(checkpoints, "_remove_old", lambda: None)  # a kill comes before it
    for update in (1, 2, 3, 4):
        save(checkpoints, update, bleu=float(update))
    again = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    again.clean()
    assert kept(again) == [3, 4]


@pytest.mark.parametrize(("best_by", "best"), [("bleu", 3), ("chrf", 3), ("exact", 3), ("loss", 2), ("ter", 2)])
def test_the_best_checkpoint_has_the_highest_score_or_the_lowest_loss_or_ter(
    tmp_path: Path, best_by: BestBy, best: int
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1, best_by=best_by)
    for update, score in [(1, 5.0), (2, 4.0), (3, 6.0), (4, 5.5)]:
        progress = Progress(update=update, bleu=1.0, nll=1.0, best_by=best_by, score=score)
        checkpoints.save(progress, {"model": {"w": torch.zeros(1)}})
    told = {"checkpoint": f"update-{best:08d}", best_by: {2: 4.0, 3: 6.0}[best]}
    assert json.loads((tmp_path / "best.json").read_text()) == told
    assert kept(checkpoints) == [best, 4]
    checkpoints.save_average({"w": torch.ones(1)}, updates=[4], bleu=0.0, nll=9.0, score={2: 3.9, 3: 6.1}[best])
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "average"


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep_last=2, keep_best=1), 1)
    assert not (tmp_path / "best.json").exists()


def test_saving_an_update_again_changes_its_state_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    path = save(checkpoints, 1)
    before = (path / "model.safetensors").stat().st_ino
    save(checkpoints, 1, bleu=3.0)
    assert read_progress(path).bleu == 3.0
    assert (path / "model.safetensors").stat().st_ino == before
    assert verified_tensors(path, "model")["w"][0] == 1.0


def test_the_average_is_the_mean_and_can_be_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_best=1)
    for update in (1, 2, 6):
        save(checkpoints, update, bleu=float(update))
    assert not checkpoints.is_averaged(2)
    weights, updates = checkpoints.mean_of_last(2, {"w"})
    assert updates == [2, 6]
    assert torch.equal(weights["w"], torch.full((3,), 4.0))
    checkpoints.save_average(weights, updates=updates, bleu=9.0, nll=1.0, score=9.0)
    assert [checkpoints.is_averaged(count) for count in (1, 2, 3)] == [False, True, False]
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "average"


def test_a_worse_average_does_not_replace_a_better_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=4, keep_best=1)
    for update, bleu in ((1, 30.0), (2, 38.0), (3, 39.0), (4, 39.5)):
        save(checkpoints, update, bleu=bleu)
        if update == 2:
            better = {"updates": [1, 2], "bleu": 40.5, "nll": 1.0, "score": 40.5}
            assert checkpoints.save_average({"w": torch.ones(3)}, **better)
    assert not checkpoints.is_averaged(2)
    assert not checkpoints.save_average({"w": torch.zeros(3)}, updates=[3, 4], bleu=39.0, nll=1.0, score=39.0)
    assert checkpoints.is_averaged(2)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "average"
    assert verified_tensors(tmp_path / "checkpoints" / "average", "model")["w"][0] == 1.0
    assert checkpoints.save_average({"w": torch.zeros(3)}, updates=[3, 4], bleu=41.0, nll=1.0, score=41.0)


def test_the_best_of_other_settings_stays_until_others_are_scored(tmp_path: Path) -> None:
    for update, bleu, settings in ((1, 30.0, "old"), (2, 20.0, "old"), (3, 21.0, "new"), (4, 22.0, "new")):
        checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=2, fingerprint=settings)
        progress = Progress(update=update, bleu=bleu, nll=1.0, score=bleu, judged_by=settings)
        checkpoints.save(progress, {"model": {"w": torch.zeros(1)}})
        assert kept(checkpoints) == {1: [1], 2: [1, 2], 3: [1, 3], 4: [3, 4]}[update]


def test_the_average_is_of_moving_averages_if_there_are_any(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for update in (1, 2):
        tensors = {name: {"w": torch.full((3,), value * update)} for name, value in (("model", 1.0), ("ema", 10.0))}
        checkpoints.save(Progress(update=update, bleu=1.0, nll=1.0, score=1.0), tensors)
    assert checkpoints.mean_of_last(2, {"w"})[0]["w"].tolist() == [15.0] * 3


def test_scores_of_other_settings_do_not_make_a_checkpoint_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1, fingerprint="new")
    for update, bleu, settings in ((1, 90.0, "old"), (2, 5.0, "new"), (3, 4.0, "new"), (4, 3.0, "new")):
        progress = Progress(update=update, bleu=bleu, nll=1.0, score=bleu, judged_by=settings)
        checkpoints.save(progress, {"model": {"w": torch.zeros(1)}})
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "update-00000002"
    assert kept(checkpoints) == [2, 4]


def test_what_a_signal_left_is_gone_on_from_and_counts_for_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for update, bleu in ((1, 9.0), (2, 1.0), (3, None), (4, 2.0), (5, None), (6, None)):
        save(checkpoints, update, bleu=bleu)
        last = checkpoints.last()
        assert last is not None
        assert last.name == f"update-{update:08d}"
    assert kept(checkpoints) == [1, 2, 4, 6]
    assert checkpoints.mean_of_last(2, {"w"})[1] == [2, 4]


def test_cleaning_puts_back_an_average_whose_successor_never_came_and_finds_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    save(checkpoints, 1, bleu=1.0)
    checkpoints.save_average({"w": torch.ones(3)}, updates=[1], bleu=9.0, nll=1.0, score=9.0)
    left = tmp_path / "checkpoints" / ".average.0123456789abcdef.tmp"
    left.mkdir()
    (left / "average.lock").touch()
    (tmp_path / "checkpoints" / "average").rename(left / "average.replaced")
    (tmp_path / "best.json").unlink()
    checkpoints.clean()
    assert checkpoints.is_averaged(1)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "average"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_file_that_may_not_grow_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    save(checkpoints, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(MtkitError, match=r"File too large.*; raise the limit of file sizes \(ulimit -f\)") as error:
            checkpoints.save(Progress(update=2), {"model": {"w": torch.zeros(10_000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["update-00000001"]


def test_what_a_killed_process_left_is_cleaned_up(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    path = save(checkpoints, 1)
    half = checkpoints.folder / ".update-00000002.0123456789abcdef.tmp"
    half.mkdir()
    (half / "update-00000002.lock").touch()
    (half / "model.safetensors").write_bytes(b"half")
    removed = checkpoints.folder / ".update-00000003.old"
    removed.mkdir()
    (removed / "model.safetensors").write_bytes(b"half")
    (checkpoints.folder / ".mine").touch()
    for name in (".update-00000004.old", ".update-00000004.0123456789abcdef.tmp", "base"):
        (checkpoints.folder / name).mkdir()
        (checkpoints.folder / name / "mine").touch()
    state = path / ".state.json.0123456789abcdef.tmp"
    state.mkdir()
    (state / "state.json.lock").touch()
    (state / "state.json").write_text("half")
    checkpoints.clean()
    assert sorted(each.name for each in path.iterdir()) == ["model.safetensors", "state.json"]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        ".mine",
        ".update-00000004.0123456789abcdef.tmp",
        ".update-00000004.old",
        "base",
        "update-00000001",
    ]


def test_a_file_that_cannot_be_removed_yet_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    save(checkpoints, 1)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        save(checkpoints, 2)
        checkpoints.clean()
    assert kept(checkpoints) == [2]
    (checkpoints.folder / ".update-00000001.old" / ".nfs0001").touch()
    checkpoints.clean()
    assert not (checkpoints.folder / ".update-00000001.old").exists()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(Checkpoints(tmp_path, keep_last=1, keep_best=1), 1)


def refusal(path: Path) -> str:
    with pytest.raises(RunError) as error:  # noqa: PT012 (what is damaged decides which of the two notices)
        read_progress(path)
        verified_tensors(path, "model")
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_truncated_file_is_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert "damaged" in refusal(saved)


def test_one_altered_bit_is_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert "checksum" in refusal(saved)


def test_a_checksum_that_is_missing_is_refused(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    del state["sha256"]["model.safetensors"]
    (saved / "state.json").write_text(json.dumps(state))
    assert "checksum" in refusal(saved)


def test_a_pickle_in_place_of_weights_is_refused_by_name(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(3)}, saved / "model.pt")
    assert "model.pt" in refusal(saved)
    assert "pickle" in refusal(saved)


def test_another_format_version_is_refused(saved: Path) -> None:
    state = read_state(saved)
    (saved / "state.json").write_text(json.dumps(state | {"format": 99}))
    assert "format 99" in refusal(saved)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "baseline": 3}'])
def test_a_foreign_state_is_refused(saved: Path, content: str) -> None:
    (saved / "state.json").write_text(content)
    assert "damaged" in refusal(saved)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_missing_file_is_refused_with_the_way_out(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refused = refusal(saved)
    assert name in refused
    assert refused.endswith(f"remove {saved} and the same command resumes from the checkpoint before it")


def test_damaged_states_are_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    path = save(checkpoints, 1, bleu=3.0)

    def use() -> None:
        assert read_progress(path).update == 1
        checkpoints.mark_best()

    assert check_damages(path / "state.json", use) > 60


@pytest.mark.parametrize("name", ["update-00000001", "average", "base", "../best.json"])
def test_no_checkpoint_is_written_through_a_broken_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / name).symlink_to(tmp_path / "new")

    def work() -> None:
        checkpoints = Checkpoints(tmp_path / "run", keep_last=1, keep_best=1)
        save(checkpoints, 1, bleu=1.0)
        checkpoints.save_average({"w": torch.ones(3)}, updates=[1], bleu=9.0, nll=1.0)

    with pytest.raises(MtkitError, match="is a link, and mtkit writes only real files"):
        work()
    assert not (tmp_path / "new").exists()
