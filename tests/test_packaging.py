"""The package as a user gets it, and the rules of docs/design.md section 3 that a machine can check."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "kernelbraid"
MAX_LINES = 600
LONGER_IMPLEMENTATIONS = {"attention/cpu.py": 800, "attention/gpu.py": 850, "logprob/cpu.py": 750}
"""One file each, every regime and the gradients in it: an audit takes a source of one file."""

MAY_IMPORT = {
    "contract": set(),
    "ops": {"contract"},
    "models": {"contract", "ops", "audit"},
    "rl": {"contract", "ops", "models"},
    "ir": {"contract"},
    "audit": {"contract", "ops", "ir"},
    "search": {"contract", "ops", "ir", "audit"},
    "integrations": {"contract", "ops", "models", "rl", "ir", "audit", "search", "report"},
    "report": {"contract", "ops", "models", "ir", "audit", "search"},
    "cli": {"contract", "ops", "ir", "audit", "search", "report", "models", "rl", "integrations"},
    "__main__": {"cli"},
    "__init__": {"contract", "ops", "search", "models"},
}
WHOLE_IMPLEMENTATIONS = {"reference.py", "cpu.py", "gpu.py", "gpu_sm90.py"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports anywhere, functions and type-checking blocks included."""
    package = ["kernelbraid", *path.relative_to(SRC).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part(name: str) -> str:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


@pytest.mark.parametrize("path", sources("src"), ids=lambda p: str(p.relative_to(SRC)))
def test_import_rule(path: Path) -> None:
    own = path.relative_to(SRC).parts[0].removesuffix(".py")
    for name in imported(path):
        if not name.startswith("kernelbraid."):
            continue
        if own == "__init__" and part(name) in {"__version__"}:
            continue
        used = part(name)
        if not (SRC / used).is_dir() and not (SRC / f"{used}.py").exists():
            continue  # `from kernelbraid import attention`: a public name, not a module
        assert used == own or used in MAY_IMPORT[own], f"{own} may not import {name}"


@pytest.mark.parametrize("path", sources("src/kernelbraid/ops"), ids=lambda p: str(p.relative_to(SRC)))
def test_whole_implementations_never_import_one_another(path: Path) -> None:
    if path.name not in WHOLE_IMPLEMENTATIONS:
        return
    others = {name.removesuffix(".py") for name in WHOLE_IMPLEMENTATIONS - {path.name}}
    assert not others & {name.rsplit(".", 1)[-1] for name in imported(path) if name.startswith("kernelbraid")}
    if path.name != "reference.py":
        assert not any(name.startswith("kernelbraid") for name in imported(path))


def test_every_folder_has_a_rule() -> None:
    tops = {path.stem if path.suffix else path.name for path in SRC.iterdir() if path.name != "__pycache__"}
    assert {top for top in tops if top != "py"} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "path", sources("src", "tests", "examples", "scripts"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_source_is_too_long(path: Path) -> None:
    most = LONGER_IMPLEMENTATIONS.get(str(path).removeprefix(f"{SRC / 'ops'}/"), MAX_LINES)
    assert len(path.read_text().splitlines()) <= most


def test_banned_names() -> None:
    banned = {"utils", "common", "core", "base", "manager", "helpers"}
    assert not [path for path in SRC.rglob("*") if path.stem in banned]


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in wanted:
        name = requirement.split(">")[0].split("=")[0].split("[")[0].lower()
        assert name in pinned, f"{name} has no exact version in constraints.txt"
        documented = (ROOT / "docs" / "dependencies.md").read_text().lower()
        assert f"`{name}`" in documented, f"docs/dependencies.md does not say what {name} is for"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    [made] = folder.glob("*.whl")
    return made


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("kernelbraid/", "kernelbraid-")) for name in names)
    held = set(names)
    needed = (
        "py.typed",
        "ops/attention/README.md",
        "ops/attention/cpu.py",
        "ops/attention/captured.npz",
        "search/prompts/rules.md",
        *(f"report/template/page.{kind}" for kind in ("html", "css", "js")),
    )
    for name in needed:
        assert f"kernelbraid/{name}" in held
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".db", ".nbi", ".nbc"))]


def test_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True, timeout=60)
    python = fresh / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120
    )
    [site] = (fresh / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import kernelbraid; print(kernelbraid.__file__, kernelbraid.__version__)")
    assert where.startswith(str(fresh)) and where.split()[1] == "0.1.0"
    listed = json.loads(run(str(fresh / "bin" / "kernelbraid"), "ops", "--json"))
    assert "attention" in {operator["name"] for operator in listed["operators"]}
    assert json.loads(run(str(python), "-m", "kernelbraid", "ops", "--json")) == listed
