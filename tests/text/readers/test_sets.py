from pathlib import Path
from typing import Any

import datasets
import pytest

from mtkit.errors import DataError
from mtkit.text.readers import Repairs
from mtkit.text.readers.sets import dataset_rows

PAIRS = [{"translation": {"de": f"Zeile {number}", "en": f"line {number}"}, "id": number} for number in range(2_500)]
COLUMNS = ["translation.en", "translation.de", "id"]
ROWS = [(number, [f"line {number - 1}", f"Zeile {number - 1}", number - 1]) for number in range(1, 2_501)]


@pytest.fixture(scope="module")
def pairs() -> datasets.Dataset:
    return datasets.Dataset.from_list(PAIRS)


def read(name: str, split: str = "train", subset: str | None = None, *, streaming: bool = False) -> list[Any]:
    return list(dataset_rows(name, subset, split, COLUMNS, Repairs(), streaming=streaming))


def test_a_saved_folder_is_read_split_by_split(tmp_path: Path, pairs: datasets.Dataset) -> None:
    splits = {"train": pairs, "test": pairs.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert read(str(tmp_path / "saved")) == ROWS
    assert read(str(tmp_path / "saved"), "test") == ROWS[:3]
    with pytest.raises(DataError, match="no split 'valid'; there is train, test"):
        read(str(tmp_path / "saved"), "valid")


def test_a_saved_set_without_splits_answers_to_its_own_name(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.save_to_disk(str(tmp_path / "saved"))
    assert read(str(tmp_path / "saved")) == ROWS


def test_a_view_of_rows_is_read_as_it_stands(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.select([5, 1]).save_to_disk(str(tmp_path / "saved"))
    assert [cells for _, cells in read(str(tmp_path / "saved"))] == [ROWS[5][1], ROWS[1][1]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_of_the_hub_is_asked_for_as_the_corpus_says(
    monkeypatch: pytest.MonkeyPatch, pairs: datasets.Dataset, streaming: bool
) -> None:
    asked = []

    def load_dataset(*given: Any, **options: Any) -> Any:
        asked.append((given, options))
        return pairs.to_iterable_dataset(num_shards=3) if options["streaming"] else pairs

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("wmt14", "test", "de-en", streaming=streaming) == ROWS
    assert asked == [(("wmt14", "de-en"), {"split": "test", "streaming": streaming})]


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*given: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach 'wmt14'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"wmt14, subset de-en, split train: cannot load it \(Couldn't") as raised:
        read("wmt14", subset="de-en")
    assert "\n" not in str(raised.value)


def test_a_network_that_fails_on_the_way_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield PAIRS[0]
        raise ConnectionError("gone")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    with pytest.raises(DataError, match=r"data set wmt14 train: reading failed \(.*gone"):
        read("wmt14", streaming=True)


def test_a_folder_that_holds_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder that datasets\.save_to_disk did not write"):
        read(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot read the saved data set"):
        read(str(tmp_path))


def test_an_unknown_column_is_named_with_those_there_are(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"no column fr; there is translation\.de, translation\.en, id"):
        list(dataset_rows(str(tmp_path / "saved"), None, "train", ["fr"], Repairs(), streaming=False))
