"""How fast the rollout engine draws a load of requests, beside the bound of the bytes that it must read.

    python scripts/rollout_speed.py --device cuda        # Qwen3-1.7B's sizes, 256 x 512 in x 1024 out
    python scripts/rollout_speed.py --device cuda --kernels vendor
    python scripts/rollout_speed.py --model SmolLM2-135M --requests 8 --prompt 20 --response 20 --repeated 4

Weights are random. Some of the requests are drawn again a few at a time, and tokens and log-probabilities
compared with those of the whole load, as integers: with unified kernels none may differ, and the script ends
with 1 where one does. One JSON document on standard output, progress on standard error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelbraid.rl.speed import KERNELS, Load, load_speed


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen3-1.7B", help="a name, for random weights, or a folder")
    for name in ("requests", "prompt", "response", "repeated", "step_tokens"):
        default = Load.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--concurrency", type=int, action="append", help="of the repeated ones; may be repeated; 1 and 8"
    )
    parser.add_argument("--kernels", choices=KERNELS, default="unified")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bandwidth", type=float, help="bytes a second; measured by default")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the document there too")
    given = vars(parser.parse_args(words))
    place, concurrency = given.pop("write"), given.pop("concurrency")
    if concurrency:
        given["concurrencies"] = tuple(concurrency)
    found = load_speed(Load(**given), lambda text: print(text, file=sys.stderr, flush=True))
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if place is not None:
        temporary = place.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(place)
    print(text, end="")
    unequal = any(each["unequal_tokens"] or each["unequal_logprobs"] for each in found["repeats"])
    return 1 if unequal and given["kernels"] == "unified" else 0


if __name__ == "__main__":
    sys.exit(main())
