"""The wheel holds all that an installed mtkit needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mtkit

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")


@pytest.mark.slow
def test_mtkit_runs_from_its_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")  # no network: the build uses what is installed here
    shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=LEFT_OUT)  # a build leaves folders in its source
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, *build, str(tmp_path / "source")], check=True)
    (wheel,) = tmp_path.glob("mtkit-*.whl")
    there = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(there), str(wheel)], check=True)

    def said(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(there)},
        )
        return done.stdout

    assert said("-c", "import mtkit; mtkit.load; print(mtkit.__file__)") == f"{there}/mtkit/__init__.py\n"
    assert mtkit.__version__ in said("-m", "mtkit", "--version")
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes <= set(said("-m", "mtkit", "recipes").split())
    assert {path.stem for path in (ROOT / "studies").glob("*.yaml")} <= set(said("-m", "mtkit", "studies").split())
    assert "  measured select " in said("-m", "mtkit", "attentions", "nystrom")
    for name in ("py.typed", "serving/page.html"):
        assert (there / "mtkit" / name).is_file()
