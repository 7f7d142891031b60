"""The shape of the repository: small files, imports that run one way, tests that mirror the package, a light start."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

import mtkit

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "mtkit", ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 500
FULLEST_FOLDER = 20
ATTENTION = PACKAGE / "attention"
SHARED = [ATTENTION / "bases", ATTENTION / "kernels"]
FAMILIES = sorted({file.parent for file in ATTENTION.glob("*/[!_]*.py")} - set(SHARED))
MECHANISMS = sorted(file for family in FAMILIES for file in family.glob("[!_]*.py"))

FOUNDATION = {"errors", "version", "process", "device", "memory", "terminal", "storage", "recording"}
TEXT = FOUNDATION | {"recipe", "text"}
MODEL = TEXT | {"attention", "model", "data"}
TRAINING = MODEL | {"product_rate", "runs", "decoding", "evaluation", "training"}
BELOW = {
    "errors": set(),
    "version": set(),
    "process": set(),
    "terminal": set(),
    "recording": set(),
    "device": {"errors", "recording"},
    "memory": {"errors"},
    "storage": {"errors", "terminal"},
    "recipe": FOUNDATION,
    "product_rate": FOUNDATION | {"attention"},
    "text": TEXT,
    "attention": FOUNDATION,
    "data": TEXT,
    "model": TEXT | {"attention"},
    "runs": MODEL,
    "decoding": MODEL | {"runs"},
    "evaluation": MODEL | {"runs", "decoding"},
    "training": TRAINING,
    "experiments": TRAINING,
    "reporting": TRAINING,
    "interchange": TRAINING,
    "benchmark": TRAINING | {"experiments", "interchange"},
    "serving": MODEL | {"runs", "decoding"},
}
"""What each room may import besides itself; what is not listed (cli, the package itself) may import all."""

HEAVY = {
    "torch",
    "datasets",
    "sentencepiece",
    "matplotlib",
    "sacrebleu",
    "pydantic",
    "pyarrow",
    "numpy",
    "fastapi",
    "numba",
}


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
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imported(module: Path, known: Collection[str]) -> set[str]:
    """Those of the known modules that a module imports, or imports something from, late or not."""
    names = {name if name in known else name.rpartition(".")[0] for name in imports(module)}
    return names & set(known) - {name_of(module)}


def rooms_of(names: Iterable[str]) -> set[str]:
    """The rooms among imported names: `attention` of `mtkit.attention.sparse.band`."""
    rooms = {each.stem for each in PACKAGE.iterdir()}
    return {name.split(".")[1] for name in names if name.startswith("mtkit.")} & rooms


def upward(module: Path) -> set[str]:
    """The rooms that a module imports although they lie above or beside its own."""
    own = module.relative_to(PACKAGE).with_suffix("").parts[0]
    return rooms_of(imports(module)) - BELOW[own] - {own} if own in BELOW else set()


def name_of(module: Path) -> str:
    """The name that a module is imported by."""
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles(modules: Iterable[Path]) -> set[str]:
    """Names of the modules that import each other in a circle, or lie between two circles; late imports count too."""
    known = {name_of(module): module for module in modules}
    graph = {name: imported(module, known) for name, module in known.items()}
    left = set(graph)
    while ends := {name for name in left if not graph[name] & left or not any(name in graph[each] for each in left)}:
        left -= ends
    return left


def strangers(module: Path) -> set[str]:
    """The modules of families that an engine imports, and the helpers of other folders that anyone does."""
    in_families = {name_of(file) for family in FAMILIES for file in family.glob("*.py")}
    found = imported(module, in_families)
    helpers = {name for name in found if name.rpartition(".")[2].startswith("_")}
    own = name_of(module).rpartition(".")[0]
    return found if set(SHARED) & set(module.parents) else {name for name in helpers if name.rpartition(".")[0] != own}


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


def test_no_imports_run_in_a_circle() -> None:
    assert not circles(MODULES)


def test_the_package_declares_the_names_that_it_imports_lazily() -> None:
    """So that `circles` counts them."""
    assert {f"{module}.{name}" for name, module in mtkit.EXPORTS.items()} <= set(imports(PACKAGE / "__init__.py"))


@each_module
def test_engines_import_no_family_and_nobody_the_helpers_of_another_folder(module: Path) -> None:
    assert not strangers(module)


@pytest.mark.parametrize(
    "folder", sorted({module.parent for module in MODULES}), ids=lambda folder: str(folder.relative_to(ROOT))
)
def test_a_folder_holds_at_most_twenty_files(folder: Path) -> None:
    """A family of mechanisms aside, which has one file for each, and the commands, likewise."""
    modules = {module.stem for module in folder.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= FULLEST_FOLDER or folder in (*FAMILIES, PACKAGE / "cli")


class TestWalk:
    """Wrong imports, planted, are found."""

    @pytest.fixture(autouse=True)
    def _house(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        here, self.attention = sys.modules[__name__], tmp_path / "mtkit" / "attention"
        monkeypatch.setattr(here, "PACKAGE", tmp_path / "mtkit")
        monkeypatch.setattr(here, "ROOT", tmp_path)
        monkeypatch.setattr(here, "ATTENTION", self.attention)
        monkeypatch.setattr(here, "SHARED", [self.attention / "kernels"])
        monkeypatch.setattr(here, "FAMILIES", [self.attention / "sparse"])
        self.root = tmp_path / "mtkit"

    def written(self, path: str, text: str) -> Path:
        """The file at a path below the package, with that text."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self.root / path

    def test_an_arrow_upwards(self) -> None:
        for room in ("attention", "training"):
            self.written(f"{room}/__init__.py", "")
        late = "def late():\n    from ..training import loop\n    from mtkit import attention\n"
        assert upward(self.written("model/wrong.py", late)) == {"training"}

    def test_a_circle(self) -> None:
        modules = [
            self.written("data/__init__.py", "from mtkit.data.one import x\n"),
            self.written("data/one.py", "def late():\n    from mtkit.data import two\n"),
            self.written("data/two.py", "from .three import x\nfrom mtkit.data.four import x\n"),
            self.written("data/three.py", "from mtkit.data.one import x\n"),
            self.written("data/four.py", "from mtkit.data.five import x\n"),
            self.written("data/five.py", ""),
            self.written("model/top.py", "from mtkit.data.three import x\n"),
        ]
        assert circles(modules) == {"mtkit.data.one", "mtkit.data.two", "mtkit.data.three"}

    @pytest.mark.parametrize("importing", ["import mtkit", "import mtkit as m", "from mtkit import version"])
    def test_a_circle_through_the_names_that_the_package_exports(self, importing: str) -> None:
        package = self.written("__init__.py", "if TYPE_CHECKING:\n    from mtkit.api import load as load\n")
        api = self.written("api.py", f"def load():\n    {importing}\n")
        assert circles([package, api]) == {"mtkit", "mtkit.api"}

    def test_an_engine_that_takes_from_a_family(self) -> None:
        taking = "from mtkit.attention.{} import x\n".format
        for name in ("sparse/band", "sparse/_spans", "kernels/b", "slots"):
            self.written(f"attention/{name}.py", "")
        engine = self.written("attention/kernels/a.py", taking("sparse.band") + taking("slots"))
        assert strangers(engine) == {"mtkit.attention.sparse.band"}
        assert not strangers(self.written("attention/sparse/bp.py", taking("sparse._spans") + taking("kernels.b")))
        assert strangers(self.written("attention/linear/b.py", taking("sparse._spans")))


