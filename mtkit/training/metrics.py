"""Output of a training: a progress bar, metrics.jsonl, and TensorBoard if it is installed."""

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NotRequired

from tqdm import tqdm
from typing_extensions import TypedDict

from mtkit.data.batches import Batch
from mtkit.errors import RunError
from mtkit.storage.files import WriteError, finite, inside, json_text, write_text
from mtkit.storage.records import Count, read_stored_lines, stored
from mtkit.terminal import Say, stderr_is_terminal


def ignoring_write_errors(say: Say) -> Say:
    """`say`, but ignoring OSError: lines that cannot be written, to a closed pipe or a full disk, are dropped."""

    def speak(line: str) -> None:
        with suppress(OSError):
            say(line)

    return speak


@stored
class Row(TypedDict):
    """A line of metrics.jsonl: a kind, an update, and measurements; what curves and reports read has a type."""

    kind: Literal["train", "validation"]
    update: Count
    nll: NotRequired[float | None]
    bleu: NotRequired[float | None]
    chrf: NotRequired[float | None]
    exact: NotRequired[float | None]
    token: NotRequired[float | None]
    ter: NotRequired[float | None]
    signature: NotRequired[str]
    chrf_signature: NotRequired[str]
    exact_signature: NotRequired[str]
    token_signature: NotRequired[str]
    ter_signature: NotRequired[str]
    best_by: NotRequired[str]
    rate: NotRequired[float | None]
    gradient_norm: NotRequired[float | None]
    tokens_per_second: NotRequired[float | None]
    peak_bytes: NotRequired[Count]


class Metrics:
    """Appends to a run's metrics.jsonl, one JSON object per line, and to its TensorBoard log.

    A number that is not finite is null, such as the gradient norm if float16 skipped all updates.
    """

    def __init__(self, folder: Path, update: int, *, validated: bool) -> None:
        """Continue after `update`, or with its validation if it is not `validated`; later lines are dropped."""
        self._path, self._curves = inside(folder, "metrics.jsonl"), inside(folder, "curves.png")
        last = {"train": update, "validation": update if validated else update - 1}
        rows = [row for row in read_metrics(self._path) if row["update"] <= last[row["kind"]]]
        write_text(self._path, "".join(json_text(row) + "\n" for row in rows))
        self._board = _tensorboard(inside(folder, "tensorboard"), update)

    def write(self, kind: str, update: int, **values: Any) -> None:
        """Write one line: `kind` is "train" or "validation"."""
        try:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json_text({"kind": kind, "update": update, **values}) + "\n")
        except OSError as error:
            raise WriteError([self._path], error) from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(f"{kind}/{name}", value, update)

    def draw(self) -> None:
        """Draw the curves if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is not None:
            from mtkit.evaluation.pictures.curves import draw_curves

            draw_curves(read_metrics(self._path), self._curves)

    def close(self) -> None:
        """Flush TensorBoard's log."""
        if self._board is not None:
            self._board.close()


