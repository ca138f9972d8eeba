"""Arms of a comparison measured in a process of their own: `python -m kernelbraid.rl.arm` and a job as JSON.

Arms of one process share kernels, model and optimizer and differ in where old log-probabilities come from.
They take turns step by step, after rollouts that are not timed and whose recorded log-probabilities are all
computed again and compared as integers. Running out of memory ends the process, not the comparison.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernelbraid.rl.config import Old, parse_config
from kernelbraid.rl.spot_check import OnMismatch, SpotCheck
from kernelbraid.rl.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures."""

    config: dict[str, Any]
    """A configuration, as YAML gives it."""
    folder: str
    """What its paths are relative to; checkpoints and logs go where the configuration says."""
    olds: tuple[str, ...]
    """Where old log-probabilities come from, one an arm, in the order of their turns."""
    steps: int
    """Timed rollouts of each arm, each with its update."""
    warmup: int = 1
    """Rollouts before these."""
    warmup_tokens: int | None = None
    """Of a completion of those, where fewer do."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Job":
        found = json.loads(text)
        return cls(**{**found, "olds": tuple(found["olds"])})


def measure(job: Job, told: Callable[[str], None]) -> dict[str, Any]:
    """Run a job in this process.

    Args:
        job: what to do.
        told: gets a few words a step.

    Returns:
        `arms` (by `old`: milliseconds and phases of every step, tokens, rewards, losses), `compared` and
        `unequal` numbers of the rollouts before them, `memory_bytes`, `mismatch`.

    Raises:
        ValueError, MemoryError, RuntimeError: as a training run.
    """
    config = parse_config(job.config)
    arms: dict[str, list[dict[str, Any]]] = {old: [] for old in job.olds}
    with Trainer(config, job.folder, resume=False) as trainer:
        most = config.sampling.max_tokens
        everything = SpotCheck(config.rollout.completions, on_mismatch=OnMismatch.FALL_BACK)
        trainer.switch(Old.REUSE, check=everything, max_tokens=min(most, job.warmup_tokens or most))
        for number in range(job.warmup):
            told(f"rollout {number + 1} of {job.warmup} that is not timed")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # other bits are counted, and told at the end
                trainer.step()
        counted = trainer.old.counters.document()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()
        for number in range(job.steps):
            for old in job.olds:
                trainer.switch(Old(old), check=config.reuse.spot_check, max_tokens=most)
                start = time.perf_counter()
                row = trainer.step()
                ms = 1e3 * (time.perf_counter() - start)
                told(f"{old} {number + 1} of {job.steps}: {ms:,.0f} ms, {row['tokens']} tokens drawn")
                arms[old].append({"ms": ms, **{name: row[name] for name in _KEPT}})
        spot = trainer.old.counters.unequal_tokens - counted["unequal_tokens"]
        return {
            "arms": arms,
            "compared": counted["checked_tokens"],
            "unequal": counted["unequal_tokens"] + spot,
            "mismatch": _finite(counted["logprob_mismatch_max"]),
            "memory_bytes": row["memory_bytes"] if job.steps else 0,
            "bits": trainer.bits,
            "operators": trainer.policy.operators.arithmetic,
        }


_KEPT = ("phase_seconds", "tokens", "reward", "loss", "grad_norm", "optimizer_steps", "mean_length")


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _main() -> int:
    """Lines of JSON on standard output: `told` as it goes, and one `result` or `failed`."""

    def send(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    job = Job.loads(sys.stdin.read())
    try:
        send(result=measure(job, lambda text: send(told=text)))
    except (MemoryError, RuntimeError, ValueError, ModuleNotFoundError, FloatingPointError) as error:
        memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        text = " ".join(str(error).split()) or type(error).__name__
        send(failed=f"out of memory: {text}" if memory else f"{type(error).__name__}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
