"""Checkpoints: a folder for each, written whole or not at all, checked when read, and never run.

checkpoints/update-00000500/model.safetensors       weights and buffers
                            optimizer.safetensors   moments and counts, by parameter name
                            ema.safetensors         the moving average of the weights, where there is one
                            state.json              the place in training, and the checksums of the files above
checkpoints/average/        model.safetensors and state.json of the average of the last ones
checkpoints/base/           the same two of the weights that are not trained, where there are any: the others lack them
best.json                   the checkpoint with the best validation score, of equals with the lowest loss
"""

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NotRequired

from torch import Tensor
from typing_extensions import TypedDict

from mtkit.errors import RunError
from mtkit.recipe.settings import BestBy
from mtkit.runs import BASE
from mtkit.storage.files import clear, digest, inside, is_left_of, json_text, write_json, write_tensors, writing
from mtkit.storage.records import Count, read_stored, stored
from mtkit.storage.weights import PICKLES, check_sum, read_tensors
from mtkit.training.optimizer import mean_weights
from mtkit.training.progress import LATER, Progress, rank

FORMAT = 1
"""Raised when the layout of a checkpoint changes so that older ones cannot be read."""


@stored
class State(TypedDict):
    """state.json, as far as all checkpoints have it."""

    format: int
    sha256: dict[str, str]
    update: Count
    bleu: NotRequired[float | None]
    nll: NotRequired[float | None]
    best_by: NotRequired[BestBy]
    score: NotRequired[float | None]
    best_bleu: NotRequired[float | None]
    judged_by: NotRequired[str]
    averaged: NotRequired[list[Count]]
    diverging: NotRequired[Count]


