"""Train one configuration with several seeds: unified kernels, reusing and recomputing, and the vendor's.

    python scripts/reward_curves.py examples/smollm2_h200.yaml runs/smollm2 --model FOLDER
    python scripts/reward_curves.py examples/grpo_cpu.yaml runs/curves --rollouts 5

Writes FOLDER/curves.json and FOLDER/curves.svg; run again to go on after an interruption. Ends with 1 where
reusing log-probabilities changed a bit of any reward, loss, gradient norm or weight.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

from kernelbraid.report import curves as picture
from kernelbraid.rl.curves import ARMS, curves, held


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="of a training run")
    parser.add_argument("folder", type=Path, help="gets a folder a run, and the results")
    parser.add_argument("--model", help="replaces model.path")
    parser.add_argument("--rollouts", type=int, help="replaces the configured number")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated; 1, 2 and 3 by default")
    parser.add_argument("--arm", action="append", help=f"may be repeated; by default {', '.join(ARMS)}")
    given = parser.parse_args(words)
    document = YAML(typ="safe", pure=True).load(given.config.read_text(encoding="utf-8"))
    if given.model is not None:
        document["model"]["path"] = str(Path(given.model).resolve())
    if given.rollouts is not None:
        document["rollouts"] = given.rollouts
    found = curves(
        document,
        given.folder,
        seeds=given.seed or (1, 2, 3),
        arms=given.arm or ARMS,
        base=given.config.parent,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    file = given.folder / "curves.json"
    new = file.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    new.replace(file)
    picture.write(found, given.folder / "curves.svg")
    told = {name: value for name, value in found.items() if name not in ("rewards", "phase_seconds")}
    print(json.dumps(told, indent=1))
    return 0 if held(found) else 1


if __name__ == "__main__":
    sys.exit(main())
