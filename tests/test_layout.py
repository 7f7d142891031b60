"""The shape of the repository: small files, imports that run one way, tests that mirror the package, a light start."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "mtkit", ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 350

FOUNDATION = {"errors", "files", "languages", "device"}
BELOW = {
    "attention": FOUNDATION,
    "data": FOUNDATION | {"recipe", "data_settings"},
    "model": FOUNDATION | {"recipe", "attention"},
    "runs": FOUNDATION | {"recipe", "recipe_file", "attention", "model", "data"},
    "decoding": FOUNDATION | {"recipe", "attention", "model", "data", "runs"},
    "evaluation": FOUNDATION | {"recipe", "attention", "model", "data", "runs", "decoding"},
    "training": FOUNDATION | {"yaml_text", "recipe", "attention", "model", "data", "runs", "decoding", "evaluation"},
    "comparison": FOUNDATION | {"recipe", "attention", "model", "data", "runs", "decoding", "evaluation", "training"},
    "benchmark": FOUNDATION | {"recipe", "attention", "model", "data", "runs", "decoding", "evaluation", "training"},
    "errors": set(),
    "languages": set(),
    "files": {"errors"},
    "device": {"errors"},
    "recipe": FOUNDATION | {"presets", "settings", "data_settings", "recipe_file"},
    "recipe_file": {"errors", "yaml_text"},
    "yaml_text": set(),
    "recipe_head": {"errors", "recipe_file"},
    "data_settings": {"settings"},
    "settings": set(),
    "presets": set(),
}
"""What each room may import besides itself; what is not listed (cli, the package itself) may import all."""

HEAVY = {"torch", "datasets", "sentencepiece", "matplotlib", "sacrebleu", "pydantic", "pyarrow", "numpy"}


def imports(module: Path, *, anywhere: bool = True) -> Iterator[str]:
    """Names that a module imports, relative ones resolved; `anywhere` counts imports inside functions too."""
    tree = ast.parse(module.read_text())
    package = module.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) + "." if node.level else ""
            source = f"{base}{node.module or ''}".rstrip(".")
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def rooms_of(names: Iterable[str]) -> set[str]:
    """The rooms among imported names: `attention` of `mtkit.attention.sparse.band`."""
    rooms = {each.stem for each in PACKAGE.iterdir()}
    return {name.split(".")[1] for name in names if name.startswith("mtkit.")} & rooms


def upward(module: Path) -> set[str]:
    """The rooms that a module imports although they lie above or beside its own."""
    own = module.relative_to(PACKAGE).with_suffix("").parts[0]
    return rooms_of(imports(module)) - BELOW[own] - {own} if own in BELOW else set()


each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))


@pytest.mark.parametrize(
    "module", [*MODULES, *sorted(TESTS.rglob("*.py"))], ids=lambda module: str(module.relative_to(ROOT))
)
def test_a_file_holds_one_idea(module: Path) -> None:
    assert len(module.read_text().split("\n")) <= LONGEST_FILE + 1
    assert module.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}


@each_module
def test_imports_run_one_way(module: Path) -> None:
    assert not upward(module), f"{module.relative_to(ROOT)} imports from {upward(module)}"


def test_the_walk_of_imports_catches_an_arrow_upwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "mtkit")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name in ("attention", "model", "training"):
        (tmp_path / "mtkit" / name).mkdir(parents=True)
    module = tmp_path / "mtkit" / "model" / "wrong.py"
    module.write_text("def late():\n    from ..training import loop\n    from mtkit import attention\n")
    assert upward(module) == {"training"}


@pytest.mark.parametrize(
    "module", sorted(PACKAGE.glob("attention/*/[!_]*.py")), ids=lambda module: str(module.relative_to(PACKAGE))
)
def test_a_mechanism_imports_no_other(module: Path) -> None:
    own = f"mtkit.attention.{module.parent.name}"
    mechanisms = {f"mtkit.attention.{each.parent.name}.{each.stem}" for each in PACKAGE.glob("attention/*/[!_]*.py")}
    assert not set(imports(module)) & mechanisms
    assert own not in set(imports(module))


@pytest.mark.parametrize("folder", sorted(TESTS.rglob("*/")), ids=lambda folder: str(folder.relative_to(TESTS)))
def test_tests_mirror_the_package(folder: Path) -> None:
    """tests/decoding/test_beam.py tests mtkit/decoding/beam.py; test_beam_search.py may stand beside it."""
    there = folder.relative_to(TESTS)
    if not there.parts or there.parts[0] in ("contract", "flows", "__pycache__"):
        return
    modules = {module.stem.removeprefix("_") for module in (PACKAGE / there).glob("*.py")}
    for test in folder.glob("test_*.py"):
        subject = test.stem.removeprefix("test_")
        assert any(subject == module or subject.startswith(f"{module}_") for module in modules), test.name


def test_two_tests_of_one_name_can_stand_in_two_rooms() -> None:
    """pytest tells files of the same name apart by their packages."""
    folders = {test.parent for test in TESTS.rglob("test_*.py")}
    assert not {str(folder) for folder in folders if not (folder / "__init__.py").exists()}


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("cli/*.py")), ids=lambda module: module.stem)
def test_commands_import_what_is_heavy_when_they_run(module: Path) -> None:
    top = set(imports(module, anywhere=False))
    assert not {name for name in top if name.split(".")[0] in HEAVY}
    assert rooms_of(top) <= {"errors", "cli"}


def test_help_loads_nothing_heavy() -> None:
    script = f"""
import sys
from mtkit.cli.app import main

sys.argv = ["mtkit", "--help"]
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
loaded = set({sorted(HEAVY)}) & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "translate" in done.stdout
