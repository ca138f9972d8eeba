"""The fingerprint of a machine."""

import subprocess
import sys
import time

import numpy as np
import pytest

from kernelbraid.audit import environment
from kernelbraid.ops import installed


def test_the_fingerprint_of_this_machine() -> None:
    found = environment.fingerprint(rates=False)
    assert found.architecture == "cpu" and found.device == installed.cpu_model()
    assert found.cores >= 1 and found.memory_gib > 0.1 and found.cache_bytes >= 1 << 18
    assert {"python", "numpy", "numba"} <= dict(found.versions).keys()
    assert found.flops == found.bandwidth == 0
    assert found.comparable(environment.fingerprint(rates=False))


def test_rates_are_the_best_of_every_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_rates", {"cpu": [(1.0, 1e18)]})
    assert environment.measured_rates() == (1.0, 1e18)
    flops, bandwidth = environment.measured_rates(again=True)
    matrix = np.ones((512, 512), np.float32)
    start = time.perf_counter()
    matrix @ matrix
    product = 2.0 * 512**3 / (time.perf_counter() - start)
    assert product / 2 < flops < 1e3 * product and bandwidth == 1e18


def test_versions_are_read_without_importing() -> None:
    code = "from kernelbraid.audit import environment; environment.fingerprint(rates=False); import sys; "
    code += "print([name for name in ('numba', 'torch', 'triton', 'pynvml') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.require_device("cpu")
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        environment.require_device("tpu")
    monkeypatch.setattr(environment, "Driver", missing)
    with pytest.raises(ValueError, match=r"this machine has no NVIDIA driver .*; choose"):
        environment.require_device("cuda")
    monkeypatch.setattr(environment, "Driver", Present)
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: False)
    with pytest.raises(ValueError, match="NVIDIA X is here, but torch was installed without CUDA"):
        environment.require_device("cuda")
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: True)
    environment.require_device("cuda")


def missing() -> None:
    raise RuntimeError("this machine has no NVIDIA driver (libcuda.so.1)")


class Present:
    def name(self) -> str:
        return "NVIDIA X"
