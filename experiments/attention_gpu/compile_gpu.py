"""Compile every specialisation that gpu.py can choose, without a GPU; print registers, spills and shared memory."""

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

import gpu
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
INTS = {"CU", "LENGTHS", "TABLE"}
FLOATS = {"LSE", "PA", "PM", "PL", "X"}  # pointers to float32


def build(kernel, arch, constants, warps, stages, dtype="bf16", label=""):
    signature, attrs, constants = {}, {}, dict(constants)
    for i, param in enumerate(kernel.params):
        name = param.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        bulk = ("Q", "DO") if "dkv" in kernel.__name__ else ("K", "V")
        if name in bulk and constants.get("TMA"):
            rows = constants["BM" if "Q" in bulk else "BN"]
            lead = "1," if constants.get("PAGE") else ""
            signature[name] = f"tensordesc<{dtype}[{lead}{rows},1,{constants['D']}]>"
        elif name in INTS:
            signature[name] = "*i32"
        elif name in FLOATS:
            signature[name] = "*fp32"
        elif name in ("scale", "out_scale"):
            signature[name] = "fp32"
        elif name[0].isupper():
            signature[name] = "*" + dtype
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or (signature[name] == "i32" and not param.do_not_specialize):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    t = time.time()
    out = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=False),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(out.asm["cubin"])
        usage, sass = (
            subprocess.run([TOOLS + "/cuobjdump", option, path], capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    spills = sass.count("STL") + sass.count("LDL")
    regs, stack = (int(found.group(1)), int(found.group(2))) if found else (-1, -1)
    print(
        f"sm_{arch} {label:58s} w{warps} st{stages} regs {regs:3d} stack {stack:3d} spill {spills:3d} smem {out.metadata.shared:6d} {time.time() - t:4.1f}s",
        "" if not spills else "  <-- SPILL",
        flush=True,
    )
    return regs, spills, out.metadata.shared


def fwd(arch, warps=4, stages=3, dtype="bf16", **k):
    c = dict(
        HQ=32,
        G=4,
        PACK=1,
        D=128,
        BM=64,
        BN=64,
        EARLY=256,
        UNTIL=8192,
        CHUNK=1024,
        PAGE=0,
        WINDOW=1 << 30,
        IDS=1,
        TMA=False,
        SPLIT=False,
        SWAP=False,
        HAS_LSE=True,
        PDL=False,
    )
    c.update(k)
    label = "fwd " + " ".join(
        f"{a}={c[a]}"
        for a in ("D", "BM", "BN", "PACK", "PAGE", "WINDOW", "TMA", "SPLIT", "SWAP")
        if c[a] not in (False, 1 << 30)
    )
    return build(gpu.attention_fwd_kernel, arch, c, warps, stages, dtype, label)


def bwd(arch, which, warps, stages, BM, BN, D=128, G=4, dtype="bf16", TMA=False):
    kernel = dict(dq=gpu.dq_kernel, dkv=gpu.dkv_kernel)[which]
    return build(
        kernel,
        arch,
        dict(HQ=32, G=G, D=D, BM=BM, BN=BN, TMA=TMA, PAD=128),
        warps,
        stages,
        dtype,
        f"{which} D={D} BM={BM} BN={BN} G={G} TMA={TMA}",
    )


def small(arch, which, **k):
    kernel, constants, warps = {
        "merge": (
            gpu.attention_merge_kernel,
            dict(HQ=32, D=128, EARLY=256, UNTIL=8192, CHUNK=1024, AHEAD=16, HAS_LSE=True, PDL=arch >= 90),
            1,
        ),
        "delta": (gpu.delta_kernel, dict(HQ=32, D=128, BM=32, PAD=128), 4),
        "write": (gpu.write_cache_kernel, dict(HK=8, D=128, BT=8, BB=256), 4),
    }[which]
    constants.update(k)
    return build(kernel, arch, constants, warps, 3, "bf16", which)


def domain(arch, quick=False):
    """Every structure that schedule() can choose: forward walk and split, decode tiles, page classes, both depths, backward."""
    bn, stages, bad = (64, 3, []) if arch >= 90 else (32, 2, [])
    for depth in (128, 64):
        cases = [dict(BM=64, warps=4, TMA=True), dict(BM=64, PACK=4, warps=4, TMA=True)] if arch >= 90 else []
        cases += (
            [dict(BM=64, warps=8), dict(BM=64, PACK=4, warps=8)] if arch >= 90 else [dict(BM=32, SWAP=True)]
        )
        cases += [dict(BM=b, PACK=4, SWAP=True) for b in (16, 32)]
        for page in (16, 64) if quick else (1, 7, 16, 64, 256):
            window, ids = gpu.page_window(page, False)
            whole, all_ids = gpu.page_window(page, True)
            paged, part = (
                dict(PAGE=page, WINDOW=window, IDS=ids),
                dict(PAGE=page, WINDOW=whole, IDS=all_ids, PDL=arch >= 90),
            )
            cases += [dict(BM=128, warps=8, **paged)] if page in gpu.PAGES_OF_128_ROWS else []
            cases += [dict(BM=64, PACK=p, warps=8, **paged) for p in ((1, 4) if arch >= 90 else (1,))]
            cases += [
                dict(BM=b, PACK=4, SWAP=True, SPLIT=s, **(part if s else paged))
                for b in (16, 32)
                for s in ((0, 1, 2) if arch >= 90 else (0, 1))
            ]
            cases += [
                dict(BM=64, PACK=p, warps=8, SPLIT=s, **part)
                for p in ((1, 4) if arch >= 90 else (1,))
                for s in ((1, 2) if arch >= 90 else (1,))
            ]
        for case in cases:
            try:
                _, spills, smem = fwd(arch, D=depth, BN=bn, stages=stages, **case)
            except Exception as error:
                print(arch, case, str(error)[-300:], flush=True)
                bad.append(case)
                continue
            if spills or smem > (232448 if arch >= 90 else 166912):
                bad.append((depth, case, spills, smem))
        for which in ("dq", "dkv"):
            rows, keys, warps, stage = gpu.backward_tiles(depth, 4096, arch)[which]
            _, spills, _ = bwd(arch, which, warps, stage, rows, keys, D=depth)
            if spills:
                bad.append((which, depth, spills))
        for which in ("merge", "delta", "write"):
            small(arch, which, D=depth)
    print(f"sm_{arch}: {len(bad)} specialisations spill or do not compile:", *bad, sep="\n  ", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="+", type=int, help="such as 80 90 100")
    parser.add_argument("--quick", action="store_true", help="pages of 16 and 64 only")
    parsed = parser.parse_args()
    for architecture in parsed.architectures:
        domain(architecture, parsed.quick)
