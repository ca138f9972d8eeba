"""The vendor arm of GPUs, its library kernels replaced by plain ones on a CPU: everything around them."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernelbraid.models import vendor_cuda
from kernelbraid.models.config import named
from kernelbraid.models.layer import Paged
from kernelbraid.models.load import drawn
from kernelbraid.models.model import Cache, Decoder
from kernelbraid.models.vendor import Vendor, vendor
from kernelbraid.models.vendor_cuda import VendorCuda, gathered, ragged_pages
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.requests import EngineSettings, Request, group
from kernelbraid.rl.rollout import Engine


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence's last rows over its keys."""
    rows, keys = q.shape[0], k.shape[0]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    found = scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return found[0].transpose(0, 1)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pieces = []
    for b, ((a, z), (start, end)) in enumerate(
        zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    ):
        assert z - a <= max_q and end - start <= max_k
        end = end if seqused_k is None else start + int(seqused_k[b])
        pieces.append(attend(q[a:z], k[start:end], v[start:end]))
    return torch.cat(pieces), torch.zeros(q.shape[1], q.shape[0])


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, offsets: Tensor, longest: int
) -> Any:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        found = varlen(*leaves, offsets, offsets, longest, longest)[0]
    assert torch.equal(found, out)
    return torch.autograd.grad(found, leaves, dout)


class Wrapper:
    """FlashInfer's decode as far as it is called: what was planned, on buffers that stay where they are."""

    made: "list[Wrapper]" = []  # noqa: RUF012

    def __init__(self, workspace: Tensor, *, kv_layout: str, use_tensor_cores: bool, **buffers: Any) -> None:
        assert kv_layout == "NHD"
        self.tensor_cores, self.graph, self.plans = use_tensor_cores, bool(buffers), 0
        self.buffers = [
            buffers.get(f"paged_kv_{name}_buffer") for name in ("indptr", "indices", "last_page_len")
        ]
        Wrapper.made.append(self)

    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, query_heads: int, kv_heads: int, depth: int,
        page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        given = (indptr, indices, last)
        assert all(each.dtype == torch.int32 and each.is_cpu for each in given)
        if self.graph:
            for buffer, new in zip(self.buffers, given, strict=True):
                buffer[: len(new)].copy_(new)
        else:
            self.buffers = list(given)
        self.page_size, self.plans, self.dtype = page_size, self.plans + 1, q_data_type

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        assert q.dtype == self.dtype == caches[0].dtype
        indptr, indices, last = self.buffers
        rows = []
        for b in range(len(q)):
            pages = indices[indptr[b] : indptr[b + 1]].long()
            held = (len(pages) - 1) * self.page_size + int(last[b])
            k, v = (cache[pages].flatten(0, 1)[:held] for cache in caches)
            rows.append(attend(q[b : b + 1], k, v))
        return torch.cat(rows)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_cuda, "varlen", varlen)
    monkeypatch.setattr(vendor_cuda, "varlen_backward", varlen_backward)
    monkeypatch.setattr(vendor_cuda, "WORKSPACE_BYTES", 8)
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    Wrapper.made = []


def operators(*, flashinfer: bool = False) -> VendorCuda:
    return VendorCuda(flash_attention_4=False, flashinfer=flashinfer, compile_=lambda function: function)


def decoder(name: str, made: VendorCuda | Vendor) -> Decoder:
    config = replace(named(name).small(), hidden=128, intermediate=192)
    weights = drawn(config, dtype=torch.float32, seed=4)
    if not config.tied:
        weights.head.mul_(8)
    return Decoder(config, weights, 256, operators=made)


def near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 2e-5 * other.norm())


NAMES = ("Qwen3-0.6B", "SmolLM2-135M", "Qwen2.5-1.5B", "Qwen3-MoE-small")


