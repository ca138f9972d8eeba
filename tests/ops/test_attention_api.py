import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelbraid import attention, ops, paged_attention, write_kv_cache
from kernelbraid.contract import Source
from kernelbraid.ops import dispatch, installed
from kernelbraid.ops.attention import arguments, registered
from kernelbraid.ops.attention.spec import CONTRACT

HEADS, KV, D, SIZE = 6, 2, 64, 4
LENGTHS = (9, 0, 22)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, D, generator=generator) for h in (HEADS, KV, KV))
    offsets = ints(*np.cumsum((0, *lengths)).tolist())
    return {"q": q, "k": k, "v": v, "cu_seqlens": offsets, "max_seqlen": max(lengths)}


def paged(seed=0):
    """The same sequences on pages, all cached; the last 5 rows of the first and 1 of the last are new."""
    whole = packed(seed)
    table = ints(5, 1, 7, -1, 9, 9).new_full((3, 6), -7)
    pages = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).int()
    table[0, :3], table[2, :6] = pages[:3], pages[3:9]
    caches = torch.full((2, 12, SIZE, KV, D), float("nan"))
    about = {"page_table": table, "seqlens_k": ints(*LENGTHS)}
    write_kv_cache(whole["k"], whole["v"], *caches, **about, cu_seqlens_q=whole["cu_seqlens"])
    rows = [4, 5, 6, 7, 8, 30]
    return {
        "q": whole["q"][rows],
        "k_cache": caches[0],
        "v_cache": caches[1],
        **about,
        "cu_seqlens_q": ints(0, 5, 5, 6),
        "max_seqlen_q": 5,
        "max_seqlen_k": 22,
    }, rows


def writing(seed=0):
    arguments, _ = paged(seed)
    k, v = torch.randn(2, 6, KV, D)
    return {"k": k, "v": v, **{n: arguments[n] for n in arguments if n in WRITE_NAMES}}


WRITE_NAMES = ("k_cache", "v_cache", "page_table", "seqlens_k", "cu_seqlens_q")


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def same(one, other):
    return torch.equal(bits(one), bits(other))


def test_paged_rows_equal_packed_rows():
    out, lse = attention(**packed(), return_lse=True)
    arguments, rows = paged()
    paged_out, paged_lse = paged_attention(**arguments, return_lse=True)
    assert same(paged_out, out[rows]) and same(paged_lse, lse[:, rows])
    assert out.shape == (31, HEADS, D) and lse.shape == (HEADS, 31)
    assert same(attention(**packed()), out)


def test_values_are_attention():
    whole = packed()
    out = attention(**whole, softmax_scale=0.3)
    for start, stop in ((0, 9), (9, 31)):
        q, k, v = (whole[n][start:stop].transpose(0, 1)[None] for n in ("q", "k", "v"))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[start:stop], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_out_is_written_and_returned():
    arguments, _ = paged()
    expected = paged_attention(**arguments)
    room = torch.full((6, 2 * HEADS, D), 7.0)
    out = room[:, ::2]
    version = out._version
    assert paged_attention(**arguments, out=out) is out
    assert same(out, expected) and (room[:, 1::2] == 7).all()
    assert out._version > version


def test_memory_is_wrapped_not_copied(monkeypatch):
    seen = {}

    def take(name):
        return lambda *arrays: seen.update({name: arrays})

    fake = SimpleNamespace(**{n: take(n) for n in ("attention", "paged_attention", "write_kv_cache")})
    whole, (arguments, _), new = packed(), paged(), writing()
    monkeypatch.setattr(dispatch, "implementation", lambda name, device: fake)
    attention(**whole)
    assert [a.ctypes.data for a in seen["attention"][:4]] == [
        whole[n].data_ptr() for n in ("q", "k", "v", "cu_seqlens")
    ]
    out = torch.empty(6, HEADS, D)
    paged_attention(**arguments, out=out)
    given = seen["paged_attention"]
    names = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "seqlens_k")
    assert [a.ctypes.data for a in given[:6]] == [arguments[n].data_ptr() for n in names]
    assert given[9].ctypes.data == out.data_ptr() and given[10] is None
    write_kv_cache(**new)
    names = ("k", "v", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "seqlens_k")
    assert [a.ctypes.data for a in seen["write_kv_cache"]] == [new[n].data_ptr() for n in names]