@pytest.mark.parametrize("module", MECHANISMS, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_a_mechanism_imports_no_other(module: Path) -> None:
    assert not imported(module, {name_of(mechanism) for mechanism in MECHANISMS})


@pytest.mark.parametrize("folder", sorted(TESTS.rglob("*/")), ids=lambda folder: str(folder.relative_to(TESTS)))
def test_tests_mirror_the_package(folder: Path) -> None:
    """tests/decoding/test_beam.py tests mtkit/decoding/beam.py; test_beam_search.py may stand beside it."""
    there = folder.relative_to(TESTS)
    if not there.parts or there.parts[0] in ("contract", "flows", "gpu", "__pycache__"):
        return
    modules = {module.stem.removeprefix("_") for module in (PACKAGE / there).glob("*.py")}
    for test in folder.glob("test_*.py"):
        subject = test.stem.removeprefix("test_")
        assert any(subject == module or subject.startswith(f"{module}_") for module in modules), test.name


def test_two_tests_of_one_name_can_stand_in_two_rooms() -> None:
    """pytest tells files of the same name apart by their packages."""
    folders = {test.parent for test in TESTS.rglob("test_*.py")}
    assert not {str(folder) for folder in folders if not (folder / "__init__.py").exists()}


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("cli/**/*.py")), ids=lambda module: module.stem)
def test_commands_import_what_is_heavy_when_they_run(module: Path) -> None:
    top = set(imports(module, anywhere=False))
    assert not {name for name in top if name.split(".")[0] in HEAVY}
    assert rooms_of(top) <= {"errors", "version", "terminal", "cli"}


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
