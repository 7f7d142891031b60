"""Two preparations of one folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mtkit.data import prepare as module
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, MtkitError
from mtkit.recipe.data import DataSettings, Grammar


def settings(folder: Path, seed: int) -> DataSettings:
    return DataSettings(folder=folder, builtin=Grammar(seed=seed, train=60, valid=4, test=4))


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_later_of_two_at_once_is_refused(tmp_path: Path, overwrite: bool) -> None:
    refused = list[str]()

    def progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
        with pytest.raises(MtkitError) as caught:
            prepare(settings(tmp_path / "data", seed=2), overwrite=overwrite)
        refused.append(str(caught.value))
        return items

    prepare(settings(tmp_path / "data", seed=1), progress=progress)
    assert set(refused) == {
        f"another process is preparing {tmp_path / 'data'}; wait for it, or give another folder with --data"
    }
    assert open_prepared(tmp_path / "data").settings.builtin.seed == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_another_process_has_just_prepared_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the look for data and the lock."""
    check = module.check_contents

    def late(*given: Any) -> None:
        monkeypatch.setattr(module, "check_contents", check)
        prepare(settings(tmp_path / "data", seed=2))

    monkeypatch.setattr(module, "check_contents", late)
    with pytest.raises(DataError, match=r"has just prepared .*; run the command again"):
        prepare(settings(tmp_path / "data", seed=1))
    assert open_prepared(tmp_path / "data").settings.builtin.seed == 2
