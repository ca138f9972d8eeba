"""The layout for huggingface/kernels that scripts/kernels_layout.py writes: it loads, with the same bits."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import kernels_layout

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"torch", "triton", "numpy"}
COMPARE = """
import sys
from pathlib import Path
import torch
{load}
assert not [name for name in sys.modules if name.split(".")[0] == "kernelbraid"]
x, w = torch.randn(5, 64), torch.randn(64)
ours = ops.rms_norm(x, w, eps=1e-6)
import kernelbraid
theirs = kernelbraid.rms_norm(x, w, eps=1e-6)
assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
q, k, v = torch.randn(30, 4, 64), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
starts = torch.tensor([0, 10, 30], dtype=torch.int32)
try: ops.attention(q, k, v, cu_seqlens=starts, max_seqlen=20, window=5)
except ValueError as error: print("refused", error)
print(len(ops.__all__), "functions of", ops.__name__)
"""
ATTENTION = """
q.requires_grad_()
found = []
for each in (ops, kernelbraid):
    out = each.attention(q, k, v, cu_seqlens=starts, max_seqlen=20)
    found.append((out.detach(), *torch.autograd.grad(out.sum(), q)))
for one, other in zip(*found, strict=True):
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
print("attention too")
"""
BY_IMPORT = """
import importlib.util
[init] = Path({out!r}).glob("build/torch-cpu/__init__.py")
spec = importlib.util.spec_from_file_location("_loaded", init)
ops = importlib.util.module_from_spec(spec)
sys.modules["_loaded"] = ops
spec.loader.exec_module(ops)
"""
BY_KERNELS = """
from kernels import get_local_kernel
ops = get_local_kernel(Path({out!r}), backend="cpu")
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernels") / "layout"
    assert kernels_layout.main([str(made), "--repo-id", "someone/kernelbraid-ops", "--local", "cpu"]) == 0
    return made


def run(code: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Numba's cache names the module that it compiled: each process loads the files under another name.
        "NUMBA_CACHE_DIR": tempfile.mkdtemp(dir=folder.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_variant_gives_the_packages_bits_by_import(out: Path) -> None:
    said = run(COMPARE.format(load=BY_IMPORT.format(out=str(out))), out)
    assert "refused window" in said
    assert f"{len(kernels_layout.functions())} functions" in said


@pytest.mark.slow
def test_so_does_attention_and_its_gradient(out: Path) -> None:
    assert "attention too" in run(COMPARE.format(load=BY_IMPORT.format(out=str(out))) + ATTENTION, out)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("kernels") is None, reason="needs `kernels`: pip install kernels")
def test_the_variant_gives_the_packages_bits_by_kernels(out: Path) -> None:
    said = run(COMPARE.format(load=BY_KERNELS.format(out=str(out))) + ATTENTION, out)
    assert "attention too" in said
    assert "functions of _kernelbraid_ops_cpu_" in said


@pytest.mark.slow
def test_its_own_tests_pass(out: Path) -> None:
    """Those that travel with it, on the CPU variant under the name that they import."""
    (out / "build" / "kernelbraid_ops").symlink_to(out / "build" / "torch-cpu")
    code = (
        "import sys, pytest; sys.path.insert(0, 'build'); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-c/dev/null', '--rootdir=.', 'tests']))"
    )
    assert "2 passed" in run(code, out)


def test_what_is_published_imports_what_is_allowed(out: Path) -> None:
    package = out / "torch-ext" / kernels_layout.MODULE
    files = sorted(package.rglob("*.py"))
    assert (package / "ops" / "attention" / "gpu.py") in files
    assert not [path for path in files if path.name in ("cpu.py", "reference.py", "peers.py", "peers_gpu.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_operators_register_under_the_builders_namespace(out: Path) -> None:
    text = "".join(path.read_text() for path in (out / "torch-ext").rglob("registered.py"))
    assert text.count("custom_op(add_op_namespace_prefix(") == text.count(".custom_op(") > 20
    assert not (out / "torch-ext" / kernels_layout.MODULE / "_ops.py").exists()  # kernel-builder writes it


def test_the_build_file_and_the_metadata(out: Path) -> None:
    stated = tomllib.loads((out / "build.toml").read_text())
    assert stated["general"]["name"] == "kernelbraid-ops"
    assert stated["general"]["backends"] == ["cuda"] and "torch-noarch" in stated
    assert stated["general"]["hub"]["repo-id"] == "someone/kernelbraid-ops"
    variant = out / "build" / "torch-cpu"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].isidentifier()
    held = {path.relative_to(variant).as_posix() for path in variant.rglob("*.py")}
    assert held == set(metadata["digest"]["files"])
    card = (out / "CARD.md").read_text()
    assert all(f"- `{name}`" in card for name in kernels_layout.functions())


def test_nothing_is_written_over(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_layout.main([str(out)]) == 2
    assert "must not exist" in capsys.readouterr().err
    assert kernels_layout.main([str(tmp_path / "x"), "--repo-id", "nowhere"]) == 2
    assert not (tmp_path / "x").exists()


def test_a_name_that_cannot_be_made_relative_is_an_error() -> None:
    assert kernels_layout.relative("from kernelbraid.ops import rows\n", 2) == "from ...ops import rows\n"
    for text in ("import kernelbraid\n", 'x = "kernelbraid.ops"\n', 'y = "kernelbraid::attention"\n'):
        with pytest.raises(ValueError, match="cannot be made relative"):
            kernels_layout.relative(text, 1)
