"""`mtkit serve`: translate over HTTP, with a page to try a run and to look at its attention."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mtkit.errors import MtkitError


def serve(
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Run folder; several form an ensemble.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several form an ensemble."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 5000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another name of the server in its clients' requests; * allows any. Repeatable."
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: best, last, average or a name.")] = "best",
    beam: Annotated[int | None, typer.Option(help="Beam size; 1 is greedy search.  [default: the recipe's]")] = None,
    wait: Annotated[
        float, typer.Option(min=0, max=60_000, help="Milliseconds to wait for requests to decode together.")
    ] = 5.0,
    batch_pieces: Annotated[int, typer.Option(min=1, help="Maximum source pieces decoded together.")] = 4096,
    queue: Annotated[int, typer.Option(min=1, help="Maximum waiting requests; more are refused (503).")] = 256,
    max_strings: Annotated[int, typer.Option(min=1, help="Maximum strings per request.")] = 256,
    max_characters: Annotated[int, typer.Option(min=1, help="Maximum characters per request.")] = 20_000,
    timeout: Annotated[float, typer.Option(min=0.1, max=86_400, help="Maximum seconds per request.")] = 60.0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Arithmetic: auto (float32), bfloat16, float16, or int8 (CPU only, faster).")
    ] = "auto",
    engine: Annotated[str, typer.Option(help="Decoder: mtkit, ctranslate2 or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
) -> None:
    """Translate over HTTP.

    The server has LibreTranslate's interface (/translate, /detect, /languages), /health, /metrics and a page at / that
    shows translations with the attention behind them. Requests that arrive together are decoded together. It listens
    at 127.0.0.1 unless --host says otherwise; it has no passwords. Ctrl-C and SIGTERM stop it after the requests in
    work.

    \b
    Examples:
      mtkit serve
      mtkit serve --run mtkit-runs/mine --port 8080
      curl -d '{"q": "Hello.", "source": "en", "target": "de"}' -H 'Content-Type: application/json' \\
        http://127.0.0.1:5000/translate
    """
    if not host.strip():
        raise MtkitError("--host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for all addresses")
    try:
        from mtkit.serving.server import serve as run_server
    except ModuleNotFoundError as error:
        raise MtkitError(f"mtkit serve needs {error.name}; pip install 'mtkit[serve]'") from error

    import torch

    from mtkit.decoding.translator import Translator
    from mtkit.recipe import make_recipe, merged
    from mtkit.runs import find_runs
    from mtkit.serving.limits import ServingLimits
    from mtkit.serving.service import Service

    runs = find_runs(run, name)
    given: dict[str, Any] = {"n_best": 1}
    if beam is not None:
        given |= {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy", "coverage_penalty": 0.0}
    settings = make_recipe(merged(runs[0].recipe.model_dump(), {"decoding": given})).decoding
    if threads is not None:
        torch.set_num_threads(threads)
    translator = Translator(
        runs, settings, checkpoint=checkpoint, device=device, dtype=dtype, engine=engine, forks=True, say=typer.echo
    )
    limits = ServingLimits(wait, batch_pieces, queue, max_strings, max_characters, timeout)
    run_server(Service(translator), limits, host=host, port=port, say=typer.echo, names=allow_host or ())
