"""Scores of segments that other programs compute, such as COMET: read them, or run `comet-score`.

A system's score is the mean of its segments' scores. Intervals, paired tests and scores by source length are computed
from the segments, as for the other metrics.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic_core import from_json
from sacrebleu.metrics.base import Score as SacrebleuScore
from sacrebleu.metrics.base import Signature

from mtkit.errors import DataError, MtkitError, first_line, shown
from mtkit.evaluation.metrics import ALL_METRICS, CountedMetric
from mtkit.evaluation.scores import MEAN
from mtkit.evaluation.statistics import Numbers, Statistics
from mtkit.evaluation.systems import SystemTexts, Translated
from mtkit.terminal import stderr_is_terminal
from mtkit.text.text_files import Lines

COMET = "COMET"

DEFAULT_MODEL = "Unbabel/wmt22-comet-da"
"""The model of `comet-score`, named so that it is the same in all versions of the command."""


class _MeanSignature(Signature):  # type: ignore[misc]
    """Signature of a metric that sacrebleu does not compute: without sacrebleu's version and number of references."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        by_sacrebleu = {"bs": args["n_bootstrap"], "ar": None, "seed": args["seed"], "version": None}
        self.info: dict[str, Any] = {**args["about"], MEAN[0]: MEAN[1], **by_sacrebleu}


class SegmentMean(CountedMetric):
    """Mean of segment scores as a sacrebleu metric. Statistics of a segment: its score, and 1."""

    _SIGNATURE_TYPE = _MeanSignature

    def __init__(self, name: str, about: Mapping[str, str]) -> None:
        super().__init__()
        self.name, self.about, self.num_refs = name, dict(about), 1

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore(self.name, float(stats[0]) / float(stats[1]))


def segment_means(name: str, scores: Numbers, **about: str) -> Statistics:
    """Return the statistics of a system's segment scores (segments,); `about` begins the signature."""
    rows = np.stack([scores, np.ones(len(scores))], axis=1)
    return Statistics(name, [SegmentMean(name, about)], rows, np.zeros(len(scores), dtype=np.intp))


