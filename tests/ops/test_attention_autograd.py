"""Autograd and registration: gradients of the public function, compiled calls, checkpointing, refusals."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernelbraid import attention, check_metadata, paged_attention, write_kv_cache
from kernelbraid.ops.attention import registered
from kernelbraid.ops.attention.reference import attention as exact_attention

HEADS, KV, D, SIZE = 6, 2, 64, 4
LENGTHS = (9, 0, 31)
OFFSETS = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
BOUNDS = {"cu_seqlens": OFFSETS, "max_seqlen": 31}
NAMES = ("q", "k", "v")
SUBSETS = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 1)]


def inputs(requires_grad=(1, 1, 1), seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(40, heads, D, generator=generator) for heads in (HEADS, KV, KV)]
    return [x.requires_grad_(bool(wanted)) for x, wanted in zip(tensors, requires_grad, strict=True)]


def a_gradient(seed=1):
    return torch.randn(40, HEADS, D, generator=torch.Generator().manual_seed(seed))


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) for a, b in pairs
    )


def eager_gradients(dout, function=attention):
    tensors = inputs()
    return torch.autograd.grad(function(*tensors, **BOUNDS), tensors, dout)


def test_gradients_are_attentions():
    tensors, dout = inputs(), a_gradient()
    found = torch.autograd.grad(attention(*tensors, **BOUNDS, softmax_scale=0.3), tensors, dout)
    for start, stop in ((0, 9), (9, 40)):
        exact = [x.detach()[start:stop].double().requires_grad_() for x in tensors]
        out, _ = exact_attention(*exact, 0.3)
        wanted = torch.autograd.grad(out, exact, dout[start:stop].double())
        for ours, best in zip(found, wanted, strict=True):
            assert (ours[start:stop] - best).norm() < 1e-6 * best.norm()


def test_the_reference_passes_gradcheck():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3), (4, 2, 3), (4, 2, 3))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *x: exact_attention(*x, 0.4), tensors)


@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
@pytest.mark.parametrize("through", ["public", "operator"])
def test_any_inputs_may_require_gradients(wanted, through):
    function = attention if through == "public" else operator
    tensors, dout = inputs(wanted), a_gradient()
    function(*tensors, **BOUNDS).backward(dout)
    assert [x.grad is not None for x in tensors] == [bool(want) for want in wanted]
    whole = eager_gradients(dout)
    pairs = [(x.grad, g) for x, g in zip(tensors, whole, strict=True) if x.grad is not None]
    assert same(*zip(*pairs, strict=True))


def operator(q, k, v, cu_seqlens, max_seqlen):
    return torch.ops.kernelbraid.attention(q, k, v, cu_seqlens, max_seqlen, None)[0]


def test_unneeded_gradients_are_not_computed(monkeypatch):
    called = []
    monkeypatch.setattr(registered, "_call", lambda name, device, *operands: called.append((name, operands)))
    tensors = inputs((0, 1, 0))
    attention(*tensors, **BOUNDS).backward(a_gradient())
    assert [name for name, _ in called] == ["attention", "attention_backward"]
    assert [x is None for x in called[1][1][-3:]] == [True, False, True]


def test_log_sum_exps_have_no_gradient():
    tensors = inputs()
    out, lse = attention(*tensors, **BOUNDS, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    mixed = torch.autograd.grad((out * lse.T[..., None]).sum(), tensors)
    expected = eager_gradients(lse.T[..., None].expand(40, HEADS, D))
    assert same(mixed, expected)
    out, lse = torch.ops.kernelbraid.attention(*tensors, OFFSETS, 31, None)
    assert out.requires_grad and not lse.requires_grad


def test_gradients_come_in_any_layout():
    dout = a_gradient()
    whole = eager_gradients(dout)
    room = torch.zeros(40, 2 * HEADS, D)
    room[:, ::2] = dout
    columns = dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    negative = torch.complex(torch.zeros_like(dout), -dout).conj().imag
    assert negative.is_neg() and columns.stride(-1) != 1
    for layout in (room[:, ::2], columns, negative):
        assert same(eager_gradients(layout), whole)
    ones = torch.ones(()).expand(40, HEADS, D)
    assert same(eager_gradients(ones), eager_gradients(torch.ones(40, HEADS, D)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_have_the_same_bits(reentrant):
    def layer(q, k, v):
        return attention(q * 1.0, k, v, **BOUNDS)

    tensors, dout = inputs(), a_gradient()
    checkpoint(layer, *tensors, use_reentrant=reentrant).backward(dout)
    assert same([x.grad for x in tensors], eager_gradients(dout))


def test_inputs_changed_before_the_backward_are_noticed():
    tensors, offsets = inputs(), OFFSETS.clone()
    out = attention(*tensors, cu_seqlens=offsets, max_seqlen=31)
    offsets[1:3] = 8
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    cache = torch.zeros(10, SIZE, HEADS, D)
    q = cache.view(40, HEADS, D)
    out = attention(q, *inputs()[1:], **BOUNDS)
    paged_attention(**paged(), out=q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("function", [attention, operator], ids=["public", "operator"])
def test_second_derivatives_are_refused(function):
    tensors = inputs()
    first = torch.autograd.grad(function(*tensors, **BOUNDS).sum(), tensors, create_graph=True)
    assert same(first, eager_gradients(torch.ones(40, HEADS, D)))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first[0].sum().backward()


def test_inputs_without_gradients_are_refused_where_there_are_none():
    arguments = paged()
    for name in ("q", "k_cache", "v_cache"):
        changed = {**arguments, name: arguments[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=rf"{name} requires grad.*pass {name}.detach\(\)"):
            paged_attention(**changed)
        with torch.no_grad():
            assert same([paged_attention(**changed)], [paged_attention(**arguments)])
    k, v = inputs((1, 0, 0))[0][:, :KV], inputs((0, 0, 0))[2]
    with pytest.raises(ValueError, match="k requires grad"):
        write_kv_cache(k, v, arguments["k_cache"], arguments["v_cache"], **where())


# ---- Registered operators ----


def where():
    """Pages of the two sequences, all 40 tokens new."""
    generator = torch.Generator().manual_seed(2)
    table = torch.full((3, 8), -7, dtype=torch.int32)
    pages = torch.randperm(12, generator=generator).int()
    table[0, :3], table[2, :8] = pages[:3], pages[3:11]
    return {
        "page_table": table,
        "cu_seqlens_q": OFFSETS,
        "seqlens_k": torch.tensor(LENGTHS, dtype=torch.int32),
    }


def paged():
    q, k, v = inputs((0, 0, 0))
    caches = torch.full((2, 12, SIZE, KV, D), float("nan"))
    write_kv_cache(k, v, *caches, **where())
    limits = {"max_seqlen_q": 31, "max_seqlen_k": 31}
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], **where(), **limits}


def checked(operator, *arguments):
    result = torch.library.opcheck(operator, arguments)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("wanted", [(1, 1, 1), (0, 0, 0), (0, 1, 0)], ids=str)
def test_attention_is_registered_well(wanted):
    checked(torch.ops.kernelbraid.attention.default, *inputs(wanted), OFFSETS, 31, 0.2)


@pytest.mark.parametrize("needed", [[True, True, True], [True, False, False], [False, True, True]], ids=str)
def test_its_gradients_are_registered_well(needed):
    tensors = inputs((0, 0, 0))
    out, lse = registered.attend(*tensors, OFFSETS, 31, None, True)
    arguments = (*tensors, out, lse, a_gradient(), OFFSETS, 31, None, needed)
    checked(torch.ops.kernelbraid.attention_backward.default, *arguments)


@pytest.mark.parametrize("with_lse", [True, False])
def test_paged_attention_is_registered_well(with_lse):
    out, lse = torch.zeros(40, HEADS, D), torch.zeros(HEADS, 40) if with_lse else None
    checked(torch.ops.kernelbraid.paged_attention.default, *paged().values(), None, out, lse)


def test_cache_writes_are_registered_well():
    _, k, v = inputs((0, 0, 0))
    caches = torch.zeros(2, 12, SIZE, KV, D)
    arguments = (k, v, caches[0].clone(), caches[1].clone(), *where().values())
    checked(torch.ops.kernelbraid.write_kv_cache.default, *arguments)


def test_operators_check_values_when_they_run():
    bad = torch.tensor([0, 9, 9, 39], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 40 packed rows"):
        torch.ops.kernelbraid.attention(*inputs(), bad, 31, None)
    compiled = torch.compile(lambda *x: attention(*x, cu_seqlens=bad, max_seqlen=31), **WHOLE)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 40 packed rows"):
        compiled(*inputs())


WHOLE = {"fullgraph": True, "backend": "aot_eager"}


@pytest.mark.parametrize("wanted", SUBSETS[:3], ids=str)
def test_compiled_calls_have_the_same_bits(wanted):
    def layer(q, k, v):
        out, lse = attention(q.sin(), k, v, **BOUNDS, return_lse=True)
        return out.cos(), lse

    tensors, dout = inputs(wanted), a_gradient()
    out, lse = torch.compile(layer, **WHOLE)(*tensors)
    eager_out, eager_lse = layer(*tensors)
    assert same([out, lse], [eager_out, eager_lse]) and not lse.requires_grad
    needed = [x for x in tensors if x.requires_grad]
    assert same(torch.autograd.grad(out, needed, dout), torch.autograd.grad(eager_out, needed, dout))


def test_compiled_for_any_number_of_tokens():
    compiled = torch.compile(lambda q, k, v, cu, n: attention(q, k, v, cu_seqlens=cu, max_seqlen=n), **WHOLE)
    for total in (17, 33, 40):
        tensors = [x.detach()[:total].requires_grad_() for x in inputs()]
        bounds = torch.tensor([0, 9, total], dtype=torch.int32), max(9, total - 9)
        out = compiled(*tensors, *bounds)
        expected = attention(*tensors, cu_seqlens=bounds[0], max_seqlen=bounds[1])
        assert same([out], [expected])
        gradients = (torch.autograd.grad(x.sum(), tensors) for x in (out, expected))
        assert same(*gradients)


@pytest.mark.parametrize("given", ["out", "nothing"])
def test_compiled_rollout_has_the_same_bits(given):
    def step(q, k, v, k_cache, v_cache, out):
        write_kv_cache(k, v, k_cache, v_cache, **where_)
        return paged_attention(
            q, k_cache, v_cache, **where_, max_seqlen_q=31, max_seqlen_k=31, out=out, return_lse=True
        )

    where_, tensors, expected = where(), inputs((0, 0, 0)), paged()
    caches = [torch.full((12, SIZE, KV, D), float("nan")) for _ in range(2)]
    room = torch.zeros(40, HEADS, D) if given == "out" else None
    out, lse = torch.compile(step, **WHOLE)(*tensors, *caches, room)
    assert same([out, lse], paged_attention(**expected, return_lse=True))
    assert same(caches, [expected["k_cache"], expected["v_cache"]])
    assert room is None or same([room], [out])


def test_a_compiled_write_into_a_view_is_refused():
    where_ = where()

    def layer(k, v, caches):
        write_kv_cache(k, v, caches[0], caches[1], **where_)

    _, k, v = inputs((0, 0, 0))
    caches = torch.zeros(2, 12, SIZE, KV, D)
    with pytest.raises(Exception, match="v_cache is a view with an offset"):
        torch.compile(layer, **WHOLE)(k, v, caches)
    layer(k, v, caches)
    assert caches[0].any() and caches[1].any()


FIRST_CALL = """
import sys
import torch
from kernelbraid import attention, paged_attention, write_kv_cache
assert not {"numba", "kernelbraid.ops.attention.cpu"} & set(sys.modules)
q, k, v = (torch.randn(40, h, 64, requires_grad=True) for h in (6, 2, 2))
cu = torch.tensor([0, 9, 40], dtype=torch.int32)
def loss(q, k, v):
    return attention(q * 2, k, v, cu_seqlens=cu, max_seqlen=31).square().sum()
