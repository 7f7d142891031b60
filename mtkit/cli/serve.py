"""`mtkit serve`: translate over HTTP, with a page that shows translations and their attention."""

import logging
from functools import partial
from typing import Annotated, Any

import typer
from typer import Option

from mtkit.cli.options import Arithmetic, Checkpoint, Device, EnsembleFolders, EnsembleNames, Threads, use_threads
from mtkit.errors import MtkitError


def serve(
    run: EnsembleFolders = None,
    name: EnsembleNames = None,
    host: Annotated[str, Option(help="Address; with 0.0.0.0, other machines can connect.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 5000,
    allow_host: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Another name of the server in its clients' requests; * allows any. Repeatable."),
    ] = None,
    checkpoint: Checkpoint = "best",
    beam: Annotated[int | None, Option(min=1, help="Beam size; 1 is greedy search.  [default: the recipe's]")] = None,
    wait: Annotated[
        float, Option(min=0, max=60_000, help="Milliseconds to wait for requests to decode together.")
    ] = 5.0,
    batch_pieces: Annotated[int, Option(min=1, help="Maximum source pieces decoded together.")] = 4096,
    queue: Annotated[int, Option(min=1, help="Maximum waiting requests; more are refused (503).")] = 256,
    max_strings: Annotated[int, Option(min=1, help="Maximum strings per request.")] = 256,
    max_characters: Annotated[int, Option(min=1, help="Maximum characters per request.")] = 20_000,
    timeout: Annotated[float, Option(min=0.1, max=86_400, help="Maximum seconds per request.")] = 60.0,
    device: Device = "auto",
    dtype: Arithmetic = "auto",
    engine: Annotated[str, Option(help="Decoder: mtkit, ctranslate2 or auto.")] = "auto",
    threads: Threads = None,
) -> None:
    """Translate over HTTP.

    The server has LibreTranslate's interface (/translate, /detect, /languages) for text and HTML, /health, /metrics,
    and a page at / that shows translations and their attention. Requests that arrive together are decoded together. The
    server has no passwords; by default it accepts connections from this machine only. Ctrl-C and SIGTERM stop it after
    the requests in progress.

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
        from mtkit.serving.server import listen
        from mtkit.serving.server import serve as run_server
    except ModuleNotFoundError as error:
        raise MtkitError(f"mtkit serve needs {error.name}; pip install 'mtkit[serve]'") from error

    from mtkit.decoding.translator import Translator
    from mtkit.recipe.settings import with_method
    from mtkit.runs import find_runs
    from mtkit.serving.batcher import ServingLimits
    from mtkit.serving.middleware import Hosts
    from mtkit.serving.service import Service

    runs = find_runs(run, name)
    decoding: dict[str, Any] = {"n_best": 1}
    if beam is not None:
        decoding |= {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy", "coverage_penalty": 0.0}
    settings = runs[0].recipe.with_decoding(with_method(decoding)).decoding
    with listen(host, port) as listener:  # an address that cannot be used is reported before the model is loaded
        hosts = Hosts(host, listener.getsockname()[0], allow_host or ())
    use_threads(threads)
    translator = Translator(
        runs, settings, checkpoint=checkpoint, device=device, dtype=dtype, engine=engine, forks=True, say=typer.echo
    )
    limits = ServingLimits(wait, batch_pieces, queue, max_strings, max_characters, timeout)
    # a message that cannot be written to the log fails no request
    heads = partial(translator.word_heads, say=logging.getLogger("uvicorn.error").warning)
    service = Service(translator, heads)
    run_server(service, limits, hosts, host=host, port=port, say=typer.echo)