def trained(made: Decoder, lengths: Sequence[int]) -> list[Tensor]:
    """Log-probabilities, entropies and gradients of packed sequences."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, made.config.vocab, (sum(lengths),), generator=generator, dtype=torch.int32)
    targets = ids.roll(-1)
    targets[::5] = -100
    tensors = [each.requires_grad_() for _, each in made.weights.tensors()]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    hidden = made.hidden(ids, offsets, max(lengths))
    found, entropy = made.operators.logprob(hidden, made.weights.head, targets, 0.7, entropy=True)
    assert entropy is not None
    weight = torch.rand(len(ids), generator=generator)
    alone = made.operators.logprob(hidden, made.weights.head, targets, 0.7)[0]
    assert near(alone, found)
    (found * weight + entropy * weight.flip(0) + alone).sum().backward()  # type: ignore[no-untyped-call]
    return [found.detach(), entropy.detach(), *(each.grad for each in tensors if each.grad is not None)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(5, 64, 1), (16, 16)], ids=str)
def test_the_update_is_torchs_but_for_rounding(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(decoder(name, Vendor()), lengths)
    made = operators()
    for keep, chunk in ((1 << 30, 1 << 30), (0, 1 << 30), (1 << 30, 40000)):
        monkeypatch.setattr(vendor_cuda, "KEPT_BYTES", keep)
        monkeypatch.setattr(vendor_cuda, "CHUNK_BYTES", chunk)
        found = trained(decoder(name, made), lengths)
        assert len(found) == len(expected) and all(map(near, found, expected))
    monkeypatch.setattr(vendor_cuda, "_turned", lambda x, c, s: x)
    assert not all(map(near, trained(decoder(name, operators()), lengths), expected))


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 500, (n,), generator=generator) for n in (40, 1, 17)]
    return [
        each
        for i, prompt in enumerate(prompts)
        for each in group(prompt, Sampling(max_tokens=12 + i), prompt_index=i, samples=2)
    ]


def rolled(made: Decoder, **settings: Any) -> list[Any]:
    limits = {"cache_tokens": 1024, "page_size": 8, "step_tokens": 24, "max_sequences": 5, **settings}
    engine = Engine(made, EngineSettings(**limits), run="r")
    batch = engine.generate(requests())
    logprobs = [each.logprobs for each in batch.completions]
    tokens = [each.tokens.tolist() for each in batch.completions]
    return [tokens, torch.cat([x for x in logprobs if x is not None])]


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("flashinfer", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_rollout_is_torchs_but_for_rounding(name: str, flashinfer: bool, graphs: bool) -> None:
    expected = rolled(decoder(name, Vendor()), graphs=False)
    made = operators(flashinfer=flashinfer)
    found = rolled(decoder(name, made), graphs=graphs)
    assert found[0] == expected[0] and torch.allclose(found[1], expected[1], atol=2e-4)
    assert not made.waits and bool(Wrapper.made) == flashinfer
    if flashinfer:
        group_size = made_heads(name)
        assert any(each.graph for each in Wrapper.made) == graphs
        assert all(each.tensor_cores == (group_size >= 4) for each in Wrapper.made)
        assert max(each.plans for each in Wrapper.made) > 3
        if graphs:
            assert all(each.plans > 0 for each in Wrapper.made) and len(Wrapper.made) > 1
            assert max(each.plans for each in Wrapper.made if each.graph) > 3


def made_heads(name: str) -> int:
    config = named(name)
    return config.query_heads // config.kv_heads


def test_a_decode_step_that_was_not_planned_is_refused() -> None:
    made = decoder("Qwen3-0.6B", operators(flashinfer=True))
    cache = Cache.empty(made.config, 2, 8, made.weights.norm)
    one = torch.ones(1, dtype=torch.int32)
    batch = Paged(one[None], torch.tensor([0, 1], dtype=torch.int32), one, 1, 1)
    with pytest.raises(RuntimeError, match=r"call Decoder\.plan"):
        made.rollout(one, cache, batch)
    made.plan(cache, batch, batch)
    made.rollout(one, cache, batch)
    with pytest.raises(RuntimeError, match=r"call Decoder\.plan"):
        made.rollout(one, cache, replace(batch, page_table=one[None].clone()))


def test_pages_as_flashinfer_reads_them() -> None:
    table = torch.tensor([[7, 3, 0], [5, 0, 0], [1, 2, 9]], dtype=torch.int32)
    offsets, pages, last = ragged_pages(table, torch.tensor([9, 8, 17], dtype=torch.int32), 8)
    assert offsets.tolist() == [0, 2, 3, 6] and pages.tolist() == [7, 3, 5, 1, 2, 9]
    assert last.tolist() == [1, 8, 1] and pages.dtype == offsets.dtype == last.dtype == torch.int32


def test_gathered_pages() -> None:
    cache = torch.arange(4.0 * 2).view(4, 2, 1, 1)
    table = torch.tensor([[3, 1, 0], [2, 0, 0]], dtype=torch.int32)
    k, _, offsets, room = gathered(cache, cache, table, 3)
    assert k.flatten().tolist() == [6, 7, 2, 3, 4, 5, 0, 1] and offsets.tolist() == [0, 4, 8] and room == 4


def test_a_device_has_its_arm() -> None:
    assert isinstance(vendor("cpu"), Vendor)
    assert isinstance(vendor(torch.device("cuda", 0)), VendorCuda)
    named_ = operators(flashinfer=True).arithmetic
    assert "FlashInfer" in named_ and named_ != operators().arithmetic


@pytest.mark.slow
def test_any_number_of_rows_compiles_twice() -> None:
    """Once for one row and once for more, whatever their number."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    made = VendorCuda(flash_attention_4=False, flashinfer=False)
    plain_ = operators()
    weight = torch.rand(64)
    for rows in (1, 2, 3, 64, 65):
        x, residual = torch.randn(rows, 64), torch.randn(rows, 64)
        found, expected = (each.add_rms_norm(x, residual, weight, 1e-6) for each in (made, plain_))
        assert all(map(near, found, expected))
        logits, targets = torch.randn(rows, 50), torch.arange(rows, dtype=torch.int32) % 50 - 1
        scored = [each._scored(logits, targets, 0.5, entropy=True) for each in (made, plain_)]
        assert all(map(near, *scored))
    assert Counter(counters["stats"])["unique_graphs"] == 4
