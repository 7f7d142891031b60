"""Checkpoints: one folder each, written atomically, checked by checksum when read, never executed.

checkpoints/update-00000500/model.safetensors       weights and buffers
                            optimizer.safetensors   moments and counts, by parameter name
                            ema.safetensors         the moving average of the weights, if there is one
                            state.json              `Progress`, and the checksums of the files above
checkpoints/average/        model.safetensors and state.json of the average of the last ones
checkpoints/base/           the same two files of the frozen weights, if there are any: other checkpoints lack them
best.json                   the checkpoint with the best validation score, among equals the lowest loss
"""

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, NotRequired

from torch import Tensor
from typing_extensions import TypedDict

from mtkit.errors import RunError
from mtkit.recipe.settings import BestBy
from mtkit.runs import BASE, checkpoint_folders
from mtkit.storage.files import (
    digest,
    inside,
    is_leftover,
    json_text,
    remove_leftover,
    write_json,
    write_tensors,
    writing,
)
from mtkit.storage.records import Count, read_stored, stored
from mtkit.storage.weights import PICKLES, check_sum, read_tensors
from mtkit.training.optimization.averaging import mean_weights
from mtkit.training.progress import Progress, sort_key

FORMAT = 1
"""Version of the layout; checkpoints of other versions are refused."""


@stored
class State(TypedDict):
    """The keys of state.json that all checkpoints share."""

    format: int
    sha256: dict[str, str]
    update: Count
    bleu: NotRequired[float | None]
    nll: NotRequired[float | None]
    best_by: NotRequired[BestBy]
    score: NotRequired[float | None]
    judged_by: NotRequired[str]
    averaged: NotRequired[list[Count]]
    tried: NotRequired[list[Count]]
    diverging: NotRequired[Count]


