"""Run folders: what one training leaves behind, and all that translation needs. A run folder can be moved.

recipe.yaml          every setting, resolved
run.json             versions, the exact command, sizes of the vocabularies, directions, lengths of the training pairs,
                     the other packages whose mechanisms the model uses, and the precision where it was chosen by
                     measuring
tokenizer/           the sentencepiece models
checkpoints/         update-00001000/ with model.safetensors, ...; average/ where checkpoints were averaged; base/ with
                     the weights that are not trained, where there are any
best.json            which checkpoint translates best
lexicon.safetensors  which pieces translate which, where `translate --shortlist` has learned it
ctranslate2/         checkpoints in CTranslate2's format, where `translate` has converted them
metrics.jsonl, curves.png, translations/
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from mtkit.data.lengths import Lengths
from mtkit.errors import RunError, did_you_mean, shown
from mtkit.recipe import Recipe, make_recipe
from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import RUNS, run_folder_of
from mtkit.storage.files import check_regular
from mtkit.storage.records import read_stored, stored
from mtkit.storage.weights import check_sum, load_weights, read_tensors
from mtkit.text.languages import languages_of

if TYPE_CHECKING:
    from torch import Tensor

    from mtkit.model.network import Network
    from mtkit.text.tokenizer import Tokenizers

BASE = "base"
"""The folder beside the checkpoints that holds the weights that are not trained."""

FORMAT = 1
"""Version of the folder's layout; a run of another one is refused."""

Vocabulary = Annotated[int, Field(ge=8, lt=2**31)]
"""Vocabulary size of a tokenizer."""


class Vocabularies(TypedDict):
    """Vocabulary sizes of both tokenizers."""

    source: Vocabulary
    target: Vocabulary


class Origin(TypedDict):
    """A run that a training began with, or that such a run began with itself."""

    run: str
    """Name."""
    imported_from: str | None
    """Model of another library that the run was made of."""
    data: list[str]
    """Training data, as `mtkit.training.run_folder.trained_on` returns it."""


@stored
class About(TypedDict):
    """Content of run.json: how the run was made."""

    format: int
    vocabularies: Vocabularies
    data: NotRequired[str]
    directions: NotRequired[list[str]]
    document_pieces: NotRequired[int | None]
    lengths: NotRequired[dict[str, Lengths]]
    init_from: NotRequired[str | None]
    origins: NotRequired[list[Origin]]
    imported_from: NotRequired[str]
    commands: NotRequired[list[str]]
    precision: NotRequired[Literal["float32", "bfloat16"]]
    packages: NotRequired[dict[str, str]]


@stored
class Best(TypedDict):
    """Content of best.json: the name of the best checkpoint."""

    checkpoint: Annotated[str, StringConstraints(pattern=r"^(average|update-[0-9]+)$")]


