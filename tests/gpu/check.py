"""Checks mtkit on a GPU: `python -m tests.gpu.check SECTION ...` (README.md in this folder).

Each section runs in a process with a time limit of its own, so that a crash or a hang costs only that section. A result
is one line of JSON, printed as soon as it is known: `ok` is true or false for a check, and missing for a measurement.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a section runs on."""

    device: str
    """cuda, or cpu for the dry run."""
    tiny: bool
    """Whether sizes are those of the dry run: seconds on a CPU."""
    data: Path
    """Folder with the prepared data `builtin` and, for the speed sections, `news`; `builtin` is made if missing."""
    shard: tuple[int, int] = (0, 1)
    """Which of how many processes of this section this is."""
    mechanisms: tuple[str, ...] = ()
    """The only mechanisms to check; empty: all."""

    def includes(self, name: str) -> bool:
        """Whether a mechanism is to be checked."""
        return not self.mechanisms or name in self.mechanisms


@dataclass(frozen=True)
class Section:
    """One part of the check."""

    module: str
    """Module of `tests.gpu` that has a function of the section's name."""
    seconds: int
    """Time limit on a GPU."""
    shards: int = 1
    """Processes that share the section's cases."""


SECTIONS = {
    "machine": Section("machine", 60),
    "learning": Section("training", 120, 8),
    "gradients": Section("training", 100, 2),
    "resume": Section("training", 100, 2),
    "strict": Section("training", 150, 3),
    "waits": Section("training", 150, 3),
    "memory": Section("training", 80),
    "contract": Section("contract", 200, 6),
    "decoding": Section("decoding", 200, 6),
    "update_profile": Section("speed", 100),
    "training_speed": Section("speed", 320, 2),
    "decoding_speed": Section("speed", 200),
    "update_graphs": Section("graphs", 150, 3),
    "step_graphs": Section("graphs", 100),
    "attention_speed": Section("speed", 120),
    "ctranslate2": Section("speed", 60),
}


def run_section(name: str, setup: Setup) -> Iterator[Result]:
    """The results of one section, computed in this process."""
    function: Callable[[Setup], Iterator[Result]] = getattr(import_module(f"tests.gpu.{SECTIONS[name].module}"), name)
    yield from function(setup)


def guarded(check: str, compute: Callable[[], Result]) -> Result:
    """The result of one check; an exception in it is a result that is not ok, so that the next check still runs."""
    begin = time.monotonic()
    try:
        result = compute()
    except Exception as error:
        last = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:400]}", "at": last[-4:]}
    return {"check": check, **result, "seconds": round(time.monotonic() - begin, 2)}


def _child(name: str, setup: Setup) -> None:
    for result in run_section(name, setup):
        print(json.dumps({"section": name, **result}), flush=True)


def _run_process(job: tuple[str, int], arguments: argparse.Namespace, write: Callable[[str], None]) -> None:
    """Runs one shard of a section in a process; writes its results, and one that is not ok if it does not end well."""
    name, shard = job
    limit = min(SECTIONS[name].seconds, arguments.limit or 10**6)
    command = [sys.executable, "-m", "tests.gpu.check", name, "--child", str(shard), "--device", arguments.device]
    command += ["--data", str(arguments.data), *(["--tiny"] if arguments.tiny else [])]
    command += ["--mechanisms", arguments.mechanisms] if arguments.mechanisms else []
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    timer = threading.Timer(limit, partial(os.killpg, process.pid, signal.SIGKILL))
    timer.start()
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reader.start()
    for line in process.stdout:
        if line.startswith("{"):
            write(line)
    status = process.wait()
    late = not timer.is_alive()
    timer.cancel()
    reader.join()
    seconds = round(time.monotonic() - begin, 1)
    end: Result = {"section": name, "shard": shard, "check": "process", "seconds": seconds}
    if status != 0:
        reason = f"stopped at its limit of {limit} s" if late else f"exit status {status}"
        end |= {"ok": False, "error": reason, "stderr": "".join(errors)[-800:]}
    write(json.dumps(end) + "\n")


def main() -> int:
    """Runs the sections named; prints a table of the results, and returns 1 if any is not ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run [default: cuda]")
    parser.add_argument("--tiny", action="store_true", help="sizes of the dry run")
    parser.add_argument("--data", type=Path, default=Path("mtkit-gpu-check"), help="folder of prepared data")
    parser.add_argument("--mechanisms", default="", help="the only mechanisms that are compared: A,B [default: all]")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; 1 for speed [default: 1]")
    parser.add_argument("--limit", type=int, help="seconds of each section at most")
    parser.add_argument("--output", type=Path, help="file that the results are also written to")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        name = arguments.sections[0]
        mechanisms = tuple(filter(None, arguments.mechanisms.split(",")))
        shard = arguments.child, SECTIONS[name].shards
        setup = Setup(arguments.device, arguments.tiny, arguments.data, shard, mechanisms)
        _child(name, setup)
        return 0
    lock, results = threading.Lock(), list[Result]()

    def write(line: str) -> None:
        with lock:
            results.append(json.loads(line))
            print(line, end="", flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(line)

    jobs = [(name, shard) for name in arguments.sections for shard in range(SECTIONS[name].shards)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(partial(_run_process, arguments=arguments, write=write), jobs))
    failed = Counter(result["section"] for result in results if result.get("ok") is False)
    passed = Counter(result["section"] for result in results if result.get("ok") is True)
    for name in arguments.sections:
        print(f"{name:16} {passed[name]:4} ok {failed[name]:4} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
