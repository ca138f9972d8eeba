"""The scaled sums of `tests/audit/toy.py` on a GPU, in Triton, honest and hostile.

The same operator with the same calls; its contract has `graph_replay` besides.
"""

from dataclasses import replace

from tests.audit import toy

from kernelbraid.contract import Relation, Source

ROOT = '''
import torch
import triton
import triton.language as tl

BLOCK = 16
WARPS = 1

KNOBS = {"BLOCK": ("numeric", (8, 16, 32)), "WARPS": ("schedule", (1, 2))}


@triton.jit(do_not_specialize=["ends", "rows"])
def sums_kernel(x, ends, rows, out, scale, width: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    c = tl.arange(0, COLUMNS)
    inside_row = c < width
    at = 0
    for i in range(b):
        at += tl.load(rows + i)
    start = tl.load(ends + b)
    stop = tl.load(ends + b + 1)
    first = stop - tl.load(rows + b)
    before = tl.zeros([COLUMNS], tl.float32)
    inside = tl.zeros([COLUMNS], tl.float32)
    for t in range(start, stop):
        opens = (t - start) % BLOCK == 0
        before = tl.where(opens, before + inside, before)
        inside = tl.where(opens, 0.0, inside)
        inside += tl.load(x + t * width + c, mask=inside_row, other=0.0) * scale
        tl.store(out + (at + t - first) * width + c, before + inside, mask=inside_row & (t >= first))


def scaled_sums(x, ends, rows, scale, out):
    """x [T, width], ends [B + 1], rows [B]; the last rows[b] of each request go to out [R, width]."""
    batch, width = rows.numel(), x.shape[1]
    if batch:
        sums_kernel[(batch,)](
            x, ends, rows, out, scale, width, triton.next_power_of_2(width), BLOCK,
            num_warps=WARPS, enable_fp_fusion=False,
        )


def numerics(constant_axes):
    return {"block": BLOCK}


def schedule(axes, knobs):
    return {"warps": knobs["WARPS"]}
'''

SUMS = replace(
    toy.SUMS,
    backend="cuda",
    contract=replace(
        toy.CONTRACT,
        relations=(
            *toy.CONTRACT.relations,
            Relation("graph_replay", "captured calls on other contents", toy.FORWARD),
        ),
    ),
)


def root(label: str = "root") -> Source:
    return Source(ROOT, label)


def variant(*edits: tuple[str, str], label: str = "candidate") -> Source:
    """The root with pieces of its text replaced; each must occur."""
    text = ROOT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return Source(text, label)


def hostile(body: str, *, top: str = "", after: str = "") -> Source:
    """The root whose every call runs `body` first and `after` last; `top` runs at import."""
    first = "    batch, width = rows.numel(), x.shape[1]\n"
    text = ROOT.replace(first, _indented(body) + first, 1)
    last = "\n\ndef numerics"
    return Source(f"{top}\n{text.replace(last, _indented(after) + last, 1)}", "hostile")


def _indented(lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines.splitlines())


SLOWER = variant(
    (
        "        inside += tl.load",
        "        for _ in range(8):\n            at = at * 1\n        inside += tl.load",
    ),
    label="slower",
)

WRITES_INPUTS = hostile("", after="x.add_(1)")
WRITES_INPUTS_LATER = hostile("", top="calls = []", after="calls.append(1)\nif len(calls) > 40: x.add_(1)")
STALE = hostile("if done: return\ndone.append(1)", top="done = []")
LATER_OTHERWISE = hostile(
    "",
    top="import torch\nseen = torch.zeros(1, device='cuda')",
    after="seen.add_(1)\nout.copy_(torch.where(seen > 3000, out + 1, out))",
)
HANGS = hostile("while True: pass")
HANGS_ON_THE_DEVICE = hostile("torch.cuda._sleep(40_000_000_000)")
READS_LENGTHS = hostile("assert rows.tolist() is not None")
BAKED = hostile(
    "key = ends.data_ptr(), len(ends)\n"
    "kept.setdefault(key, None if torch.cuda.is_current_stream_capturing() else ends.clone())\n"
    "ends = kept[key] if torch.cuda.is_current_stream_capturing() else ends",
    top="kept = {}",
)
"""Captures the lengths that were there at its first call."""
FALSE_CLOCK = hostile(
    "",
    top="""
import sys
slot = sys.modules['__main__'].DeviceSlot
honest = slot.run
def lying(self, first, count, repeats, clock):
    return honest(self, first, count, repeats, clock) * 0.1
slot.run = lying
""",
)
ILLEGAL_ADDRESS = hostile("out = out[:1].as_strided((1 << 40,), (1,), 0)[1 << 39 :].view(-1, width)")
EATS_MEMORY = hostile("kept.append(torch.empty(1 << 39, dtype=torch.uint8, device='cuda'))", top="kept = []")