@dataclass(frozen=True)
class Run:
    """The folder of one training: recipe, tokenizers and checkpoints."""

    folder: Path

    @cached_property
    def about(self) -> About:
        """Content of run.json.

        Raises: RunError where it is missing, damaged or of another version; MtkitError where the folder holds a pipe or
        a device.
        """
        if (self.folder / "run.json").exists():
            check_regular(self.folder)
        return read_stored(
            self.folder / "run.json",
            About,
            "choose another --run, or train again",
            error=RunError,
            version=FORMAT,
        )

    @cached_property
    def recipe(self) -> Recipe:
        """The settings that the run was trained with."""
        path = self.folder / "recipe.yaml"
        return make_recipe(read_settings(path), origin=str(path))  # its variables were filled in when it was written

    @cached_property
    def tokenizers(self) -> "Tokenizers":
        """The run's own tokenizers. Raises: DataError for damaged ones, RunError for those of another model."""
        from mtkit.text.tokenizer import Tokenizers

        found = Tokenizers.load(self.folder / "tokenizer")
        if self.about["vocabularies"] != {"source": found.source.size, "target": found.target.size}:
            raise RunError(f"the tokenizer in {self.folder} is not the one it was trained with; choose another --run")
        return found

    @property
    def directions(self) -> list[str]:
        """The translation directions that it was trained on, as en-de; most runs have one."""
        return self.about.get("directions") or self.recipe.data.directions

    @property
    def target_language(self) -> str | None:
        """The language that it translates into; None where it was trained on several directions."""
        first, *others = self.directions
        return None if others else languages_of(first)[1]

    @property
    def document_pieces(self) -> int | None:
        """Source pieces that lines of a document may have together; None where it was trained on single segments."""
        documents = self.recipe.data.documents
        return self.about.get("document_pieces", documents.pieces if documents else None)

    @property
    def lengths(self) -> list[Lengths] | None:
        """The lengths of the training pairs of each direction; None where an earlier version did not keep them.

        Raises: RunError where those of a direction are missing.
        """
        kept = self.about.get("lengths")
        if kept is None:
            return None
        if missing := [each for each in self.directions if each not in kept]:
            raise RunError(f"{self.folder / 'run.json'} has no lengths of {missing[0]}; choose another --run")
        return [kept[direction] for direction in self.directions]

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the tokenizers."""
        from mtkit.data.borrowed import vocabulary_of

        return vocabulary_of(self.folder / "tokenizer")

    def check_packages(self) -> None:
        """Check that the other packages whose mechanisms the model uses are here.

        Raises: RunError that names the first package that is not installed; MtkitError if it cannot be loaded.
        """
        from mtkit.attention.registry import GROUP

        for name, package in self.about.get("packages", {}).items():
            if not entry_points(group=GROUP, name=name):
                raise RunError(
                    f"{self.folder} uses attention '{name}' of the package {package}, which is not installed here; "
                    "install it if you trust it"
                )

    def checkpoint(self, which: str = "best") -> Path:
        """The folder of the checkpoint "best", "last", "average", or one by its name, "update-00001000".

        Raises: RunError where the run has none such.
        """
        folder = self.folder / "checkpoints"
        if which == "best":
            best, advice = self.folder / "best.json", "use --checkpoint last"
            which = read_stored(best, Best, advice, error=RunError)["checkpoint"] if best.exists() else "last"
        there = sorted(each.name for each in folder.glob("update-*") if each.is_dir())  # a training may add to them
        if which == "last":
            which = there[-1] if there else "last"
        if which not in there and not (which == "average" and (folder / which).is_dir()):
            known = ", ".join(there) or "none yet; train first"
            raise RunError(f"{self.folder} has no checkpoint {shown(which)}; it has: {known}")
        return folder / which

    def load_model(self, checkpoint: str = "best", device: str = "cpu") -> "Network":
        """The trained model in evaluation mode: the moving average of its weights where one was kept.

        Raises: RunError for a missing or damaged checkpoint.
        """
        import torch

        from mtkit.model.build import build_model

        self.check_packages()
        sizes = self.about["vocabularies"]
        # weights made in inference mode have no count of their changes, which kept products are compared by
        with torch.inference_mode(False):
            model = build_model(
                self.recipe,
                source_vocabulary=sizes["source"],
                target_vocabulary=sizes["target"],
                tasks=len(self.directions),
            )
            load_weights(model, self.tensors(checkpoint), self.weights(checkpoint))
            return model.to(device).eval()

    def tensors(self, checkpoint: str = "best") -> "dict[str, Tensor]":
        """What `load_model` takes: all weights, adapters merged into those that they adapt. Raises: as `load_model`.

        Files are checked against their checksums in state.json, if there is one.
        """
        base, weights = self.folder / "checkpoints" / BASE / "model.safetensors", self.weights(checkpoint)
        advice = "copy it again, choose another --checkpoint, or train again"
        check_sum(weights, advice)
        tensors = read_tensors(weights)
        if base.exists():
            check_sum(base, advice)
            tensors = {**read_tensors(base), **tensors}
        if self.recipe.training.lora is None:
            return tensors
        from mtkit.model.adaptation import merged_weights

        return merged_weights(tensors, self.recipe.training.lora)

    def weights(self, checkpoint: str = "best") -> Path:
        """The file with the weights that `load_model` takes: those that were trained."""
        folder = self.checkpoint(checkpoint)
        averaged = folder / "ema.safetensors"
        return averaged if averaged.exists() else folder / "model.safetensors"


def run_folder(name: str) -> Path:
    """The folder of the run of this name. Raises: RunError for a name that is no single folder."""
    if name in ("", "..") or Path(name).name != name:
        raise RunError(f"--name {shown(name)}: a run's name is one folder under {RUNS}, without slashes")
    return RUNS / name


def find_run(folder: Path | None = None, name: str | None = None) -> Run:
    """The run in `folder`, or of that name under ./mtkit-runs, or the latest one there.

    Raises: RunError where there is none, saying what to type.
    """
    if folder is not None:
        if not folder.is_dir():
            raise RunError(f"no run folder {folder}; train one with `mtkit train`, or give another --run")
        run = Run(folder)
    else:
        runs = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
        if not runs:
            raise RunError(f"no run under {RUNS}; train one first with `mtkit train`, or name its folder with --run")
        names = [path.parent.name for path in runs]
        if name is not None and name not in names:
            hint = did_you_mean(name, names)
            raise RunError(f"no run {shown(name)} under {RUNS}{hint}; there are: {', '.join(names)}")
        run = Run(RUNS / name) if name is not None else Run(_latest(runs))
    assert run.about
    return run


def is_begun(folder: Path) -> bool:
    """Whether there is a run to go on with: one that has a checkpoint."""
    return (folder / "run.json").exists() and any((folder / "checkpoints").glob("update-*"))


def begun_folder(name: str | None) -> Path | None:
    """The folder of the run of this name, where there is one to go on with. Raises: RunError as `run_folder`."""
    folder = None if name is None else run_folder(name)
    return folder if folder is not None and is_begun(folder) else None


def beginning(named: Path | None, folder: Path) -> Run | None:
    """The run that the training in `folder` begins with, by its folder or name; None without one.

    Raises: RunError as `find_run`, unless that training has begun. It does not need the other run any more.
    """
    if named is None:
        return None
    if is_begun(folder):
        return Run(run_folder_of(named))
    return named_run(named)


def named_run(named: Path) -> Run:
    """The run that is given by its folder, or by its name under ./mtkit-runs. Raises: RunError as `find_run`."""
    return find_run(named) if run_folder_of(named) == named else find_run(name=str(named))


def find_runs(folders: Sequence[Path] | None = None, names: Sequence[str] | None = None) -> list[Run]:
    """The runs in these folders and then those of these names; without any, the latest one.

    Raises: RunError as `find_run`.
    """
    return [*map(find_run, folders or ()), *(find_run(name=each) for each in names or ())] or [find_run()]


def _latest(manifests: list[Path]) -> Path:
    """The run whose last checkpoint, or else beginning, is the youngest."""

    def age(manifest: Path) -> int:
        ages = [manifest.stat().st_mtime_ns]
        for each in manifest.parent.glob("checkpoints/[!.]*"):
            with suppress(FileNotFoundError):  # a training at work has let go of it
                ages.append(each.stat().st_mtime_ns)
        return max(ages)

    return max(manifests, key=age).parent
