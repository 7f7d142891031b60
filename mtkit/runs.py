"""Run folders: the results of one training, and everything that translation needs. A run folder can be moved.

recipe.yaml          all settings, resolved
run.json             versions, commands, vocabulary sizes, directions, lengths of the training pairs, other packages
                     whose mechanisms the model uses, word vectors that the embeddings began with, and precision and
                     FLOPs per token if they were measured
tokenizer/           sentencepiece models
checkpoints/         update-00001000/ with model.safetensors, ...; average/ if checkpoints were averaged; base/ with the
                     weights that are not trained, if there are any
best.json            name of the best checkpoint
lexicon.safetensors  translations of source pieces, if `translate --shortlist` has learned them
ctranslate2/         checkpoints in CTranslate2's format, if `translate` has converted them
metrics.jsonl, curves.png, translations/
"""

import re
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
from mtkit.errors import RecipeError, RunError, check_utf8, did_you_mean, shown
from mtkit.recipe import Recipe, make_recipe
from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import RUNS, run_folder_of
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, read_stored, stored
from mtkit.storage.weights import check_sum, load_weights, read_tensors
from mtkit.terminal import acts
from mtkit.text.languages import languages_of

if TYPE_CHECKING:
    from torch import Tensor

    from mtkit.model.network import Network
    from mtkit.text.tokenizer import Tokenizers

BASE = "base"
"""Folder of the weights that are not trained, next to the checkpoints."""

FORMAT = 1
"""Version of the folder's layout; runs of other versions are refused."""

Vocabulary = Annotated[int, Field(ge=8, lt=2**31)]
"""Vocabulary size of a tokenizer."""


class Vocabularies(TypedDict):
    """Vocabulary sizes of both tokenizers."""

    source: Vocabulary
    target: Vocabulary


class Origin(TypedDict):
    """A run whose weights initialised a run, directly or through other runs."""

    run: str
    imported_from: str | None
    """Model of another library from which the run was made."""
    data: list[str]
    """Training data, as `mtkit.training.run_folder.trained_on` returns it."""


@stored
class Embedded(TypedDict):
    """A table of embeddings that began with word vectors (`mtkit.model.initial_embeddings.InitialEmbeddings`)."""

    side: Literal["source", "target", "both"]
    file: str
    vectors: Count
    pieces: Count
    words: Count
    parts: Count
    scale: float


@stored
class About(TypedDict):
    """Content of run.json."""

    format: int
    vocabularies: Vocabularies
    tokenizer: NotRequired[str]
    """`Run.vocabulary` when the training began; imported runs have none."""
    data: NotRequired[str]
    directions: NotRequired[list[str]]
    document_pieces: NotRequired[int | None]
    lengths: NotRequired[dict[str, Lengths]]
    init_from: NotRequired[str | None]
    origins: NotRequired[list[Origin]]
    imported_from: NotRequired[str]
    commands: NotRequired[list[str]]
    precision: NotRequired[Literal["float32", "bfloat16", "float16"]]
    kernels: NotRequired[bool]
    graphs: NotRequired[bool]
    flops_per_token: NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    packages: NotRequired[dict[str, str]]
    embeddings: NotRequired[list[Embedded]]


@stored
class Best(TypedDict):
    """Content of best.json."""

    checkpoint: Annotated[str, StringConstraints(pattern=r"^(average|update-[0-9]+)$")]