def named_files(options: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files by metric, from options NAME=FILE. Raises: MtkitError for an option without a name or a file."""
    files: dict[str, list[Path]] = {}
    for option in options:
        name, equals, file = option.partition("=")
        name = name.strip()
        if not (name and equals and file):
            raise MtkitError(f"--segment-scores {shown(option)} is not NAME=FILE, such as COMET=test.comet")
        if name.lower() in map(str.lower, ALL_METRICS):
            raise MtkitError(f"--segment-scores {name}: mtkit computes {name}; give the scores another name")
        files.setdefault(name, []).append(Path(file))
    return files


def check_files(files: Mapping[str, Sequence[Path]], systems: int, sides: int) -> None:
    """Check that each metric has one file per system, and that there is one side. Raises: MtkitError if not."""
    for name, paths in files.items():
        if sides != 1:
            raise MtkitError(f"--segment-scores {name} scores one side, not {sides}; choose one with --side")
        if len(paths) != systems:
            raise MtkitError(
                f"--segment-scores {name} has {len(paths)} files for {systems} systems; give one per system, in "
                "the order of the systems"
            )


def read_segment_scores(path: Path, translated: Translated, segments: int) -> Numbers:
    """Read the scores (segments,) of a system's segments, one number per line.

    Raises: DataError for a line that is not a finite number, and another number of lines.
    """
    scores = []
    for number, line in enumerate(Lines(path), start=1):
        try:
            score = float(line)
        except ValueError:
            score = float("nan")
        if not isfinite(score):
            raise DataError(f"{path}, line {number:,}: {shown(line[:40])} is not a number; give one score per line")
        scores.append(score)
    if len(scores) != segments:
        raise DataError(
            f"{path} has {len(scores):,} scores and {translated.hypothesis} has {segments:,} lines; "
            "give the scores of these translations, one per line"
        )
    return np.array(scores, dtype=np.float64)


def added_scores(
    files: Sequence[Translated], texts: SystemTexts, segment_scores: Mapping[str, Sequence[Path]], comet: Sequence[str]
) -> list[list[Statistics]]:
    """Return the statistics by system and metric, from files of segment scores by metric, and from COMET models."""
    by_metric = [
        [
            segment_means(name, read_segment_scores(path, file, len(texts.hypotheses[0])))
            for file, path in zip(files, paths, strict=True)
        ]
        for name, paths in segment_scores.items()
    ]
    by_metric += [run_comet(model, texts) for model in comet]
    return [[of_metric[system] for of_metric in by_metric] for system in range(len(files))]


def comet_models(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of other metrics, and the models of names such as `comet` and `comet:MODEL`."""
    others = [name for name in names if name.lower().partition(":")[0] != "comet"]
    models = [name.partition(":")[2] or DEFAULT_MODEL for name in names if name not in others]
    return others, list(dict.fromkeys(models))


def check_names(segment_scores: Collection[str], comet: Sequence[str]) -> None:
    """Check that no name of segment scores is the name of a COMET model. Raises: MtkitError if one is."""
    models = [_name_of(model).lower() for model in comet]
    for name in segment_scores:
        if name.lower() in models:
            raise MtkitError(f"--segment-scores {name}: --metric comet has the same name; give the scores another name")


def _name_of(model: str) -> str:
    return COMET if model == DEFAULT_MODEL else f"{COMET}:{model}"


def comet_command() -> list[str]:
    """Return the command in MTKIT_COMET, split as by a shell, or `comet-score`.

    Raises: MtkitError if it has an open quote, or is not installed.
    """
    setting = os.environ.get("MTKIT_COMET", "")
    try:
        command = shlex.split(setting) or ["comet-score"]
    except ValueError as error:
        raise MtkitError(f"MTKIT_COMET={shown(setting)}: {first_line(error)}; correct the quotes") from error
    if shutil.which(command[0]) is None:
        raise MtkitError(
            f"there is no command {shown(command[0])}; install COMET in its own environment "
            "(python -m venv comet && comet/bin/pip install unbabel-comet) and set MTKIT_COMET=comet/bin/comet-score"
        )
    return command


def run_comet(model: str, texts: SystemTexts) -> list[Statistics]:
    """Score all systems by one call of `comet-score`; the first reference counts.

    The command writes its messages and its bar to standard error.

    Raises: MtkitError if the command is not installed, fails, or does not write a score for each segment.
    """
    assert texts.sources is not None
    with TemporaryDirectory(prefix="mtkit-comet-") as folder:

        def write(name: str, lines: Sequence[str]) -> str:
            path = Path(folder, name)
            # comet-score ends a line at "\r" too
            path.write_text("".join(f"{line.replace(chr(13), ' ')}\n" for line in lines), encoding="utf-8", newline="")
            return str(path)

        systems = [write(f"system-{number}", lines) for number, lines in enumerate(texts.hypotheses)]
        files = ["-s", write("source", texts.sources), "-r", write("reference", texts.references[0]), "-t", *systems]
        output = Path(folder, "scores.json")
        quiet = [] if stderr_is_terminal() else ["--quiet"]
        command = [*comet_command(), *files, "--model", model, "--only_system", *quiet, "--to_json", str(output)]
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode
        except OSError as error:
            raise MtkitError(f"{command[0]} does not start: {error.strerror}; correct MTKIT_COMET") from error
        if code != 0 or not output.exists():
            raise MtkitError(
                f"{command[0]} failed with exit code {code}, see its messages above; correct MTKIT_COMET or {model}"
            )
        scores = _read_output(output, command[0], [len(lines) for lines in texts.hypotheses])
    return [segment_means(_name_of(model), of_system, model=model) for of_system in scores]


def _read_output(path: Path, command: str, counts: Sequence[int]) -> list[Numbers]:
    """Read the segment scores of each system, in the order of the command's -t. Raises: MtkitError if one is missing.

    The file has an object of file names; each has a list of segments, whose scores are called COMET.
    """
    try:
        systems = list(from_json(path.read_bytes()).values())
        scores = [np.array([segment[COMET] for segment in segments], dtype=np.float64) for segments in systems]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MtkitError(f"the JSON file of {command} has no scores of segments; mtkit supports COMET 2") from error
    if list(map(len, scores)) != list(counts) or not all(np.isfinite(of_system).all() for of_system in scores):
        raise MtkitError(f"{command} did not write a number for each segment; mtkit supports COMET 2")
    return scores
