import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mtkit.data import encode
from mtkit.data.chunks import chunks
from mtkit.data.encode import Encoder, encode_chunk, sampled
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.corpora import SegmentPair
from mtkit.text.tokenizer import Tokenizers
from mtkit.text.tokenizer_training import train_tokenizer

PAIRS = [SegmentPair(line, f"two dogs {line}", f"zwei Hunde {line}") for line in range(1, 24)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer(tmp_path / "joint.model", ["two dogs", "zwei Hunde"] * 20, TokenizerSettings())
    return tmp_path


def test_a_chunk_is_the_pieces_of_each_pair_alone(folder: Path) -> None:
    tokenizers = Tokenizers.load(folder)
    texts = [("two dogs", "zwei Hunde"), ("", "zwei"), ("dogs 日 ", "dogs 日")]
    pairs = [SegmentPair(line, *both) for line, both in enumerate(texts, start=1)]
    found = encode_chunk(next(chunks(pairs, 0, "en-de")), tokenizers)
    alone = [tokenizers.source.encode(pair.source) for pair in pairs]
    assert found.source.flat.tolist() == [piece for each in alone for piece in each]
    assert found.source.lengths.tolist() == [len(each) for each in alone]
    assert [each.tolist() for each in found.words] == [[2, 0, 2], [2, 1, 2]]
    assert found.identical.tolist() == [False, False, True]


@pytest.mark.parametrize("blank", ["\u3000", "\u00a0", "\u200b", "\ufeff", "\u200e", "\0", "\u2028", "\u00ad", " \t"])
def test_lines_that_show_nothing_have_no_pieces(folder: Path, blank: str) -> None:
    pairs = [SegmentPair(1, blank, "zwei"), SegmentPair(2, "two", blank), SegmentPair(3, "two", f"zwei{blank}")]
    encoded = encode_chunk(next(chunks(pairs, 0, "en-de")), Tokenizers.load(folder))
    for side, empty in ((encoded.source, [True, False, False]), (encoded.target, [False, True, False])):
        assert (side.lengths == 0).tolist() == empty
    assert not encoded.altered[1]


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_unknown_words_count_as_words(tmp_path: Path, kind: str, byte_fallback: bool) -> None:
    settings = TokenizerSettings.model_validate({"kind": kind, "byte_fallback": byte_fallback})
    train_tokenizer(tmp_path / "joint.model", ["two dogs", "zwei Hunde"] * 20, settings)
    texts = [("two cats and dogs", "zwei"), ("", "drei Katzen"), ("\u65e5 dogs x", "\u65e5")]
    pairs = [SegmentPair(line, *both) for line, both in enumerate(texts, start=1)]
    found = encode_chunk(next(chunks(pairs, 0, "en-de")), Tokenizers.load(tmp_path))
    assert [counts.tolist() for counts in found.words] == [[4, 0, 3], [1, 2, 1]]


def test_sides_that_stop_matching_are_found_with_the_line(folder: Path) -> None:
    sources = [f"on {'very ' * (line * 7 % 11)}old day {line} we met {line * 37} dogs" for line in range(100)]
    targets = sources[:60] + sources[61:]
    pairs = [SegmentPair(line, *both) for line, both in enumerate(zip(sources, targets, strict=False), start=1001)]
    found = encode_chunk(next(chunks(pairs, 0, "en-de")), Tokenizers.load(folder))
    assert found.suspicious is not None
    assert abs(found.suspicious - 1061) < 4
    assert (
        encode_chunk(next(chunks(pairs, 0, "en-de"))._replace(aligned=50), Tokenizers.load(folder)).suspicious is None
    )


def test_several_processes_give_what_one_gives_in_the_same_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.chunks._PAIRS", 2)
    results = []
    for workers in (1, 2):
        with Encoder(folder, workers) as encoder:
            results.append(list(encoder.encode(chunks(PAIRS, 0, "en-de"))))
    assert [chunk for chunk, _ in results[0]] == [chunk for chunk, _ in results[1]]
    for (_, one), (_, other) in zip(*results, strict=True):
        for name in ("source", "target"):
            np.testing.assert_array_equal(getattr(one, name).flat, getattr(other, name).flat)
        np.testing.assert_array_equal(one.hashes, other.hashes)


WAITS = """
import sys, time
from pathlib import Path
from mtkit.data.encode import Encoder
from mtkit.data.chunks import chunks
from mtkit.text.corpora import SegmentPair

with Encoder(Path(sys.argv[1]), 2) as encoder:
    list(encoder.encode(chunks([SegmentPair(1, "two dogs", "zwei Hunde")], 0, "en-de")))
    print(*(process._started[0].pid for process in encoder._processes if process._started), flush=True)
    time.sleep(600)
"""


def test_processes_end_with_the_one_that_began_them_even_where_it_is_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(number) for number in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert children
    deadline = time.monotonic() + 60
    while left := [child for child in children if _runs(child)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


KILLED = """
import sys
from pathlib import Path
from mtkit.data.encode import Encoder
from mtkit.data.chunks import chunks
from mtkit.text.corpora import SegmentPair
from mtkit.errors import DataError

DIE = '''
import os, signal
from multiprocessing.connection import Connection

def send_most(connection, message):
    os.write(connection.fileno(), bytes(message)[:-1])
    os.kill(os.getpid(), signal.SIGKILL)

Connection._send = send_most
'''

class Deadly:
    def __reduce__(self):
        return exec, (DIE, {})

if __name__ == "__main__":
    chunk = next(chunks([SegmentPair(1, "two dogs", "zwei Hunde")], 0, "en-de"))
    try:
        with Encoder(Path(sys.argv[1]), 2) as encoder:
            list(encoder.encode([chunk, chunk._replace(documents=[Deadly()]), chunk]))
    except DataError as error:
        print(error)
"""
"""The process that receives the second chunk is killed in the middle of its answer."""


def test_a_process_that_is_killed_while_it_answers_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, script, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "a process that encodes text was killed; run the command again" in done.stdout
    assert done.stderr == ""


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from mtkit.data.encode import Encoder
from mtkit.data.chunks import chunks
from mtkit.text.corpora import SegmentPair

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored

if __name__ == "__main__":
    os.environ["SLOW"] = "1"
    try:
        with Encoder(Path(sys.argv[1]), 2) as encoder:
            list(encoder.encode(chunks([SegmentPair(1, "two dogs", "zwei Hunde")], 0, "en-de")))
    except KeyboardInterrupt:
        print("stopped")
"""

SLOW = """
import os, time

if "SLOW" in os.environ:
    print("begun", flush=True)
    time.sleep(0.5)
"""
"""What a Python process runs before anything else."""


def test_ctrl_c_does_not_reach_a_process_that_has_just_begun(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, tmp_path / "interrupted.py", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=60)
    assert output.replace("begun\n", "") == "stopped\n"  # a second process may have begun too
    assert errors == ""


def test_an_error_in_a_process_is_raised_here_with_its_traceback(folder: Path) -> None:
    broken = next(chunks(PAIRS, 0, "en-de"))._replace(sources=[])
    with Encoder(folder, 2) as encoder, pytest.raises(ValueError, match="longer") as caught:
        list(encoder.encode([broken]))
    assert "in encode_chunk" in caught.value.__notes__[0]


UNGUARDED = """
import mtkit
import mtkit.data.encode as encoding

print("begun")
encoding._ONE_PROCESS = 0
given = {"builtin": {"train": 60, "valid": 5, "test": 5}, "tokenizer": {"vocabulary": 400}}
report = mtkit.prepare({"data": given}, workers=2)
print(report.folder, __file__.endswith("unguarded.py"), getattr(__spec__, "name", None))
"""


@pytest.mark.parametrize(("how", "name"), [(["unguarded.py"], None), (["-m", "unguarded"], "unguarded")])
def test_a_script_needs_no_guard_against_processes_that_run_it_again(
    how: list[str], name: str | None, tmp_path: Path
) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *how], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"begun\nmtkit-data True {name}\n"


def _runs(process: int) -> bool:
    """Whether the process is there, and not only its exit status, which nobody may have asked for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_sentences_of_the_sources_are_counted_in_their_language(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Hier ist z. B. Dr. Maier.", "Ja. Nein! Wer?", "", "Am 3. Oktober."]
    pairs = [SegmentPair(line, text, "x. Y. Z.") for line, text in enumerate(texts, start=1)]
    tokenizers = Tokenizers.load(folder)

    def counted(direction: str) -> list[int]:
        return encode_chunk(next(chunks(pairs, 0, direction)), tokenizers).sentences.tolist()

    assert counted("de-en") == [1, 3, 0, 1]
    assert counted("xx-en") == [1, 3, 0, 2]
    monkeypatch.setattr(encode, "_SAMPLE", 2)
    assert counted("xx-en") == [1, 0]


@pytest.mark.parametrize("pairs", [0, 1, 999, 1000, 1001, 10_000])
def test_no_more_than_a_sample_is_counted(pairs: int) -> None:
    chosen = range(pairs)[sampled(pairs)]
    assert min(pairs, 500) <= len(chosen) <= 1000
