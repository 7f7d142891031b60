"""The command line as a whole: quick, without torch, and one line for a user's mistake."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mtkit.cli.app import COMMANDS, app, main

HEAVY = ["torch", "datasets", "sentencepiece", "matplotlib", "sacrebleu", "numpy", "yaml"]


def mtkit(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


ONE_BY_ONE = """
import json, os, sys
from mtkit.cli.app import main
commands, path, heavy = map(json.loads, sys.argv[1:])
said, ended, seen = os.dup(1), [], set()
os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), 2)
for words in commands:
    os.ftruncate(2, os.lseek(2, 0, os.SEEK_SET))
    os.dup2(os.open(path + ".out", os.O_RDWR | os.O_CREAT | os.O_TRUNC), 1)
    sys.argv, code = ["mtkit", *words], None
    try:
        main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    loaded = [name for name in heavy if name in sys.modules and name not in seen]
    seen.update(loaded)
    shown = {"stdout": open(path + ".out", encoding="utf-8").read(), "stderr": open(path, encoding="utf-8").read()}
    ended.append({"code": code, **shown, "files": os.listdir(), "loaded": loaded})
os.write(said, json.dumps(ended).encode())
"""
"""Runs commands one after the other in one process, as most of a command is the imports before it."""


def one_by_one(folder: Path, output: Path, commands: list[list[str]]) -> list[dict[str, Any]]:
    """The exit code, the output, the files of `folder`, in which it ran, and the heavy imports of each command."""
    words = map(json.dumps, (commands, str(output), HEAVY))
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE, *words], capture_output=True, check=False, cwd=folder)
    assert done.returncode == 0, output.read_text()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each command shows with `--help`."""
    folder, commands = tmp_path_factory.mktemp("helps"), ["", *COMMANDS]
    shown = one_by_one(folder, folder / "stderr", [[*command.split(), "--help"] for command in commands])
    return dict(zip(commands, shown, strict=True))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str, helps: dict[str, dict[str, Any]]) -> None:
    assert helps[command]["loaded"] == []
    assert "Usage: mtkit" in helps[command]["stdout"]


