import json
import os
import sys

import pytest

from kernelbraid.contract import Source
from kernelbraid.ops import installed

ONE = Source("ANSWER = 1\n", label="one")
TWO = Source("ANSWER = 2\n", label="two")
WHERE = {"architecture": "cpu", "device": "Some CPU @ 2.00GHz"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def put(source=ONE, operator="attention", contract="abc", **where):
    return installed.install(
        operator, source, **{**WHERE, **where}, contract=contract, record={"certificate": {"seed": 3}}
    )


def test_nothing_is_installed_at_first(home):
    assert installed.active("attention", *WHERE.values()) is None
    assert installed.remove("attention", *WHERE.values()) is False
    assert not home.exists()


def test_install_replace_and_remove():
    put(ONE)
    path = put(TWO)
    found = installed.read("attention", *WHERE.values())
    assert found.source == TWO and found.path == path and found.contract == "abc"
    assert found.record == {"certificate": {"seed": 3}}
    assert installed.active("attention", *WHERE.values()).sha256 == TWO.sha256
    assert [p.name for p in path.parent.glob("*.py")] == [path.name]
    assert installed.remove("attention", *WHERE.values()) is True
    assert installed.active("attention", *WHERE.values()) is None
    assert list(path.parent.iterdir()) == []


def test_devices_and_operators_are_apart():
    put(ONE)
    put(TWO, device="Some CPU  @ 2.00GHz")
    put(TWO, operator="matmul")
    assert installed.active("attention", *WHERE.values()) == ONE
    assert installed.active("attention", "sm_90", WHERE["device"]) is None


@pytest.mark.parametrize("damage", ["edit", "lose", "record", "foreign record", "empty record"])
def test_tampering_is_an_error_until_demoted(damage):
    path = put()
    record = path.parent / installed.RECORD
    if damage == "edit":
        path.write_text("ANSWER = 3\n")
    elif damage == "lose":
        path.unlink()
    elif damage == "record":
        record.write_text(record.read_text()[:20])
    elif damage == "foreign record":
        record.write_text(json.dumps({"hello": 1}))
    else:
        record.write_text("")
    with pytest.raises(RuntimeError, match="kernelbraid demote attention"):
        installed.active("attention", *WHERE.values())
    assert installed.remove("attention", *WHERE.values()) is True
    assert installed.active("attention", *WHERE.values()) is None


def test_failed_install_keeps_the_old_one(monkeypatch):
    put(ONE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RuntimeError, match="No space left on device"):
        put(TWO)
    monkeypatch.undo()
    monkeypatch.setenv("KERNELBRAID_HOME", str(installed.home()))


def test_crash_between_source_and_record_keeps_the_old_one(home, monkeypatch):
    path = put(ONE)
    write = installed._write
    monkeypatch.setattr(installed, "_write", lambda p, data: write(p, data) if p.suffix == ".py" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        put(TWO)
    assert installed.active("attention", *WHERE.values()) == ONE
    assert path.exists()


def test_home_that_is_a_file_is_one_clear_error(home):
    home.write_text("")
    with pytest.raises(RuntimeError, match="cannot install attention"):
        put()


def test_load_runs_the_checked_text():
    path = put()
    found = installed.read("attention", *WHERE.values())
    path.write_text("ANSWER = 3\n")
    module = installed.load(found, "attention")
    assert module.ANSWER == 1
    assert sys.modules[module.__name__] is module
    assert installed.load(found, "attention") is module


def test_load_of_a_broken_source_leaves_nothing():
    put(Source("1 / 0\n"))
    found = installed.read("attention", *WHERE.values())
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        installed.load(found, "attention")
    assert set(sys.modules) == before


def test_home_is_the_users_data_folder_by_default(monkeypatch):
    monkeypatch.delenv("KERNELBRAID_HOME")
    assert installed.home().name == "kernelbraid"