compiled = torch.compile(loss, fullgraph=True, backend=BACKEND)
first = torch.autograd.grad(compiled(q, k, v), (q, k, v))
again = torch.autograd.grad(loss(q, k, v), (q, k, v))
assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, again))
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_first_call_of_a_process_may_be_compiled(backend):
    code = f"BACKEND = {backend!r}\n{FIRST_CALL}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_registration_needs_torch_alone():
    code = "import sys, {}; print([m for m in ('numba', 'triton') if m in sys.modules])"
    found, torch_alone = (
        subprocess.run(
            [sys.executable, "-c", code.format(module)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        for module in ("kernelbraid.ops.attention.registered", "torch")
    )
    assert found.stdout == torch_alone.stdout


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.name())
        return func(*args, **(kwargs or {}))


def test_whoever_watches_operators_sees_them():
    with Seen() as seen:
        attention(*inputs(), **BOUNDS).sum().backward()
        paged_attention(**paged())
    names = [name for name in seen.operators if name.startswith("kernelbraid::")]
    assert names == [
        f"kernelbraid::{name}"
        for name in ("attention", "attention_backward", "write_kv_cache", "paged_attention")
    ]


def test_fake_tensors_get_shapes():
    with FakeTensorMode() as mode:
        q, k, v, offsets = (mode.from_tensor(x) for x in (*inputs(), OFFSETS))
        out, lse = attention(q, k, v, cu_seqlens=offsets, max_seqlen=31, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (HEADS, 40), torch.float32)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]