@dataclass(frozen=True)
class Run:
    """The folder of one training: recipe, tokenizers and checkpoints."""

    folder: Path

    @cached_property
    def about(self) -> About:
        """Content of run.json.

        Raises: RunError if it is missing, damaged or of another version; MtkitError if the folder has a pipe or a
        device.
        """
        if (self.folder / "run.json").exists():
            check_regular(self.folder)
        return read_stored(
            self.folder / "run.json", About, "choose another --run, or train again", error=RunError, version=FORMAT
        )

    @cached_property
    def recipe(self) -> Recipe:
        """Settings of the training. Raises: RunError if the file is missing, empty or damaged; RecipeError."""
        path, advice = self.folder / "recipe.yaml", "copy the run again, or choose another --run"
        try:
            settings = read_settings(path)
        except RecipeError as error:
            raise RunError(f"{error}; {advice}") from error
        if not settings:
            raise RunError(f"{path} is empty; {advice}")  # all settings would be defaults
        return make_recipe(settings, origin=str(path))  # its environment variables are already expanded

    @cached_property
    def tokenizers(self) -> "Tokenizers":
        """The run's tokenizers. Raises: DataError if they are damaged, RunError if they are another model's."""
        from mtkit.text.tokenizer import Tokenizers

        tokenizers = Tokenizers.load(self.folder / "tokenizer", "copy the run again, or choose another --run")
        vocabulary = self.vocabulary
        sizes = {"source": tokenizers.source.size, "target": tokenizers.target.size}
        if self.about["vocabularies"] != sizes or self.about.get("tokenizer", vocabulary) != vocabulary:
            raise RunError(
                f"the tokenizer in {self.folder} is not the one it was trained with; put that one back, or choose "
                "another --run"
            )
        return tokenizers

    @property
    def directions(self) -> list[str]:
        """Translation directions, e.g. `en-de`; most runs have one."""
        return self.about.get("directions") or self.recipe.data.directions

    @property
    def target_language(self) -> str | None:
        """Target language; None if the run has several directions."""
        first, *others = self.directions
        return None if others else languages_of(first)[1]

    @property
    def document_pieces(self) -> int | None:
        """Maximum source pieces of joined lines of a document; None if the run was trained on single segments."""
        documents = self.recipe.data.documents
        return self.about.get("document_pieces", documents.pieces if documents else None)

    @property
    def lengths(self) -> list[Lengths] | None:
        """Lengths of the training pairs by direction; None for imported runs.

        Raises: RunError if a direction is missing.
        """
        by_direction = self.about.get("lengths")
        if by_direction is None:
            return None
        if missing := [direction for direction in self.directions if direction not in by_direction]:
            raise RunError(f"{self.folder / 'run.json'} has no lengths of {missing[0]}; choose another --run")
        return [by_direction[direction] for direction in self.directions]

    @cached_property
    def vocabulary(self) -> str:
        """Fingerprint of the tokenizers, when first read: another training may replace the run's files."""
        from mtkit.data.vocabulary import vocabulary_of

        return vocabulary_of(self.folder / "tokenizer")

    def check_packages(self) -> None:
        """Check that the other packages whose mechanisms the model uses are installed.

        Raises: RunError for the first package that is not installed; MtkitError if it cannot be loaded.
        """
        from mtkit.attention.registry import GROUP

        for name, package in self.about.get("packages", {}).items():
            if not entry_points(group=GROUP, name=name):
                raise RunError(
                    f"{self.folder} uses attention '{name}' of the package {package}, which is not installed here; "
                    "install it if you trust it"
                )

    def checkpoint(self, which: str = "best") -> Path:
        """Return a checkpoint's folder; `which` is "best", "last", "average", or a name such as "update-00001000".

        Raises: RunError if the run has no such checkpoint.
        """
        folder = self.folder / "checkpoints"
        if which == "best":
            best, advice = self.folder / "best.json", "remove that file, and the last checkpoint counts as the best"
            which = read_stored(best, Best, advice, error=RunError)["checkpoint"] if best.exists() else "last"
        # listed after best.json is read: a running training adds checkpoints
        names = [path.name for path in checkpoint_folders(self.folder)]
        if which == "last":
            which = names[-1] if names else "last"
        if which not in names and not (which == "average" and (folder / which).is_dir()):
            known = ", ".join(names) or "none yet; train first"
            hint = did_you_mean(which, ["best", "last", *names] if names else [])
            raise RunError(f"{self.folder} has no checkpoint {shown(which)}{hint}; it has: {known}")
        return folder / which

    def load_model(self, checkpoint: str = "best", device: str = "cpu") -> "Network":
        """Load the trained model in evaluation mode, with the moving average of its weights if there is one.

        Raises: RunError for a missing or damaged checkpoint.
        """
        import torch

        from mtkit.model.build import build_model

        self.check_packages()
        sizes = self.about["vocabularies"]
        # cached products compare version counters, which tensors made in inference mode do not have
        with torch.inference_mode(False):
            model = build_model(
                self.recipe,
                source_vocabulary=sizes["source"],
                target_vocabulary=sizes["target"],
                tasks=len(self.directions),
                drawn=False,
            )
            load_weights(model, self.tensors(checkpoint), self.weights(checkpoint))
            return model.to(device).eval()

    def tensors(self, checkpoint: str = "best") -> "dict[str, Tensor]":
        """Read all weights of a model, with adapters merged, and check the files' checksums if state.json exists.

        Raises: as `load_model`.
        """
        file = self.weights(checkpoint)
        try:
            return self._tensors(file)
        except (RunError, FileNotFoundError):
            if file.parent.exists() or self.checkpoint(checkpoint) == file.parent:
                raise
        return self._tensors(self.weights(checkpoint))  # a running training has removed what was the best or last one

    def _tensors(self, weights: Path) -> "dict[str, Tensor]":
        base = self.folder / "checkpoints" / BASE / "model.safetensors"
        advice = "copy it again, choose another --checkpoint, or train again"
        check_sum(weights, advice)
        tensors = read_tensors(weights)
        if base.exists():
            check_sum(base, advice)
            tensors = {**read_tensors(base), **tensors}
        elif self.recipe.training.lora is not None or self.recipe.training.freeze:
            raise RunError(f"{base} is missing, which holds the weights that were not trained; {advice}")
        if self.recipe.training.lora is None:
            return tensors
        from mtkit.model.adaptation import merged_weights

        return merged_weights(tensors, self.recipe.training.lora)

    def weights(self, checkpoint: str = "best") -> Path:
        """Return the file of trained weights that `load_model` reads."""
        folder = self.checkpoint(checkpoint)
        average = folder / "ema.safetensors"
        return average if average.exists() else folder / "model.safetensors"


