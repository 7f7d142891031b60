"""`mtkit translate` in several processes, as typed."""

import subprocess
import sys
from pathlib import Path

from tests.decoding.trained import make_run, sentences


def test_processes_give_what_one_gives(tmp_path: Path) -> None:
    make_run(tmp_path)
    text = "".join(f"{line}\n" for line in [*sentences(60, 1), "", "犬 sees\u2028a cat"]).encode()
    words = [sys.executable, "-m", "mtkit", "translate", "--input", "-", "--engine", "mtkit", "--batch-tokens", "100"]
    found = [
        subprocess.run(
            [*words, "--threads", threads], input=text, capture_output=True, check=True, cwd=tmp_path, timeout=120
        )
        for threads in ("1", "3")
    ]
    assert found[0].stdout == found[1].stdout
    assert found[0].stdout.count(b"\n") == text.count(b"\n")
    assert found[0].stderr == found[1].stderr
