"""The folder of a comparison; it goes on where it was when it is opened again.

settings.json           what all mechanisms have in common, and the options of each
runs/longformer/        a run folder like any other: mtkit translate --run mtkit-compare/runs/longformer
results/longformer.json written last: with it the mechanism is done, or is known to fail
logs/longformer.log     what training and decoding had to say
compare.md, compare.json, compare.png, compare-speed.png
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.files import check_regular, inside, write_json
from mtkit.recipe import Recipe, differences, make_recipe
from mtkit.stored import Count, read_stored, stored

FORMAT = 1
"""Version of the folder's layout; a comparison of another one is refused."""

OUTPUTS = ("compare.md", "compare.json", "compare.png", "compare-speed.png")
"""Names of the files for people."""

OWN = {"attention", "promises"}
"""What the mechanisms of a comparison do not share, and what does not change it."""


@stored
class _Settings(TypedDict):
    """Content of settings.json: what all mechanisms have in common."""

    format: int
    recipe: dict[str, Any]
    data: str
    device: str
    threads: Count
    attentions: dict[str, dict[str, Any]]


@stored
class _Bleu(TypedDict):
    value: float
    low: float
    high: float
    signature: str


@stored
class _Training(TypedDict):
    updates: Count
    tokens_per_second: float
    precision: NotRequired[str]


@stored
class _Decoding(TypedDict):
    tokens_per_second: float
    segments_per_second: float


@stored
class _Scored(TypedDict):
    """Result of a mechanism that was trained and scored."""

    attention: str
    bleu: _Bleu
    doubt: NotRequired[str]
    side: str
    training: _Training
    decoding: _Decoding
    parameters: Count
    peak_bytes: Count


@stored
class _Failed(TypedDict):
    """Result of a mechanism that failed, with the reason."""

    attention: str
    failed: str


_RESULT: Any = _Failed | _Scored


class Folder:
    """A comparison's folder, and what is done in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str) -> Path:
        """The run folder of a mechanism."""
        return inside(self.path, "runs", name)

    @property
    def logs(self) -> Path:
        """The folder of the log files."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """The log file of a mechanism's process."""
        return inside(self.path, "logs", f"{name}.log")

    def outputs(self) -> list[Path]:
        """The files for people: a table, the same as JSON, and two pictures."""
        return [inside(self.path, name) for name in OUTPUTS]

    def open(self, entries: Mapping[str, Recipe], prepared: Prepared, *, device: str, threads: int) -> None:
        """Make the folder, or check that these mechanisms, on this data, belong to the comparison in it.

        Raises: MtkitError listing what differs.
        """
        attentions = {name: recipe.attention.options for name, recipe in entries.items()}
        common = next(iter(entries.values())).model_dump(mode="json", exclude=OWN)
        settings = {
            "format": FORMAT,
            "recipe": common,
            "data": prepared.fingerprint,
            "device": device,
            "threads": threads,
            "attentions": attentions,
        }
        if self._settings_path.exists():
            before = self.settings()
            changed = _changed(before, settings)
            if changed:
                raise MtkitError(
                    f"the comparison in {self.path} was started with other settings ({'; '.join(changed)}); "
                    "repeat them to resume it, or choose another --out"
                )
            settings["attentions"] = before["attentions"] | attentions
        elif foreign := [each for each in ("runs", "results", "logs", *OUTPUTS) if (self.path / each).exists()]:
            raise MtkitError(
                f"{self.path / foreign[0]} exists, and {self.path} is not the folder of a comparison: it has no "
                "settings.json; choose another --out"
            )
        self.outputs()  # a link among them is said before the work
        write_json(self._settings_path, settings)

    def settings(self) -> dict[str, Any]:
        """settings.json. Raises: MtkitError where it is damaged or of another version."""
        if self._settings_path.exists():
            check_regular(self.path)
        settings = read_stored(self._settings_path, _Settings, "choose another --out", version=FORMAT)
        recipe = make_recipe(settings["recipe"], origin=str(self._settings_path))
        return {**settings, "recipe": recipe.model_dump(mode="json", exclude=OWN)}

    def recipe(self, name: str) -> Recipe:
        """The whole recipe of a mechanism."""
        settings = self.settings()
        if name not in settings["attentions"]:
            raise MtkitError(f"{self._settings_path} has no mechanism {name}; choose another --out")
        attention = {"name": name, "options": settings["attentions"][name]}
        return make_recipe(settings["recipe"] | {"attention": attention}, origin=str(self._settings_path))

    def result(self, name: str) -> dict[str, Any] | None:
        """What a mechanism came to, or None where it is not done; a damaged file counts as not done."""
        path = self._result_path(name)
        return _read(path) if path.exists() else None

    def results(self) -> list[dict[str, Any]]:
        """Results of all mechanisms that are done or failed, with their options: best BLEU first, failures last."""
        found = (_read(path) for path in sorted((self.path / "results").glob("*.json")))
        options = self.settings()["attentions"] if self._settings_path.exists() else {}
        return sorted(
            ({**each, "options": options.get(each["attention"], {})} for each in found if each is not None),
            key=lambda each: -each["bleu"]["value"] if "bleu" in each else 1,
        )

    def keep(self, name: str, **result: Any) -> None:
        """Write the result of a mechanism."""
        write_json(self._result_path(name), {"attention": name, **result})

    def fail(self, name: str, reason: str) -> None:
        """Write why a mechanism has no score; it is tried again when the comparison is typed again."""
        self.keep(name, failed=" ".join(reason.split()))

    def forget(self, name: str) -> None:
        """Remove the result of a mechanism."""
        self._result_path(name).unlink(missing_ok=True)

    @property
    def _settings_path(self) -> Path:
        return inside(self.path, "settings.json")

    def _result_path(self, name: str) -> Path:
        return inside(self.path, "results", f"{name}.json")


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    there, here = ({**each, "recipe": {**each["recipe"], "data": None}} for each in (before, now))
    # mechanisms may be added; those of both keep their options
    there["attentions"] = {name: there["attentions"].get(name, here["attentions"][name]) for name in here["attentions"]}
    same_data = there.pop("data") == here.pop("data")
    changed = [line.removeprefix("recipe.") for line in differences(there, here)]
    return changed if same_data else [*changed, "the prepared data is another"]


def _read(path: Path) -> dict[str, Any] | None:
    """A result; None where it is damaged: it is made again."""
    try:
        return dict(read_stored(path, _RESULT, "it is made again"))
    except MtkitError:
        return None