class Checkpoints:
    """The checkpoints of one run: the last one, the last few that were validated, and the best few."""

    def __init__(
        self, run: Path, *, keep_last: int, keep_best: int, fingerprint: str = "", best_by: BestBy = "bleu"
    ) -> None:
        """`fingerprint` identifies the settings of search and scoring; `best_by` is the measure of new scores."""
        self.folder = inside(run, "checkpoints")
        self.base = inside(self.folder, BASE)
        self._best = inside(run, "best.json")
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._fingerprint, self._best_by = fingerprint, best_by

    def save(self, progress: Progress, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
        """Write the checkpoint of an update and remove those not kept; `tensors` by file name without suffix.

        If the update has a checkpoint already, only its state is written: its weights are the same.
        """
        path = inside(self.folder, f"update-{progress.update:08d}")
        if path.is_dir():
            state = read_state(path)
            write_json(inside(path, "state.json"), state | asdict(progress))
        else:
            write_checkpoint(path, tensors, asdict(progress))
        self.mark_best()
        self._remove_old()
        return path

    def save_base(self, weights: Mapping[str, Tensor]) -> None:
        """Write the frozen weights, if there are any, before the first checkpoint."""
        if weights:
            write_checkpoint(self.base, {"model": weights}, {"update": 0})

    def all(self) -> list[Path]:
        """Return the checkpoint folders in order of their updates. Raises: MtkitError if one is a link."""
        return [inside(self.folder, path.name) for path in checkpoint_folders(self.folder.parent)]

    def last(self) -> Path | None:
        """Return the latest checkpoint, from which training resumes; None without one."""
        paths = self.all()
        return paths[-1] if paths else None

    def last_good(self) -> Path | None:
        """Return the latest checkpoint from before any divergence; None without one."""
        return next((path for path in reversed(self.all()) if not read_state(path).get("diverging")), None)

    @property
    def validated(self) -> bool:
        """Whether the last checkpoint was validated, with any settings."""
        return self.last() in self._validated()

    def is_averaged(self, count: int) -> bool:
        """Return whether the average of the last `count` validated checkpoints exists, scored with these settings."""
        average = self.folder / "average"
        state = read_state(average) if average.is_dir() else None
        if state is None or state.get("judged_by") != self._fingerprint:
            return False
        return state.get("tried", state.get("averaged")) == _updates(self._validated()[-count:])

    def mean_of_last(self, count: int, parameters: Collection[str]) -> tuple[dict[str, Tensor], list[int]]:
        """Average the weights of the last `count` validated checkpoints, or moving averages; also return their updates.

        `parameters` names the weights; other tensors are the last checkpoint's. Checkpoints written after a signal do
        not count, so an interrupted run has the same result.
        """
        last = self._validated()[-count:]
        weights = (verified_tensors(path, "ema" if (path / "ema.safetensors").exists() else "model") for path in last)
        return mean_weights(weights, parameters), _updates(last)

    def save_average(
        self, weights: Mapping[str, Tensor], *, updates: list[int], bleu: float, nll: float, score: float
    ) -> bool:
        """Write the average of these updates' checkpoints; it can become the best checkpoint.

        A better average from before a limit was raised stays, and records that this one was tried. Return whether the
        new one was written.
        """
        average = inside(self.folder, "average")
        known = read_state(average) if average.is_dir() else None
        if known is not None and known.get("judged_by") == self._fingerprint:
            earlier, loss = known.get("score"), known.get("nll")
            if earlier is not None and loss is not None:
                earlier_key = sort_key(known.get("best_by", "bleu"), earlier, loss)
                if earlier_key > sort_key(self._best_by, score, nll):
                    write_json(inside(average, "state.json"), {**known, "tried": updates})
                    return False
        state = {"update": updates[-1], "averaged": updates, "bleu": bleu, "nll": nll, "score": score}
        state |= {"best_by": self._best_by, "judged_by": self._fingerprint}
        write_checkpoint(average, {"model": weights}, state)
        self.mark_best()
        return True

    def mark_best(self) -> None:
        """Point best.json at the checkpoint with the best score, the average included.

        Among equal scores the lowest loss is best, and among equal losses the earliest update.
        """
        average = inside(self.folder, "average")
        ranked = self._ranked(self.all() + ([average] if average.is_dir() else []))
        if ranked:
            state = read_state(ranked[0])
            write_json(self._best, {"checkpoint": ranked[0].name, state.get("best_by", "bleu"): state["score"]})

    def clean(self) -> None:
        """Remove incomplete and superfluous folders of a killed process, and update best.json.

        Without a checkpoint the run starts again, so best.json and the frozen weights are removed too.
        """
        for path in self.folder.glob(".*"):
            written = re.match(r"\.(average|base|update-[0-9]+)\.", path.name)
            if written and is_leftover(path, self.folder / written[1]):
                remove_leftover(path, self.folder / written[1])
            elif re.fullmatch(r"\.update-[0-9]+\.old", path.name) and _has_only_checkpoint_files(path):
                shutil.rmtree(path, ignore_errors=True)
        for folder in self.all():
            for path in folder.glob(".state.json.*.tmp"):
                if is_leftover(path, folder / "state.json"):
                    remove_leftover(path, folder / "state.json")
        if self.last() is None:
            self._best.unlink(missing_ok=True)
            if _has_only_checkpoint_files(self.base):
                shutil.rmtree(self.base)
        self.mark_best()
        self._remove_old()

    def _validated(self) -> list[Path]:
        return [path for path in self.all() if read_state(path).get("bleu") is not None]

    def _ranked(self, paths: list[Path]) -> list[Path]:
        """Return the paths with a score, best first; if some have scores of the present settings, only those."""
        comparable, others = self._scored(paths)
        return comparable or others

    def _scored(self, paths: list[Path]) -> tuple[list[Path], list[Path]]:
        """Return the paths with a score of the present settings, best first, and those with one of other settings."""
        states = [(read_state(path), path) for path in paths]
        scored = [
            (sort_key(state.get("best_by", "bleu"), score, nll), path, state)
            for state, path in states
            if (score := state.get("score")) is not None and (nll := state.get("nll")) is not None
        ]
        ranked = sorted(scored, key=itemgetter(0), reverse=True)
        present = [entry[2].get("judged_by") == self._fingerprint for entry in ranked]
        pairs = list(zip(ranked, present, strict=True))
        return [path for (_, path, _), now in pairs if now], [path for (_, path, _), now in pairs if not now]

    def _remove_old(self) -> None:
        paths = self.all()
        keep = {*paths[-1:], *self._validated()[-self._keep_last :], self.last_good()}
        comparable, others = self._scored(paths)  # others stay until as many are comparable
        keep |= set([*comparable, *others][: self._keep_best])
        for path in paths:
            if path not in keep:
                # renamed first, so that no incomplete checkpoint has a valid name; `clean` removes what remains, such
                # as files that are open on a network file system
                old = path.rename(path.with_name(f".{path.name}.old"))
                shutil.rmtree(old, ignore_errors=True)


def _has_only_checkpoint_files(path: Path) -> bool:
    """Return whether the path is a folder with only files of a checkpoint, not necessarily all, and NFS's open ones."""
    files = {"state.json", *(f"{name}.safetensors" for name in ("model", "optimizer", "ema"))}
    if path.is_symlink() or not path.is_dir():
        return False
    return all(file.name in files or file.name.startswith(".nfs") for file in path.iterdir())


def _updates(paths: Sequence[Path]) -> list[int]:
    """Return the updates of checkpoint folders."""
    return [int(path.name.partition("-")[2]) for path in paths]


def write_checkpoint(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write a checkpoint folder: safetensors files, and a state.json with their checksums.

    Raises: MtkitError if the disk is full or the folder cannot be written; no files remain then.
    """
    with writing(path) as temporary:
        temporary.mkdir()
        checksums = {}
        for name, content in tensors.items():
            file = temporary / f"{name}.safetensors"
            write_tensors(file, _without_sharing(content))
            checksums[file.name] = digest(file)
        text = json_text({"format": FORMAT, **state, "sha256": checksums}, indent=2)
        (temporary / "state.json").write_text(text + "\n", encoding="utf-8")


def read_state(path: Path) -> State:
    """Return the state of a checkpoint folder. Raises: RunError if it is missing, damaged or of another version."""
    if not (path / "state.json").exists():
        raise RunError(f"{path} is not a checkpoint of mtkit: it has no state.json; {_remedy(path)}")
    return read_stored(path / "state.json", State, _remedy(path), error=RunError, version=FORMAT)


def read_progress(path: Path) -> Progress:
    """Return the progress when the checkpoint was written. Raises: RunError."""
    state, file = read_state(path), path / "state.json"
    missing = [name for name in Progress.__dataclass_fields__ if name not in state]
    if missing:
        raise RunError(f"{file} is damaged ({missing[0]} is missing); {_remedy(path)}")
    progress = read_stored(file, Progress, _remedy(path), error=RunError)
    if path.name != f"update-{progress.update:08d}":
        raise RunError(f"{file} is damaged (update = {progress.update}); {_remedy(path)}")
    return progress


def verified_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of one file of a checkpoint, on the CPU, checked against its checksum.

    Raises: RunError if the file is missing, truncated, altered or a pickle.
    """
    file = path / f"{name}.safetensors"
    read_state(path)
    check_sum(file, _remedy(path))
    has_pickles = any(other.suffix in PICKLES for other in path.iterdir())
    if not file.is_file() and not has_pickles:  # `read_tensors` has an error for pickles
        raise RunError(f"{file} is missing; {_remedy(path)}")
    # copied from the mapped file, which may be removed during training
    return {key: value.clone() for key, value in read_tensors(file).items()}


def _without_sharing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared memory, as safetensors requires: tied weights are written under each name."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        shared = tensor.data_ptr() in seen and tensor.numel() > 0
        seen.add(tensor.data_ptr())
        copies[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return copies


def _remedy(path: Path) -> str:
    if path.name == BASE:  # all checkpoints need it
        return f"copy {path} again if the run was copied, or train under another --name"
    return f"remove {path} and the same command resumes from the checkpoint before it"