def test_strided_inputs_give_the_same_bits():
    whole = packed()
    wide = torch.cat([whole["q"], whole["k"], whole["v"]], dim=1)
    views = dict(zip(("q", "k", "v"), wide.split((HEADS, KV, KV), dim=1), strict=True))
    assert not views["k"].is_contiguous()
    assert same(attention(**{**whole, **views}), attention(**whole))
    arguments, _ = paged()
    heads_first = [arguments[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")]
    q = arguments["q"].transpose(0, 1).contiguous().transpose(0, 1)
    strided = {**arguments, "q": q, "k_cache": heads_first[0], "v_cache": heads_first[1]}
    assert same(paged_attention(**strided), paged_attention(**arguments))


def test_caches_may_be_interleaved():
    arguments, _ = paged()
    both = torch.stack([arguments["k_cache"], arguments["v_cache"]], dim=1)
    new = writing()
    write_kv_cache(**{**new, "k_cache": both[:, 0], "v_cache": both[:, 1]})
    write_kv_cache(**new)
    assert same(both[:, 0], new["k_cache"]) and same(both[:, 1], new["v_cache"])


def test_written_tokens_are_copies_and_the_rest_stays():
    new = writing()
    before = new["k_cache"].clone()
    write_kv_cache(**new)
    table = new["page_table"]
    places = [(table[0, p // SIZE], p % SIZE) for p in range(4, 9)] + [(table[2, 21 // SIZE], 21 % SIZE)]
    for t, place in enumerate(places):
        assert same(new["k_cache"][place], new["k"][t])
        before[place] = new["k"][t]
    assert same(new["k_cache"], before)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_no_rows(batch):
    empty = torch.empty(0, HEADS, D)
    out, lse = attention(
        empty,
        empty[:, :KV],
        empty[:, :KV],
        cu_seqlens=ints(*[0] * (batch + 1)),
        max_seqlen=0,
        return_lse=True,
    )
    assert out.shape == (0, HEADS, D) and lse.shape == (HEADS, 0)
    caches = torch.zeros(2, 3, SIZE, KV, D)
    about = {
        "page_table": torch.zeros(batch, 2, dtype=torch.int32),
        "cu_seqlens_q": ints(*[0] * (batch + 1)),
        "seqlens_k": torch.full((batch,), 5, dtype=torch.int32),
    }
    assert paged_attention(empty, *caches, **about, max_seqlen_q=0, max_seqlen_k=8).shape == out.shape
    write_kv_cache(empty[:, :KV], empty[:, :KV], *caches, **about)
    assert (caches == 0).all()


def test_no_grad_parameters_pass():
    whole = packed()
    expected = attention(**whole)
    with torch.no_grad():
        assert same(attention(**{**whole, "q": whole["q"].clone().requires_grad_()}), expected)
    with torch.inference_mode():
        assert same(attention(**packed()), expected)
        arguments, rows = paged()
        assert same(paged_attention(**arguments, out=torch.empty(6, HEADS, D)), expected[rows])


def refused(function, arguments, changes, message):
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        function(**{**arguments, **changes})


F64 = torch.zeros(31, HEADS, D, dtype=torch.float64)
TRANSPOSED = torch.zeros(D, HEADS, 31).permute(2, 1, 0)
CASES = {
    "list": ({"q": [1]}, r"q must be a torch tensor, got list"),
    "dtype": ({"q": F64}, r"q must be torch.float32, got torch.float64"),
    "half": ({"k": torch.zeros(31, KV, D, dtype=torch.bfloat16)}, r"k must be torch.float32"),
    "dimensions": ({"v": torch.zeros(1, 31, KV, D)}, r"v must have 3 dimensions"),
    "sparse": ({"q": torch.zeros(31, HEADS, D).to_sparse()}, r"q must be a dense tensor"),
    "device": ({"q": torch.zeros(31, HEADS, D, device="meta")}, r"q is on meta"),
    "head_dim": ({"q": torch.zeros(31, HEADS, 96)}, r"q: head_dim must be one of \(64, 128\), got 96"),
    "no heads": ({"k": torch.zeros(31, 0, D)}, r"k: kv_heads must be between 1"),
    "other head_dim": ({"k": torch.zeros(31, KV, 128)}, r"k must have shape \[31, any, 64\] to fit q"),
    "rows": ({"k": torch.zeros(30, KV, D)}, r"k must have shape \[31, any, 64\]"),
    "k and v": ({"v": torch.zeros(31, 3, D)}, r"v must have shape \[31, 2, 64\] to fit k"),
    "group": ({"k": torch.zeros(31, 4, D), "v": torch.zeros(31, 4, D)}, r"multiple of the 4 KV heads"),
    "transposed": ({"q": TRANSPOSED}, r"q's last dimension must have stride 1, not 186"),
    "negated": ({"q": torch.zeros(31, HEADS, D, dtype=torch.cfloat).conj().imag}, r"q"),
    "other device": ({"k": torch.zeros(31, KV, D, device="meta")}, r"k is on meta, others on cpu"),
    "int64": ({"cu_seqlens": torch.tensor([0, 31])}, r"cu_seqlens must be torch.int32, got torch.int64"),
    "empty": ({"cu_seqlens": ints()}, r"cu_seqlens must have one entry more"),
    "start": ({"cu_seqlens": ints(1, 31)}, r"cu_seqlens must rise from 0 to the 31"),
    "end": ({"cu_seqlens": ints(0, 30)}, r"cu_seqlens must rise from 0 to the 31 packed rows, got \[0, 30\]"),
    "falling": ({"cu_seqlens": ints(0, 20, 9, 31)}, r"cu_seqlens must rise"),
    "batch": ({"cu_seqlens": ints(*[0] * 1025, 31)}, r"batch must be between 0 and 1024, got 1025"),
    "max_seqlen": (
        {"max_seqlen": 21},
        r"max_seqlen must be between 22, the longest of a sequence, and 131072",
    ),
    "long": ({"max_seqlen": 131073}, r"max_seqlen must be between 22"),
    "float": ({"max_seqlen": 22.0}, r"max_seqlen must be an int"),
    "scale": ({"softmax_scale": float("nan")}, r"softmax_scale must be above 0 and at most 1e\+30, got nan"),
    "no scale": ({"softmax_scale": 0.0}, r"softmax_scale must be above 0 and at most 1e\+30, got 0.0"),
    "negative scale": ({"softmax_scale": -0.125}, r"softmax_scale must be above 0"),
    "scale true": ({"softmax_scale": True}, "softmax_scale must be a number, got True"),
    "huge scale": ({"softmax_scale": 10**400}, "softmax_scale must be above 0"),
    "window": ({"window": 128}, r"window is not part of contract attention/1"),
    "soft_cap": ({"soft_cap": 30.0}, r"soft_cap is not part of contract attention/1"),
    "sinks": ({"sinks": torch.zeros(HEADS)}, r"sinks is not part of contract attention/1"),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_refuses(name):
    refused(attention, packed(), *CASES[name])


def table_with(row, column, value):
    table = paged()[0]["page_table"].clone()
    table[row, column] = value
    return table


PAGED_CASES = {
    "window": ({"window": (128, 0)}, r"window is not part"),
    "soft_cap": ({"soft_cap": 30.0}, r"soft_cap is not part"),
    "sinks": ({"sinks": 1}, r"sinks is not part"),
    "fp8": (
        {"k_cache": torch.zeros(12, SIZE, KV, D).to(torch.float8_e4m3fn)},
        r"k_cache.*excludes fp8_cache",
    ),
    "cache shape": ({"v_cache": torch.zeros(11, SIZE, KV, D)}, r"v_cache must have shape \[12, 4, 2, 64\]"),
    "page size": (
        {"k_cache": torch.zeros(1, 257, KV, D), "v_cache": torch.zeros(1, 257, KV, D)},
        r"page_size must be between 1 and 256, got 257",
    ),
    "cache head_dim": (
        {"k_cache": torch.zeros(12, SIZE, KV, 128), "v_cache": torch.zeros(12, SIZE, KV, 128)},
        r"k_cache must have shape \[any, any, any, 64\] to fit q",
    ),
    "transposed cache": (
        {"k_cache": torch.zeros(12, SIZE, D, KV).transpose(2, 3)},
        r"k_cache's last dimension must have stride 1",
    ),
    "requests": ({"seqlens_k": ints(9, 0)}, r"cu_seqlens_q says 3 requests, seqlens_k 2, page_table 3"),
    "short": ({"seqlens_k": ints(4, 0, 22)}, r"seqlens_k must lie between a request's new tokens and 24"),
    "beyond the table": ({"seqlens_k": ints(9, 0, 25)}, r"and 24, what 6 pages of 4 hold"),
    "max_seqlen_k": ({"max_seqlen_k": 21}, r"max_seqlen_k must be between 22, the longest of a request"),
    "max_seqlen_q": ({"max_seqlen_q": 4}, r"max_seqlen_q must be between 5"),
    "negative page": (
        {"page_table": lambda: table_with(0, 2, -1)},
        r"page_table\[0, 2\] is in use.*0 and 11, got -1",
    ),
    "wild page": (
        {"page_table": lambda: table_with(2, 5, 12)},
        r"page_table\[2, 5\] is in use.*0 and 11, got 12",
    ),
    "table dtype": ({"page_table": torch.zeros(3, 6, dtype=torch.int64)}, r"page_table must be torch.int32"),
    "out shape": ({"out": torch.zeros(7, HEADS, D)}, r"out must have shape \[6, 6, 64\]"),
    "out dtype": ({"out": torch.zeros(6, HEADS, D, dtype=torch.float64)}, r"out must be torch.float32"),
    "out transposed": ({"out": torch.zeros(D, HEADS, 6).permute(2, 1, 0)}, r"out's last dimension"),
    "out overlapping": ({"out": torch.zeros(1, HEADS, D).expand(6, HEADS, D)}, r"out's elements overlap"),
    "out sliding": (
        {"out": torch.zeros(6 * HEADS * D).as_strided((6, HEADS, D), (32, D, 1))},
        r"out's elements overlap",
    ),
    "out grad": ({"out": torch.zeros(6, HEADS, D, requires_grad=True)}, r"pass out.detach\(\)"),
    "out device": ({"out": torch.zeros(6, HEADS, D, device="meta")}, r"out is on meta"),
}


@pytest.mark.parametrize("name", PAGED_CASES)
def test_paged_attention_refuses(name):
    refused(paged_attention, paged()[0], *PAGED_CASES[name])


def test_out_may_not_be_an_input():
    arguments, _ = paged()
    refused(paged_attention, arguments, {"out": arguments["q"]}, "out must not share memory with q")
    cache = torch.zeros(12, SIZE, KV, D)
    view = cache.view(-1)[: 6 * HEADS * D].view(6, HEADS, D)
    refused(
        paged_attention, arguments, {"v_cache": cache, "out": view}, "out must not share memory with v_cache"
    )


def test_memory_of_another_storage_may_not_be_shared():
    arguments_, _ = paged()
    room = np.zeros((6, 2 * HEADS, D), np.float32)
    q = torch.from_numpy(room)[:, :HEADS]
    q.copy_(arguments_["q"])
    apart, inside = torch.from_numpy(room)[:, HEADS:], torch.from_numpy(room)[:, 1 : HEADS + 1]
    assert same(paged_attention(**{**arguments_, "q": q, "out": apart}), paged_attention(**arguments_))
    refused(paged_attention, arguments_, {"q": q, "out": inside}, "out must not share memory with q")


def test_writes_are_refused():
    new = writing()
    refused(
        write_kv_cache, new, {"k": torch.zeros(5, KV, D), "v": torch.zeros(5, KV, D)}, "0 to the 5 packed"
    )
    refused(write_kv_cache, new, {"v": torch.zeros(6, 3, D)}, r"v must have shape \[6, 2, 64\]")
    wide = torch.zeros(6, 3, D)
    refused(write_kv_cache, new, {"k": wide, "v": wide}, r"k_cache must have shape \[any, any, 3, 64\]")
    refused(write_kv_cache, new, {"v_cache": new["k_cache"]}, "k_cache must not share memory with v_cache")
    one_page = torch.zeros(1, SIZE, KV, D).expand(12, SIZE, KV, D)
    refused(write_kv_cache, new, {"k_cache": one_page}, "k_cache's elements overlap")
    alias = new["v_cache"].view(-1)[: 6 * KV * D].view(6, KV, D)
    refused(write_kv_cache, new, {"k": alias}, "v_cache must not share memory with k")
    refused(write_kv_cache, new, {"page_table": table_with(0, 1, 99)}, r"page_table\[0, 1\]")


def test_two_new_tokens_in_one_place_are_refused():
    new = writing()
    table = new["page_table"].clone()
    # Requests 0 and 2 write slots 0 .. 3 of pages [0, 1], slot 0 of [0, 2]; and slot 1 of [2, 5].
    table[2, 5] = table[0, 1]
    refused(write_kv_cache, new, {"page_table": table}, "requests (0 and 2|2 and 0) the same place in page")
    table[2, 5] = table[0, 2]
    write_kv_cache(**{**new, "page_table": table})
    table[0, 2] = table[0, 1]
    refused(write_kv_cache, new, {"page_table": table}, "requests 0 and 0 the same place")


def test_concurrent_calls_give_the_same_bits():
    problems = [packed(seed) for seed in range(4)]
    expected = [attention(**p) for p in problems]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: attention(**problems[i % 4]), range(64)))
    assert all(same(out, expected[i % 4]) for i, out in enumerate(found))


@pytest.fixture
def fresh_choice(tmp_path, monkeypatch):
    """A home of its own, and an implementation that is chosen anew."""
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path))
    dispatch._found.cache_clear()
    yield {"architecture": "cpu", "device": installed.cpu_model(), "record": {}}
    dispatch._found.cache_clear()


def test_installed_winner_is_used_checked_and_undone(fresh_choice):
    mark = "def attention(q, k, v, cu_seqlens, max_seqlen, scale, out, lse):\n    out[...] = 42\n"
    path = installed.install("attention", Source(mark), contract=CONTRACT.hash, **fresh_choice)
    assert (attention(**packed()) == 42).all()
    dispatch._found.cache_clear()
    path.write_text(mark.replace("42", "43"))
    with pytest.raises(
        RuntimeError, match="changed since it was promoted; run `kernelbraid demote attention`"
    ):
        attention(**packed())
    installed.remove("attention", "cpu", fresh_choice["device"])
    assert (attention(**packed()) != 42).any()


def test_winner_of_another_contract_is_refused(fresh_choice):
    installed.install("attention", Source("A = 1\n"), contract="0" * 64, **fresh_choice)
    with pytest.raises(RuntimeError, match="another contract"):
        attention(**packed())


def test_shipped_source_is_what_is_called(fresh_choice):
    found = dispatch.implementation("attention", torch.device("cpu"))
    assert found.__name__ == "kernelbraid.ops.attention.cpu"
    assert ops.source(ops.get("attention")).text == Path(found.__file__).read_text()


# ---- What is checked on a GPU, with tensors that have no memory ----


@pytest.fixture
def on_gpu():
    """Arguments of packed and of paged attention, as a GPU would hold them."""
    with FakeTensorMode():
        q, k, v = (torch.empty(31, h, D, dtype=torch.bfloat16, device="cuda") for h in (HEADS, KV, KV))
        caches = [torch.empty(12, SIZE, KV, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        offsets, lengths = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (4, 3))
        table = torch.empty(3, 6, dtype=torch.int32, device="cuda")
        packed_ = (q, k, v, offsets, 22, None)
        paged_ = (q, *caches, table, offsets, lengths, 22, 22, None, None)
        yield packed_, paged_


def test_metadata_has_one_domain():
    assert ops.get("attention", "cuda").contract.axes == CONTRACT.axes  # check_metadata's, for both


def changed(given, **positions):
    return [positions.get(f"at{i}", value) for i, value in enumerate(given)]


def test_good_arguments_pass_on_a_gpu(on_gpu):
    packed_, paged_ = on_gpu
    assert arguments.check_packed(*packed_) == arguments.check_paged(*paged_) == D**-0.5
    q, k, v, *_ = packed_
    assert arguments.check_packed(*changed(packed_, at0=q.half(), at1=k.half(), at2=v.half())) == D**-0.5


def test_bad_arguments_are_refused_on_a_gpu(on_gpu):
    packed_, paged_ = on_gpu
    q, k, _, offsets, *_ = packed_
    cases = [
        ({"at0": q.float()}, "q must be torch.bfloat16 or torch.float16, got torch.float32 on cuda"),
        ({"at1": k.half()}, "k must be torch.bfloat16, got torch.float16 on cuda"),
        ({"at2": k.half()}, "v must be torch.bfloat16, got torch.float16 on cuda"),
        ({"at1": k.cpu()}, "k is on cpu, others on cuda:0"),
        ({"at2": k.to("cuda:1")}, "v is on cuda:1, others on cuda:0"),
        ({"at3": offsets.cpu()}, "cu_seqlens is on cpu, others on cuda:0"),
        (
            {"at4": 10},
            "max_seqlen must be between 11, the mean of 31 rows over 3 requests, and 131072, got 10",
        ),
        ({"at4": 131073}, "max_seqlen must be between 11"),
        ({"at5": 0.0}, "softmax_scale must be above 0 and at most"),
        ({"at5": -0.125}, "softmax_scale must be above 0"),
        ({"at5": math.inf}, "softmax_scale must be above 0"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            arguments.check_packed(*changed(packed_, **changes))
    for changes, message in (
        ({"at1": paged_[1].half()}, "k_cache must be torch.bfloat16"),
        ({"at3": paged_[3].cpu()}, "page_table is on cpu"),
        ({"at5": paged_[4]}, "cu_seqlens_q says 3 requests, seqlens_k 4"),
        ({"at7": 10}, "max_seqlen_k must be between 11"),
    ):
        with pytest.raises(ValueError, match=message):
            arguments.check_paged(*changed(paged_, **changes))


@pytest.fixture
def a_gpu(monkeypatch, fresh_choice):
    def become(model, *capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: model)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)

    return become


CUDA_0 = torch.device("cuda", 0)


def test_old_gpus_are_refused(a_gpu):
    a_gpu("Tesla T4", 7, 5)
    with pytest.raises(RuntimeError, match="cuda:0 is Tesla T4, sm_75: attention needs sm_80 or newer"):
        dispatch.implementation("attention", CUDA_0)


def test_a_gpu_finds_the_winner_of_its_model(a_gpu):
    a_gpu("NVIDIA H200", 9, 0)
    mark, contract = Source("MARK = 'H200'\n"), ops.get("attention", "cuda").contract.hash
    about = {"architecture": "sm_90", "device": "NVIDIA H200", "contract": contract, "record": {}}
    installed.install("attention", mark, **about)
    found = dispatch.implementation("attention", CUDA_0)
    assert found.MARK == "H200"
    with pytest.raises(RuntimeError, match="the installed attention has no attention_backward"):
        registered._call("attention_backward", CUDA_0)


def test_a_winner_of_the_cpus_contract_is_refused_on_a_gpu(a_gpu):
    a_gpu("NVIDIA H200", 9, 0)
    about = {"architecture": "sm_90", "device": "NVIDIA H200", "contract": CONTRACT.hash, "record": {}}
    installed.install("attention", Source("MARK = 1\n"), **about)
    with pytest.raises(RuntimeError, match="another contract"):
        dispatch.implementation("attention", CUDA_0)


@pytest.mark.parametrize("strides", [(128, 1 << 26, 1), (1 << 23, 128, 1)])
def test_strides_beyond_the_reach_of_gpu_kernels_are_refused(strides):
    arguments.check_reach("q", (10, 32, 128), (4096, 128, 1))
    arguments.check_reach("q", (10, 32, 128), (128, (1 << 26) - 1, 1))
    with pytest.raises(ValueError, match=r"q's strides .*contiguous"):
        arguments.check_reach("q", (10, 32, 128), strides)