def test_forward_derivatives_and_transforms_are_not_silently_wrong():
    q, k, v = inputs((0, 0, 0))
    with forward_ad.dual_level():
        attention(q, k, v, **BOUNDS)
        with pytest.raises(ValueError, match="q has a tangent"):
            attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, **BOUNDS)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: attention(x, k, v, **BOUNDS).sum())(q)
    batch = torch.func.vmap(lambda x: attention(x, k, v, **BOUNDS))(torch.stack([q, -q]))
    assert same(batch, [attention(x, k, v, **BOUNDS) for x in (q, -q)])


def test_no_tokens_have_no_gradient():
    q = torch.empty(0, HEADS, D, requires_grad=True)
    k = torch.empty(0, KV, D, requires_grad=True)
    out = attention(q, k, k, cu_seqlens=torch.zeros(1, dtype=torch.int32), max_seqlen=0)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]


# ---- Metadata of a GPU, checked on the host ----


def metadata(**changes: object) -> dict[str, object]:
    given: dict[str, object] = {
        **where(),
        "max_seqlen_q": 31,
        "tokens": 40,
        "max_seqlen_k": 31,
        "pages": 12,
        "page_size": SIZE,
    }
    return given | changes


def test_good_metadata_passes():
    check_metadata(**metadata())
    check_metadata(**metadata(), writes=True)
    check_metadata(cu_seqlens_q=OFFSETS, max_seqlen_q=31, tokens=40)


def shared_page() -> Tensor:
    table = where()["page_table"]
    table[2, 0] = table[0, 0]
    return table


BAD_METADATA = {
    "offsets": ({"tokens": 41}, "cu_seqlens_q must rise from 0 to the 41 packed rows"),
    "longest": ({"max_seqlen_q": 30}, "max_seqlen_q must be between 31"),
    "keys": ({"max_seqlen_k": 30}, "max_seqlen_k must be between 31, the longest of a request"),
    "page": ({"pages": 9}, r"page_table\[\d, \d\] is in use and must lie between 0 and 8"),
    "room": ({"page_size": 2}, "what 8 pages of 2 hold"),
    "half": ({"seqlens_k": None}, "must be given together"),
    "size": ({"page_size": 512}, "page_size must be between 1 and 256"),
    "shared": ({"page_table": shared_page(), "writes": True}, "the same place in page"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata_is_refused(name):
    changes, message = BAD_METADATA[name]
    with pytest.raises(ValueError, match=message):
        check_metadata(**metadata(**changes))