MISTAKES = [
    (["attentions", "longfromer"], ["longfromer", "did you mean 'longformer'"]),
    (["train", "--attention", "averge"], ["averge", "did you mean 'average'"]),
    (["train", "--encoder-attention", "average"], ["average", "encoder", "decoder"]),
    (["tasks", "copi"], ["copi", "did you mean 'copy'"]),
    (["train"], ["mtkit prepare"]),
    (["translate"], ["mtkit train"]),
    (["score"], ["mtkit train"]),
    (["train", "--recipe", "missing.yaml"], ["missing.yaml"]),
    (["train", "--max-update", "5"], ["--max-update", "--max-updates", "mtkit train --help"]),
    (["train", "--max-updates", "five"], ["--max-updates", "mtkit train --help"]),
    (["trian"], ["trian", "train", "mtkit --help"]),
]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each command of `MISTAKES` gives in an empty folder."""
    folder = tmp_path_factory.mktemp("mistakes")
    return one_by_one(folder, tmp_path_factory.mktemp("said") / "stderr", [arguments for arguments, _ in MISTAKES])


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(number: int, mistakes: list[dict[str, Any]]) -> None:
    result, (_, words) = mistakes[number], MISTAKES[number]
    assert result["code"] == 2
    assert result["stderr"].count("\n") == 1
    assert result["stderr"].startswith("mtkit: ")
    for word in words:
        assert word in result["stderr"]
    assert result["files"] == []
    assert result["stdout"] == ""


def test_a_mistake_ends_the_process_with_its_code(tmp_path: Path) -> None:
    result = mtkit("train", "--attention", "averge", cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "arguments",
    [["--{}"], ["{}"], ["align", "a", "--name", "{}"], ["score", "--run", "{}"], ["translate", "--beam", "{}"]],
)
def test_a_mistake_does_not_repeat_long_words(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mtkit", *(each.format("x" * 5000) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < 300


def test_an_option_of_several_commands_has_one_meaning() -> None:
    commands = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    helps = {name: each.help for name, command in commands for each in command.params if "--test" in each.opts}
    assert helps.keys() == {"prepare", "translate"}
    assert all(text.startswith("Test text") for text in helps.values())


def test_version() -> None:
    assert mtkit("--version").stdout.startswith("mtkit ")


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    """The words that bash is given, also of `python -m mtkit`."""

    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        environment = {**os.environ, "_MTKIT_COMPLETE": "complete_bash", **words}
        command = [sys.executable, "-m", "mtkit"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert found.stderr == ""
        return found.stdout.split()

    assert completed("mtkit tra") == ["train", "translate"]
    assert "--max-updates" in completed("mtkit train --max")


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import resource, sys
from mtkit.cli.app import app
if {told}:
    app(["attentions", "full"], standalone_mode=False)
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not PAGES.exists() or "[never]" in PAGES.read_text(), reason="this system has no large pages")
def test_large_tensors_get_large_pages() -> None:
    def faults(told: bool) -> int:
        environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
        command = [sys.executable, "-c", FAULTS.format(told=told)]
        run = subprocess.run(command, capture_output=True, check=True, env=environment)
        return int(run.stdout.split()[-1])

    assert faults(told=True) < faults(told=False) / 10


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is that of PyTorch on Linux")
@pytest.mark.parametrize(
    ("theirs", "looks"),
    [({}, "(1000|10000)"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_threads_that_wait_soon_sleep(theirs: dict[str, str], looks: str) -> None:
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS.format(told=True)],
        capture_output=True,
        check=True,
        text=True,
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **theirs},
    )
    assert re.search(f"GOMP_SPINCOUNT = '{looks}'", run.stderr)


def test_a_name_that_is_no_utf_8_is_one_line(tmp_path: Path) -> None:
    command = [os.fsencode(sys.executable), b"-m", b"mtkit", b"prepare", b"--data", b"d\xff"]
    result = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == b"mtkit: d? is not UTF-8; rename that file, or give a link to it\n"


def test_a_locale_without_the_letters_of_a_name_is_named(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "mtkit", "prepare", "--data", "dä"]
    result = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, env=os.environ | ascii_only)
    assert result.returncode == 2
    assert result.stderr == b"mtkit: d?? is UTF-8, and Python reads names as ascii; set LC_ALL=C.UTF-8\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_mistake_whose_message_does_not_fit_keeps_its_code() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "mtkit", "train", "--nme", "x"]
        assert subprocess.run(command, stderr=full, check=False).returncode == 2


def test_processes_of_torchrun_print_a_mistake_once(tmp_path: Path) -> None:
    (tmp_path / "attempt_0").mkdir()
    printed = []
    for place in ("attempt_0/0", "attempt_0/1", "missing/0", "attempt_0/1"):
        environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / place / "error.json")}
        command = [sys.executable, "-m", "mtkit", "trian" if len(printed) < 3 else "scroe"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == 2
        printed.append(result.stderr.count("mtkit: No such command"))
    assert printed == [1, 0, 1, 1]


def test_a_loop_of_links_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    commands = [["prepare", "--data", "loop"], ["train", "--data", "loop"], ["train", "--recipe", "loop"]]
    for result in one_by_one(tmp_path, tmp_path / "stderr", commands):
        assert (result["code"], result["stderr"].count("\n")) == (2, 1), result["stderr"]
        assert "loop" in result["stderr"]


@pytest.mark.parametrize("words", ["translate --input text --output", "score --run", "train --recipe"])
def test_a_name_that_is_too_long_is_said_with_advice(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a\n")
    monkeypatch.setattr(sys, "argv", ["mtkit", *words.split(), "x" * 300])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("File name too long; give a shorter name\n")


def test_a_reader_that_has_left_is_no_mistake() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "mtkit", "attentions"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are POSIX's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_does_not_fit_is_one_line(tmp_path: Path, unbuffered: str) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    script = f"{limited}\nfrom mtkit.cli.app import main\nmain()"
    with (tmp_path / "out").open("w") as out:
        result = subprocess.run(
            [sys.executable, "-c", script, "attentions"],
            stdout=out,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
            check=False,
        )
    assert (tmp_path / "out").stat().st_size == 1000
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("mtkit: File too large; raise the limit of file sizes")


def test_a_command_that_is_told_to_stop_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.core.TyperGroup.invoke", interrupted)
    monkeypatch.setattr("sys.argv", ["mtkit", "attentions"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "mtkit: stopped\n"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory")])
def test_memory_that_is_full_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("mtkit.cli.app.app", fails)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        "mtkit: the memory is full; use a smaller model, smaller batches or fewer processes, or free some memory\n"
    )
