import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.experiments.entries import entries
from mtkit.experiments.folder import Folder
from mtkit.experiments.report import table
from mtkit.recipe import Recipe
from tests.damage import check_damages
from tests.experiments.results import result

Tiny = Callable[..., Recipe]
Opened = Callable[..., Folder]


def test_it_gives_back_each_recipe_and_takes_more_names(tiny: Tiny, opened: Opened) -> None:
    recipe = tiny(attention={"options": {"window_radius": 3}})
    opened(recipe, "longformer")
    folder = opened(recipe, "full")
    for name, each in entries(recipe, ["longformer", "full"]).items():
        assert folder.recipe(name) == each


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"training": {"max_updates": 3}}, "training.max_updates: 2 -> 3"),
        ({"seed": 5}, "seed: 1 -> 5"),
        ({"decoding": {"method": "beam"}}, "decoding.method: greedy -> beam"),
        ({"attention": {"options": {"window_radius": 5}}}, "window_radius: None -> 5"),
    ],
)
def test_other_settings_are_refused(tiny: Tiny, opened: Opened, changed: dict[str, object], words: str) -> None:
    folder = opened(tiny(), "longformer")
    before = folder.settings()
    with pytest.raises(MtkitError, match=words) as raised:
        opened(tiny(**changed), "longformer", "full")
    assert "another --out" in str(raised.value)
    assert folder.settings() == before


def test_other_data_and_hardware_are_refused(tiny: Tiny, opened: Opened, prepared: Prepared) -> None:
    folder = opened(tiny(), "full")
    chosen = entries(tiny(), ["full"])
    other = dataclasses.replace(prepared, record=prepared.record | {"fingerprint": "other"})
    with pytest.raises(MtkitError, match="prepared data differs"):
        folder.open(chosen, other, device="cpu", threads=1)
    with pytest.raises(MtkitError, match="threads: 1 -> 2"):
        folder.open(chosen, prepared, device="cpu", threads=2)


def test_moved_data_is_the_same_data(tiny: Tiny, opened: Opened, prepared: Prepared) -> None:
    folder = opened(tiny(), "full")
    moved = entries(tiny(data={"folder": "elsewhere"}), ["full"])
    folder.open(moved, prepared, device="cpu", threads=1)
    assert folder.recipe("full").data.folder == Path("elsewhere")


def test_results_come_in_the_order_of_the_table(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.fail("broken", "two\nlines")
    for name, bleu in (("worse", 0.0), ("best", 90.0), ("good", 80.0)):
        folder.keep(name, **{key: value for key, value in result(name, bleu).items() if key != "attention"})
    assert [each["attention"] for each in folder.results()] == ["best", "good", "worse", "broken"]
    assert folder.result("broken") == {"attention": "broken", "failed": "two lines"}
    folder.forget("best")
    assert folder.result("best") is None


def test_damaged_files(tiny: Tiny, opened: Opened, tmp_path: Path) -> None:
    folder = opened(tiny(), "full")
    folder.fail("full", "why")
    (tmp_path / "out" / "results" / "full.json").write_text('{"attention": "fu')
    assert folder.result("full") is None
    assert folder.results() == []
    (tmp_path / "out" / "settings.json").write_text("{")
    with pytest.raises(MtkitError, match=r"settings\.json is damaged"):
        opened(tiny(), "full")


def test_damaged_settings_are_named_and_damaged_results_are_made_again(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(), "full", "band")
    folder.keep("full", **{key: value for key, value in result("full", 20.0).items() if key != "attention"})

    def use() -> None:
        settings = folder.settings()
        assert table(settings, folder.results())
        assert folder.recipe("full")

    kept = {"data", "model", "training", "decoding", "scoring"}
    assert check_damages(folder.path / "settings.json", use, whole_keys=kept) > 30
    path = folder.path / "results" / "full.json"
    for content in (b"\xff", b"[]", b'{"attention": "full"}', path.read_bytes().replace(b"20.0", b'"x"')):
        path.write_bytes(content)
        assert folder.result("full") is None
        use()


def test_files_of_the_user_stay(tiny: Tiny, prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "compare.md").write_text("words")
    folder, chosen = Folder(tmp_path), entries(tiny(), ["full"])
    with pytest.raises(MtkitError, match=r"compare\.md exists, but .* is not the folder of a comparison"):
        folder.open(chosen, prepared, device="cpu", threads=1)
    (tmp_path / "compare.md").rename(tmp_path / "theirs")
    (tmp_path / "logs").symlink_to(tmp_path)
    with pytest.raises(MtkitError, match="logs is a link, and mtkit writes only real files"):
        folder.log("full")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["logs", "theirs"]
