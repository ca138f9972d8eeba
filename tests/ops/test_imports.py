import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "sqlalchemy", "pydantic")


@pytest.mark.parametrize(
    "module",
    ["kernelbraid", "kernelbraid.ops", "kernelbraid.ops.attention.spec", "kernelbraid.ops.installed"],
)
def test_import_is_light(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_operators_need_torch_and_no_store():
    code = f"from kernelbraid import attention; import sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['torch']"


def test_unknown_names_are_refused():
    import kernelbraid

    assert kernelbraid.__version__ == "0.1.0"
    assert "attention" in dir(kernelbraid)
    with pytest.raises(AttributeError, match="flash"):
        _ = kernelbraid.flash
