"""Several processes that run one program, as torchrun starts them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *words: str, world: int = 2, timeout: float = 240) -> Any:
    """What the first process prints last, as JSON.

    Args:
        program: Python source.
        words: its arguments.
        world: processes.
        timeout: seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        given = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in given.items()},
        }
        environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "MASTER_ADDR": "127.0.0.1"}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [child.communicate(timeout=timeout) for child in children]
    finally:
        for child in children:
            child.kill()
    assert all(child.returncode == 0 for child in children), [error[-3000:] for _, error in outputs]
    return json.loads(outputs[0][0].splitlines()[-1])
