"""`mtkit translate`: translate the test side, a file or standard input with a trained run."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.held_out import HeldOut
    from mtkit.decoding.translate import Translation
    from mtkit.recipe import DecodingSettings, Recipe
    from mtkit.runs import Run

SAMPLES = 3
NAMED = 10
"""Line numbers that a note lists at most."""

ONLY_WITH = {
    "beam": ("beam", "coverage_penalty"),
    "sample": ("temperature", "top_k", "top_p", "seed"),
}
"""Settings that say nothing with another method."""


def translate(
    input: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to translate, one segment a line; - is standard input.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write.  [default: standard output with --input]")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the run.  [default: the latest]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run under mtkit-runs.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with decoding settings.  [default: the run's]")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prepared data with the test side.  [default: the run's]")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, average, or one by its name.")] = "best",
    target: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Print the log-probability of these translations instead.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="greedy, beam or sample.")] = None,
    beam: Annotated[int | None, typer.Option(help="Hypotheses kept by beam search.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Exponent of the length; 0: plain log-probability.")
    ] = None,
    coverage_penalty: Annotated[float | None, typer.Option(help="Weight of source pieces left unattended.")] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(help="Let no sequence of this many pieces repeat.")] = None,
    n_best: Annotated[int | None, typer.Option(help="Translations a line, as number, score and text.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits before sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many likeliest pieces; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest that reach this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write each score and a tab before its text.")] = False,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Padded source pieces a batch, all hypotheses counted.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: one for each core]")] = None,
) -> None:
    """Translate the prepared test side with the latest run, or any lines: N lines in, N lines out.

    Decoding settings are those of the run's recipe unless given.

    Examples: mtkit translate; mtkit translate --input - < text.en > text.de
    """
    from mtkit.runs import find_run

    if scores and input is None:
        raise MtkitError("--scores writes scores beside the lines of --input; give --input FILE too")
    found = find_run(run, name)
    given = {
        "method": method,
        "beam": beam,
        "length_penalty": length_penalty,
        "coverage_penalty": coverage_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "n_best": n_best,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "batch_tokens": batch_tokens,
    }
    whole = _recipe(found, recipe, {key: value for key, value in given.items() if value is not None})
    job = _Job(found, whole.decoding, checkpoint, device, dtype, threads)
    if input is not None:
        lines = _read(input)
        _write(job.force(lines, _read(str(target))) if target else job.lines(lines, scores), output)
        return
    side = _held_out(found, data or whole.data.folder)
    if target is not None:
        _write(job.force(side.sources, _read(str(target))), output)
    else:
        job.held_out(side, output)


class _Job:
    """One run's model, ready to decode."""

    def __init__(
        self, run: "Run", settings: "DecodingSettings", checkpoint: str, device: str, dtype: str, threads: int | None
    ) -> None:
        import torch

        from mtkit.decoding.device import find_device, find_dtype

        if threads is not None:
            torch.set_num_threads(threads)
        self.run, self.settings = run, settings
        self.dtype = find_dtype(dtype)
        where = find_device(device)
        self.model = run.load_model(checkpoint, str(where))
        self.about = {
            "checkpoint": run.checkpoint(checkpoint).name,
            "device": str(where),
            "dtype": dtype if self.dtype else "float32",
            "threads": torch.get_num_threads(),
            "settings": settings.model_dump(),
        }

    def lines(self, lines: Sequence[str], scores: bool) -> list[str]:
        """The lines to write for translated lines."""
        from mtkit.decoding.held_out import n_best_lines
        from mtkit.decoding.translate import translate_lines

        with _progress(len(lines)) as on_progress:
            found = translate_lines(
                self.model, self.run.tokenizers, lines, self.settings, dtype=self.dtype, on_progress=on_progress
            )
        _notes(found, self.model.longest_source)
        if self.settings.n_best > 1:
            return list(n_best_lines(found))
        return [f"{each.score:.6f}\t{each.text}" if scores else each.text for each, *_ in found]

    def held_out(self, side: "HeldOut", output: Path | None) -> None:
        """Translates the test side into the run's folder, and says where and how fast."""
        from mtkit.decoding.held_out import save, timed

        with _progress(len(side.sources)) as on_progress:
            found, speed = timed(
                self.run, self.model, side.sources, self.settings, dtype=self.dtype, on_progress=on_progress
            )
        _notes(found, self.model.longest_source)
        path = save(self.run, side, found, speed, self.about)
        if output is not None:
            _write([each.text for each, *_ in found], output)
        for number in range(0, len(found), -(-len(found) // SAMPLES)):
            typer.echo(f"source       {side.sources[number]}")
            typer.echo(f"reference    {side.references[number]}")
            typer.echo(f"translation  {found[number][0].text}\n")
        numbers = speed.numbers()
        typer.echo(
            f"{len(found):,} segments in {numbers['seconds']:.1f} s ({numbers['segments_per_second']:,.0f} segments/s, "
            f"{numbers['tokens_per_second']:,.0f} tokens/s), checkpoint {self.about['checkpoint']}: {path}"
        )

    def force(self, sources: Sequence[str], targets: Sequence[str]) -> list[str]:
        """The log-probability of each given translation."""
        from mtkit.decoding.forced import log_probs_of_lines

        with _progress(len(sources)) as on_progress:
            found = log_probs_of_lines(
                self.model,
                self.run.tokenizers,
                sources,
                targets,
                batch_tokens=self.settings.batch_tokens,
                dtype=self.dtype,
                on_progress=on_progress,
            )
        return [f"{each:.6f}" for each in found]


def _recipe(run: "Run", path: Path | None, given: dict[str, Any]) -> "Recipe":
    """The recipe at `path`, or else the run's, with the decoding settings given on the command line."""
    from mtkit.recipe import load_recipe, make_recipe, merged

    overrides = {"decoding": given}
    recipe = load_recipe(path, overrides) if path else make_recipe(merged(run.recipe.model_dump(), overrides))
    for method, settings in ONLY_WITH.items():
        for setting in settings:
            if setting in given and recipe.decoding.method != method:
                option = setting.replace("_", "-")
                raise MtkitError(
                    f"--{option} says nothing with --method {recipe.decoding.method}; add --method {method}"
                )
    return recipe


def _held_out(run: "Run", folder: Path) -> "HeldOut":
    """The segments that a bare `mtkit translate` translates."""
    from mtkit.data.prepared import open_prepared
    from mtkit.decoding.held_out import held_out

    prepared = open_prepared(folder)
    side = held_out(prepared)
    if prepared.fingerprint != run.about.get("data"):
        _note(f"{folder} holds other data than {run.folder} was trained on")
    if side.name == "valid":
        _note(f"{folder} has no test side, so the validation side is translated")
    return side


def _read(name: str) -> list[str]:
    from mtkit.data.readers import Lines, decoded

    return list(decoded(sys.stdin.buffer, "standard input") if name == "-" else Lines(Path(name)))


def _write(lines: Sequence[str], path: Path | None) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if path is None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    else:
        from mtkit.files import write_text

        write_text(path, text)


@contextmanager
def _progress(lines: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, when it takes a while."""
    from tqdm import tqdm

    with tqdm(total=lines, unit=" lines", delay=2, disable=None, leave=False) as bar:
        yield bar.update


def _notes(translations: Sequence[Sequence["Translation"]], longest: int | None) -> None:
    """Says on standard error what a user should know about some lines."""
    cut = [number for number, each in enumerate(translations, start=1) if each[0].parts > 1]
    if cut:
        _note(f"lines longer than the model's {longest:,} pieces were translated in parts: {_listed(cut)}")
    failed = [number for number, each in enumerate(translations, start=1) if each[0].score == float("-inf")]
    if failed:
        _note(f"the model gave no finite probabilities, so these lines are empty: {_listed(failed)}")


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
    return ", ".join(map(str, numbers[:NAMED])) + more


def _note(message: str) -> None:
    typer.echo(f"note: {message}", err=True)
