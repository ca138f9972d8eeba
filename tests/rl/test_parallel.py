"""Two processes that train one model, on a CPU by gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from tests.rl.runs import config, curve, folder

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import json, os, sys
from pathlib import Path
from kernelbraid.rl.trainer import Trainer
from tests.rl.runs import config
made = config(rollouts=2, reuse={"old": sys.argv[2]})
with Trainer(made, Path(sys.argv[1])) as trainer:
    rows = []
    while trainer.done < 2:
        rows.append(trainer.step())
    digests = trainer.group.gather([trainer.policy.digest()])
names = [Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")]
assert not any("gloo" in name for name in names), f"threads of a closed group: {names}"
if trainer.group.first:
    print(json.dumps({"rows": rows, "digests": digests}))
"""


def run(place: Path, old: str) -> dict[str, list[object]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in given.items()}}
        environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-c", CHILD, str(place), old]
        children.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [child.communicate(timeout=200) for child in children]
    assert all(child.returncode == 0 for child in children), outputs
    found: dict[str, list[object]] = json.loads(outputs[0][0].splitlines()[-1])
    return found


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    one = curve(config(rollouts=2), tmp_path / "one")
    two = run(folder(tmp_path / "two"), "reuse")
    assert two["digests"][0] == two["digests"][1], "processes hold different weights"
    first: dict[str, list[float]] = two["rows"][0]  # type: ignore[assignment]
    assert first["reward"] == one[0][0], "the first rollout has other bits"
    assert first["loss"] == pytest.approx(one[0][1], rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(one[0][2], rel=1e-4)
    assert run(folder(tmp_path / "again"), "recompute")["digests"] == two["digests"]