class Interval:
    """Measurements between two lines of metrics."""

    def __init__(self) -> None:
        self.full_rate: float | None = None
        """Target tokens per second at the full rate of the GPUs' products, if known."""
        self._restart()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the wait for the next batches."""
        begin = monotonic()
        yield
        self._waited += monotonic() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of validation and checkpoints: its time does not count."""
        begin = monotonic()
        yield
        self._begin += monotonic() - begin

    def count(self, tokens: int, batches: Sequence[Batch] = ()) -> None:
        """Count one update: its target tokens in all processes, and the batches that this process computes."""
        self._updates += 1
        self._tokens += tokens
        self._positions += sum(batch.source.numel() + batch.target_in.numel() for batch in batches)
        self._real += sum(batch.real for batch in batches)

    def read(self, sums: Sequence[float], rate: float) -> dict[str, float]:
        """Return the interval's line, from the sums of `Updater.read`, and begin the next interval."""
        loss, nll, extra, reward, segments, divergence, norms, updates = sums
        seconds = max(monotonic() - self._begin, 1e-9)
        self.seconds_per_update = seconds / self._updates
        row: dict[str, float] = {
            "loss": (loss + extra) / self._tokens,
            "nll": nll / self._tokens,
            "perplexity": math.exp(min(nll / self._tokens, 99.0)),
            "rate": rate,
            "gradient_norm": norms / updates if updates else math.nan,
            "tokens_per_second": self._tokens / seconds,
            "seconds_per_update": self.seconds_per_update,
            "data_wait": self._waited / seconds,
        }
        if self.full_rate is not None:
            row["mfu"] = row["tokens_per_second"] / self.full_rate
        if self._positions:
            row["padding"] = 1.0 - self._real / self._positions
        if segments:
            row["reward"] = reward / segments
        if divergence:
            row["r_drop"] = divergence / self._tokens
        if updates < self._updates:
            row["skipped_updates"] = self._updates - updates
        self._restart()
        return row

    def _restart(self) -> None:
        self._begin = monotonic()
        self._waited = 0.0
        self._updates = self._tokens = self._positions = self._real = 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, none without the file; an incomplete last line is left out.

    Numbers that are not finite are None.

    Raises: RunError naming a damaged line.
    """
    if not path.exists():
        return []
    advice = "remove that line and repeat the command"
    return [finite(row) for row in read_stored_lines(path, Row, advice, error=RunError)]


class ProgressLine:
    """A progress bar on a terminal's stderr; otherwise a line for each interval of metrics."""

    def __init__(self, say: Say, *, update: int, shown: bool) -> None:
        self._say = say
        self._total = ""
        self._shown = shown
        self._bar = tqdm(initial=update, unit="update", disable=not (shown and stderr_is_terminal()))
        self.expect(None)

    def expect(self, total: int | None, estimated: bool = False) -> None:
        """Set the number of updates at the end of the training, if it is known."""
        self._total = "" if total is None else f"/{'~' if estimated else ''}{total}"
        self._bar.total = total
        done = "" if total is None else "{percentage:3.0f}% "
        self._bar.bar_format = f"{done}update {{n_fmt}}{self._total}{{postfix}}"

    def advance(self) -> None:
        """Count one update."""
        if not self._bar.disable and self._bar.total is not None:
            self._bar.total = max(self._bar.total, self._bar.n + 1)  # an estimate may be too low
        self._bar.update()

    def measure(self, update: int, row: dict[str, float], seconds_left: float | None) -> None:
        """Show the measurements of an interval."""
        measured = [
            *([] if seconds_left is None else [f"ETA {timedelta(seconds=round(seconds_left))}"]),
            f"loss {row['loss']:.3f}",
            f"ppl {row['perplexity']:.2f}",
            f"{row['tokens_per_second']:,.0f} tok/s",
            *([f"MFU {row['mfu']:.0%}"] if "mfu" in row else []),
            f"rate {row['rate']:.2e}",
            f"grad norm {row['gradient_norm']:.2f}",
            f"data wait {row['data_wait']:.0%}",
            *([f"padding {row['padding']:.0%}"] if "padding" in row else []),
        ]
        if not self._bar.disable:
            self._bar.set_postfix_str(self._fitting(update, measured))
        elif self._shown:
            self._say(f"update {update}{self._total}  {'  '.join(measured)}")

    def _fitting(self, update: int, measured: Sequence[str]) -> str:
        """Return the first measurements, as many as fit into the line of the terminal."""
        room = (self._bar.ncols or sys.maxsize) - len(f"100% update {update}{self._total}, ")
        ends = accumulate(len(part) + 2 for part in measured)
        return "  ".join(part for part, end in zip(measured, ends, strict=True) if end - 2 < room)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            with nullcontext() if self._bar.disable else tqdm.external_write_mode(file=sys.stderr):
                self._say(line)

    def close(self) -> None:
        """Close the bar; its last state stays visible."""
        self._bar.close()


def _tensorboard(folder: Path, update: int) -> Any:
    """Return a writer, or None without TensorBoard."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=update + 1)
