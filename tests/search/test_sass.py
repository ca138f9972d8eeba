"""Instruction mixes of kernels that are compiled here, for GPUs that need not be here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.search.fake_audit import FakeAudits, new_study

from kernelbraid.ops import installed
from kernelbraid.search import loop, opportunities, sass
from kernelbraid.search.proposers.knobs import KnobProposer

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

needs_disassembler = pytest.mark.skipif(sass.disassembler() is None, reason="triton brings no nvdisasm here")


@triton.jit
def product(a, b, out, N: tl.constexpr):
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :]
    inner = tl.arange(0, 64)
    x = tl.load(a + rows * 64 + inner[None, :])
    y = tl.load(b + inner[:, None] * N + columns)
    tl.store(out + rows * N + columns, tl.dot(x, y))


@triton.jit
def copy(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at) + tl.load(b + at))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made: dict[Any, bytes] = {}

    def compile_(function: Any, architecture: int, kind: str, size: int, aligned: bool) -> bytes:
        key = (function.fn.__name__, architecture, kind, size, aligned)
        if key not in made:
            signature = {"a": kind, "b": kind, "out": "*fp32", "N": "constexpr"}
            hints = {(i,): [["tt.divisibility", 16]] for i in range(3)} if aligned else {}
            source = ASTSource(function, signature, {"N": size}, hints)
            made[key] = triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]
        return made[key]

    return compile_


@needs_disassembler
def test_matrix_products_by_architecture(compiled: Callable[..., bytes]) -> None:
    ampere = sass.mix(compiled(product, 80, "*bf16", 64, True))
    hopper = sass.mix(compiled(product, 90, "*bf16", 64, True))
    assert (ampere.architecture, hopper.architecture) == ("sm_80", "sm_90")
    assert ampere.warp_products > 0 and ampere.warp_group_products == 0
    assert hopper.warp_group_products > 0 and hopper.warp_products == 0


@needs_disassembler
def test_widths_of_loads(compiled: Callable[..., bytes]) -> None:
    wide = sass.mix(compiled(copy, 80, "*fp32", 1024, True))
    narrow = sass.mix(compiled(copy, 80, "*fp32", 1024, False))
    assert wide.narrow_share == 0.0 and wide.loads[0][0] == 128
    assert narrow.narrow_share == 1.0 and {bits for bits, _ in narrow.loads} == {32}
    assert sum(count for _, count in narrow.loads) == 4 * sum(count for _, count in wide.loads)


@needs_disassembler
def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(RuntimeError, match="disassembler"):
        sass.mix(b"not a kernel")


TEXT = """
\t.target\tsm_90
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   LDG.E.U16 R4, [R2.64] ;
        /*0030*/               @P1 LDGSTS.E.BYPASS.128 [R7], [R2.64] ;
        /*0040*/                   LDG.E R4, [R2.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
"""


def test_text_is_counted() -> None:
    found = sass.counted(TEXT)
    assert found == sass.Mix("sm_90", 0, 1, ((128, 2), (32, 1), (16, 1)), 0, 6)
    assert found.narrow_share == 0.5


def test_findings_come_from_code_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path / "home"))
    folder = installed.home() / "compiled" / "one" / "triton" / "key"
    folder.mkdir(parents=True)
    (folder / "fwd.json").write_text(json.dumps({"hash": "abcdef012345" + "0" * 52}))
    (folder / "fwd.cubin").write_bytes(b"code")
    monkeypatch.setattr(sass, "disassembled", lambda cubin: TEXT if cubin == b"code" else "")
    line = "fwd(Q; D=128; ) warps=4 stages=3 registers=32 spills=0 shared=0 {}"
    fake = FakeAudits()
    with new_study(tmp_path / "study", fake, audits=1) as study:
        loop.run(study, KnobProposer(0), run_job=fake)
        standing = study.standings()[study.root]

        def mechanisms(digest: str) -> set[str]:
            changed = replace(standing.evidence, specialisations=(line.format(digest),))
            found = opportunities.machine_code(study, replace(standing, evidence=changed))
            return {each.mechanism for each in found}

        assert mechanisms("abcdef012345") == {
            "warp-group matrix products (wgmma) in fwd",
            "wider loads in fwd",
        }
        assert mechanisms("000000000000") == set(), "another kernel of that name"
