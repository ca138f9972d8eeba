"""What a run tells: a row a rollout in a JSONL file and in TensorBoard, and a line for people."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROWS = "rollouts.jsonl"

Told = Callable[[Mapping[str, Any]], None]
"""Gets every row."""


class Log:
    """Rows of a run, one a rollout.

    Args:
        folder: where `rollouts.jsonl` is; made where needed.
        done: rollouts that the run goes on after: rows of later ones, which an interrupted run may have
            written after its last checkpoint, are left out.
        every: rollouts between two rows.
        tensorboard: write scalars for TensorBoard too (extra `tensorboard`).

    Raises:
        OSError: the folder cannot be written.
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """

    def __init__(self, folder: Path, *, done: int, every: int = 1, tensorboard: bool = False) -> None:
        self.path, self.every = folder / ROWS, every
        self._board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self._lines() if json.loads(line)["rollout"] < done]
        new = folder / f".new-{ROWS}"
        new.write_text("".join(kept), encoding="utf-8")
        os.replace(new, self.path)

    def _lines(self) -> list[str]:
        """Whole rows of the file; a last one that was cut off by a kill is left out."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row, where it is its turn."""
        if int(row["rollout"]) % self.every:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False, default=str) + "\n")
        if self._board is not None:
            for name, value in flat(row).items():
                self._board.add_scalar(name, value, row["rollout"])
            self._board.flush()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a row by path, without lists and texts."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found


def line(row: Mapping[str, Any], rollouts: int) -> str:
    """A row for people."""
    speeds = row["tokens_per_second"]
    batches = row["reused_batches"] + row["recomputed_batches"]
    reused = f"{row['reused_batches'] / batches:.0%}" if batches else "-"
    reward = "-" if row["reward"] is None else f"{row['reward']:.4f}"
    return (
        f"{row['rollout'] + 1}/{rollouts}  reward {reward}  tokens/s rollout {speeds['rollout']:.0f} "
        f"update {speeds['update']:.0f}  reused {reused}  mismatch {row['logprob_mismatch_max']:g}  "
        f"memory {row['memory_bytes'] / 2**30:.2f} GiB"
    )


class Watch:
    """A live line on standard error; where that is no terminal, a line a rollout."""

    def __init__(self, rollouts: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._rollouts, self._text = rollouts, Text
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if sys.stderr.isatty() else None

    def __enter__(self) -> "Watch":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, row: Mapping[str, Any]) -> None:
        told = line(row, self._rollouts)
        if self._live is not None:
            self._live.update(self._text(told))
        else:
            print(told, file=sys.stderr, flush=True)


def memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors held so far, on the CPU what the process holds now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)