def run_folder(name: str) -> Path:
    """Return the folder of the run with this name.

    Raises: RunError for a name that is not a single folder, or on which a terminal would act.
    """
    if name in ("", "..") or Path(name).name != name:
        raise RunError(f"--name {shown(name)}: a run's name is one folder under {RUNS}, without slashes")
    if acts(name):
        raise RunError(f"--name {shown(name)} has a line end or a control character; leave it out")
    return RUNS / name


def find_run(folder: Path | None = None, name: str | None = None) -> Run:
    """Find the run in `folder`, else the run of this name in ./mtkit-runs, else the latest run there.

    Raises: RunError if there is none, with the command to type, and if both are given; MtkitError for a name that is
    not UTF-8.
    """
    if folder is not None:
        if name is not None:
            raise RunError(f"--run {folder} and --name {name} name one run each; leave one of them out")
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
    check_utf8(str(run.folder))
    assert run.about
    return run


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the checkpoints of a run in order of their updates; a user's copy, of another name, is not one."""
    folders = (run / "checkpoints").glob("update-*")
    return sorted(path for path in folders if re.fullmatch(r"update-[0-9]{8,}", path.name) and path.is_dir())


def can_resume(folder: Path) -> bool:
    """Return whether the folder has a run to resume: one with a checkpoint."""
    return (folder / "run.json").exists() and bool(checkpoint_folders(folder))


def resumable_folder(name: str | None) -> Path | None:
    """Return the folder of the run with this name if it can be resumed. Raises: RunError as `run_folder`."""
    folder = None if name is None else run_folder(name)
    return folder if folder is not None and can_resume(folder) else None


def initial_run(named: Path | None, folder: Path) -> Run | None:
    """Find the run, by folder or name, that initialises the training in `folder`; None without one.

    Raises: RunError as `find_run`, unless the training has begun and does not need the run any more.
    """
    if named is None:
        return None
    if can_resume(folder):
        return Run(run_folder_of(named))
    return named_run(named)


def named_run(named: Path) -> Run:
    """Find a run by its folder or by its name in ./mtkit-runs. Raises: RunError as `find_run`."""
    return find_run(named) if run_folder_of(named) == named else find_run(name=str(named))


def find_runs(folders: Sequence[Path] | None = None, names: Sequence[str] | None = None) -> list[Run]:
    """Find runs by folder, then by name; without any, the latest run. Raises: RunError as `find_run`."""
    return [*map(find_run, folders or ()), *(find_run(name=name) for name in names or ())] or [find_run()]


def _latest(manifests: list[Path]) -> Path:
    """Return the folder of the run with the newest checkpoint or run.json."""

    def modified(manifest: Path) -> int:
        times = [manifest.stat().st_mtime_ns]
        for checkpoint in manifest.parent.glob("checkpoints/[!.]*"):
            with suppress(FileNotFoundError):  # a running training has removed it
                times.append(checkpoint.stat().st_mtime_ns)
        return max(times)

    return max(manifests, key=modified).parent