class Checkpoints:
    """The checkpoints of one run: the last one, the last few that were validated, and the best few."""

    def __init__(
        self, run: Path, *, keep_last: int, keep_best: int, judged_by: str = "", best_by: BestBy = "bleu"
    ) -> None:
        """`judged_by` is the fingerprint of the settings that new scores are made by; `best_by` is their measure."""
        self.folder = inside(run, "checkpoints")
        self.base = inside(self.folder, BASE)
        self._best = inside(run, "best.json")
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._judged_by, self._best_by = judged_by, best_by

    def save(self, progress: Progress, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path:
        """Write the checkpoint of an update and let go of those not kept; `tensors` by file name without suffix.

        Where the update has its checkpoint already, only its state is written: its weights are the same.
        """
        path = inside(self.folder, f"update-{progress.update:08d}")
        if path.is_dir():
            state = read_state(path)
            write_json(inside(path, "state.json"), state | asdict(progress))
        else:
            write_checkpoint(path, tensors, asdict(progress))
        self.mark_best()
        self._let_go()
        return path

    def save_base(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights that are not trained, before the first checkpoint; nothing where there are none."""
        if weights:
            write_checkpoint(self.base, {"model": weights}, {"update": 0})

    def all(self) -> list[Path]:
        """The checkpoint folders in order of their updates. Raises: MtkitError if one is a link."""
        return sorted(inside(self.folder, path.name) for path in self.folder.glob("update-*") if path.is_dir())

    def last(self) -> Path | None:
        """The latest checkpoint, from which training resumes; None without one."""
        every = self.all()
        return every[-1] if every else None

    def last_good(self) -> Path | None:
        """The latest checkpoint that no divergence had reached; None without one."""
        return next((path for path in reversed(self.all()) if not read_state(path).get("diverging")), None)

    @property
    def validated(self) -> bool:
        """Whether the last one was validated, by whatever settings."""
        return self.last() in self._validated()

    def is_averaged(self, count: int) -> bool:
        """Whether the last `count` validated checkpoints were averaged, and the average judged as is done now."""
        average = self.folder / "average"
        state = read_state(average) if average.is_dir() else None
        if state is None or state.get("judged_by") != self._judged_by:
            return False
        wanted = _updates(self._validated()[-count:])
        # earlier versions kept the last update alone
        return state["update"] == wanted[-1] and state.get("averaged", wanted) == wanted

    def mean_of_last(self, count: int, parameters: Collection[str]) -> tuple[dict[str, Tensor], list[int]]:
        """The mean of the weights of the last `count` validated checkpoints, averaged ones where kept; their updates.

        `parameters` names the weights; all else is the last one's. Checkpoints that a signal left do not count: a run
        that was interrupted comes to what it would have come to.
        """
        last = self._validated()[-count:]
        files = ["ema" if (path / "ema.safetensors").exists() else "model" for path in last]
        mean = mean_weights((verified_tensors(path, file) for path, file in zip(last, files, strict=True)), parameters)
        return mean, _updates(last)

    def save_average(
        self, weights: Mapping[str, Tensor], *, updates: list[int], bleu: float, nll: float, score: float
    ) -> None:
        """Write the average of the checkpoints of these updates; with the best score it is the best checkpoint."""
        state = {"update": updates[-1], "averaged": updates, "bleu": bleu, "nll": nll, "score": score}
        state |= {"best_by": self._best_by, "judged_by": self._judged_by}
        write_checkpoint(inside(self.folder, "average"), {"model": weights}, state)
        self.mark_best()

    def mark_best(self) -> None:
        """Point best.json at the checkpoint with the best score, the average among them.

        Of equals it is the one with the lowest loss, and of these the earliest.
        """
        average = inside(self.folder, "average")
        ranked = self._ranked(self.all() + ([average] if average.is_dir() else []))
        if ranked:
            state = read_state(ranked[0])
            write_json(self._best, {"checkpoint": ranked[0].name, state.get("best_by", "bleu"): _score(state)})

    def clean(self) -> None:
        """Remove what a killed process left half-written, half-removed or too many, and see that the best is known.

        Without a checkpoint the run begins anew, so best.json and the frozen weights of an earlier one go too.
        """
        for path in self.folder.glob(".*"):
            written = re.match(r"\.(average|base|update-[0-9]+)\.", path.name)
            if written and is_left_of(path, self.folder / written[1]):
                clear(path, self.folder / written[1])
            elif re.fullmatch(r"\.update-[0-9]+\.old", path.name) and _is_own(path):
                shutil.rmtree(path)
        for folder in self.all():
            for path in folder.glob(".state.json.*.tmp"):
                if is_left_of(path, folder / "state.json"):
                    clear(path, folder / "state.json")
        if self.last() is None:
            self._best.unlink(missing_ok=True)
            if _is_own(self.base):
                shutil.rmtree(self.base)
        self.mark_best()
        self._let_go()

    def _validated(self) -> list[Path]:
        return [path for path in self.all() if read_state(path).get("bleu") is not None]

    def _ranked(self, paths: list[Path]) -> list[Path]:
        """Those with a score, the best first; where some are judged as is done now, those alone."""
        states = [(read_state(path), path) for path in paths]
        scored = [
            (rank(state.get("best_by", "bleu"), score, state.get("nll")), path, state)
            for state, path in states
            if (score := _score(state)) is not None
        ]
        alike = [each for each in scored if each[2].get("judged_by") == self._judged_by]
        return [path for _, path, _ in sorted(alike or scored, key=itemgetter(0), reverse=True)]

    def _let_go(self) -> None:
        every = self.all()
        kept = {*every[-1:], *self._validated()[-self._keep_last :], self.last_good()}
        kept |= set(self._ranked(every)[: self._keep_best])
        for path in every:
            if path not in kept:
                # renamed first: a kill in between leaves no half of a checkpoint under its name
                doomed = path.rename(path.with_name(f".{path.name}.old"))
                shutil.rmtree(doomed)


def _is_own(path: Path) -> bool:
    """Whether the path is a folder with nothing but the files of a checkpoint, or what is left of them."""
    files = {"state.json", *(f"{name}.safetensors" for name in ("model", "optimizer", "ema"))}
    return path.is_dir() and not path.is_symlink() and {each.name for each in path.iterdir()} <= files


def _updates(paths: Sequence[Path]) -> list[int]:
    """The updates of checkpoint folders."""
    return [int(path.name.partition("-")[2]) for path in paths]


def _score(state: State) -> float | None:
    """The validation score of a checkpoint; earlier versions kept only BLEU."""
    return state["score"] if "score" in state else state.get("bleu")


def write_checkpoint(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write a checkpoint folder: safetensors files, and a state.json with their checksums.

    Raises: MtkitError where the disk is full or the place cannot be written; nothing of it then stays.
    """
    with writing(path) as temporary:
        temporary.mkdir()
        checksums = {}
        for name, content in tensors.items():
            file = temporary / f"{name}.safetensors"
            write_tensors(file, _apart(content))
            checksums[file.name] = digest(file)
        text = json_text({"format": FORMAT, **state, "sha256": checksums}, indent=2)
        (temporary / "state.json").write_text(text + "\n", encoding="utf-8")


def read_state(path: Path) -> State:
    """The state of a checkpoint folder. Raises: RunError where it is missing, damaged or of another version."""
    if not (path / "state.json").exists():
        raise RunError(f"{path} is not a checkpoint of mtkit: it has no state.json; {_way_out(path)}")
    return read_stored(path / "state.json", State, _way_out(path), error=RunError, version=FORMAT)


def read_progress(path: Path) -> Progress:
    """Where training stood when the checkpoint was written. Raises: RunError."""
    state, file = read_state(path), path / "state.json"
    missing = [name for name in Progress.__dataclass_fields__ if name not in state.keys() | LATER]
    if missing:
        raise RunError(f"{file} is damaged ({missing[0]} is missing); {_way_out(path)}")
    progress = read_stored(file, Progress, _way_out(path), error=RunError)
    if path.name != f"update-{progress.update:08d}":
        raise RunError(f"{file} is damaged (update = {progress.update}); {_way_out(path)}")
    if "score" not in state:
        best = state.get("best_bleu")
        progress = replace(progress, score=progress.bleu, best_score=best, patience_score=best)
    return progress if "training_seconds" in state else replace(progress, training_seconds=progress.seconds)


def verified_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, on the CPU, checked against its checksum.

    Raises: RunError where the file is missing, truncated, altered or a pickle.
    """
    file = path / f"{name}.safetensors"
    read_state(path)
    check_sum(file, _way_out(path))
    if not file.is_file() and not any(each.suffix in PICKLES for each in path.iterdir()):  # which have their own error
        raise RunError(f"{file} is missing; {_way_out(path)}")
    # copied out of the mapped file, which may be removed while training goes on
    return {key: value.clone() for key, value in read_tensors(file).items()}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without shared memory, as safetensors wants them: tied weights are written under each name."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        shared = tensor.data_ptr() in seen and tensor.numel() > 0
        seen.add(tensor.data_ptr())
        apart[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return apart


def _way_out(path: Path) -> str:
    if path.name == BASE:  # all checkpoints need it
        return f"copy {path} again if the run was copied, or train under another --name"
    return f"remove {path} and the same command resumes from the checkpoint before it"
