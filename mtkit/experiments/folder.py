"""The folder of a comparison, which can be resumed.

settings.json           settings of all mechanisms, and the options of each
runs/longformer/        a run folder like any other: mtkit translate --run mtkit-compare/runs/longformer
results/longformer.json written last: the mechanism's scores, or the reason why it failed
logs/longformer.log     output of training and decoding
compare.md, compare.json, compare.png, compare-speed.png
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.recipe import Recipe, differences, make_recipe
from mtkit.storage.files import check_regular, inside, write_json
from mtkit.storage.records import Count, read_stored, stored

FORMAT = 1
"""Version of the folder's layout; other versions raise an error."""

OUTPUTS = ("compare.md", "compare.json", "compare.png", "compare-speed.png")
"""Names of the output files."""

OWN = {"attention", "promises"}
"""Recipe sections that are not common to all mechanisms, or do not affect the comparison."""


@stored
class _Settings(TypedDict):
    """Content of settings.json: the settings of all mechanisms."""

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
    """The folder of a comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str) -> Path:
        """Return the run folder of a mechanism."""
        return inside(self.path, "runs", name)

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Return the log file of a mechanism's process."""
        return inside(self.path, "logs", f"{name}.log")

    def outputs(self) -> list[Path]:
        """Return the paths of the output files: a table, the same as JSON, and two plots."""
        return [inside(self.path, name) for name in OUTPUTS]

    def open(self, entries: Mapping[str, Recipe], prepared: Prepared, *, device: str, threads: int) -> None:
        """Make the folder, or check that its comparison has the same settings and data; mechanisms may be added.

        Raises: MtkitError with the settings that differ.
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
            previous = self.settings()
            changed = _changed(previous, settings)
            if changed:
                raise MtkitError(
                    f"the comparison in {self.path} was started with other settings ({'; '.join(changed)}); "
                    "use the same settings to resume it, or choose another --out"
                )
            settings["attentions"] = previous["attentions"] | attentions
        elif foreign := [each for each in ("runs", "results", "logs", *OUTPUTS) if (self.path / each).exists()]:
            raise MtkitError(
                f"{self.path / foreign[0]} exists, but {self.path} is not the folder of a comparison: it has no "
                "settings.json; choose another --out"
            )
        self.outputs()  # raises for a link before any work is done
        write_json(self._settings_path, settings)

    def settings(self) -> dict[str, Any]:
        """Read settings.json. Raises: MtkitError if it is damaged or has another version."""
        if self._settings_path.exists():
            check_regular(self.path)
        settings = read_stored(self._settings_path, _Settings, "choose another --out", version=FORMAT)
        recipe = make_recipe(settings["recipe"], origin=str(self._settings_path))
        return {**settings, "recipe": recipe.model_dump(mode="json", exclude=OWN)}

    def recipe(self, name: str) -> Recipe:
        """Return the complete recipe of a mechanism."""
        settings = self.settings()
        if name not in settings["attentions"]:
            raise MtkitError(f"{self._settings_path} has no mechanism {name}; choose another --out")
        attention = {"name": name, "options": settings["attentions"][name]}
        return make_recipe(settings["recipe"] | {"attention": attention}, origin=str(self._settings_path))

    def result(self, name: str) -> dict[str, Any] | None:
        """Read the result of a mechanism; None if there is none or its file is damaged."""
        path = self._result_path(name)
        return _read(path) if path.exists() else None

    def results(self) -> list[dict[str, Any]]:
        """Return all results, including failures, with the mechanisms' options: best BLEU first, failures last."""
        loaded = (_read(path) for path in sorted((self.path / "results").glob("*.json")))
        options = self.settings()["attentions"] if self._settings_path.exists() else {}
        return sorted(
            ({**result, "options": options.get(result["attention"], {})} for result in loaded if result is not None),
            key=lambda result: -result["bleu"]["value"] if "bleu" in result else 1,
        )

    def keep(self, name: str, **result: Any) -> None:
        """Write the result of a mechanism."""
        write_json(self._result_path(name), {"attention": name, **result})

    def fail(self, name: str, reason: str) -> None:
        """Write why a mechanism failed; the next run of the comparison tries it again."""
        self.keep(name, failed=" ".join(reason.split()))

    def forget(self, name: str) -> None:
        """Remove the result of a mechanism."""
        self._result_path(name).unlink(missing_ok=True)

    @property
    def _settings_path(self) -> Path:
        return inside(self.path, "settings.json")

    def _result_path(self, name: str) -> Path:
        return inside(self.path, "results", f"{name}.json")


def _changed(previous: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = ({**settings, "recipe": {**settings["recipe"], "data": None}} for settings in (previous, now))
    # mechanisms may be added; the options of the others must be the same
    old["attentions"] = {name: old["attentions"].get(name, new["attentions"][name]) for name in new["attentions"]}
    same_data = old.pop("data") == new.pop("data")
    changed = [line.removeprefix("recipe.") for line in differences(old, new)]
    return changed if same_data else [*changed, "the prepared data differs"]


def _read(path: Path) -> dict[str, Any] | None:
    """Read a result; None if it is damaged, so that it is computed again."""
    try:
        return dict(read_stored(path, _RESULT, "it is computed again"))
    except MtkitError:
        return None
