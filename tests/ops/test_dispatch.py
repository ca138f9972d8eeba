"""What every public function shares: its checks of tensors, and the way to the implementation in use."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kernelbraid import embedding, ops, rms_norm, swiglu
from kernelbraid.contract import Source
from kernelbraid.ops import arguments, dispatch, installed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = tuple(dict.fromkeys(each.name for each in ops.OPERATORS))
X = torch.randn(6, 8)


@pytest.fixture
def fresh_choice(tmp_path, monkeypatch):
    """A home of its own, and implementations that are chosen anew."""
    monkeypatch.setenv("KERNELBRAID_HOME", str(tmp_path))
    dispatch._found.cache_clear()
    yield {"architecture": "cpu", "device": installed.cpu_model(), "record": {}}
    dispatch._found.cache_clear()


# ---- The implementation in use.


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_implementation_is_found_and_kept(name, fresh_choice):
    found = dispatch.implementation(name, CPU)
    assert found.__name__ == f"kernelbraid.ops.{name}.cpu"
    assert dispatch.implementation(name, torch.device("cpu", 0)) is found
    assert all(callable(getattr(found, each)) for each in ops.get(name).entry_points)


def test_operators_have_winners_of_their_own(fresh_choice):
    text = "def swiglu(gate, up, out):\n    out[...] = 42\n"
    contract = ops.get("swiglu").contract.hash
    installed.install("swiglu", Source(text), contract=contract, **fresh_choice)
    assert (swiglu(X, X) == 42).all()
    assert dispatch.implementation("rms_norm", CPU).__name__ == "kernelbraid.ops.rms_norm.cpu"
    with pytest.raises(
        RuntimeError, match=r"the installed swiglu has no swiglu_backward; run `kernelbraid demote swiglu`"
    ):
        swiglu(X.clone().requires_grad_(), X).sum().backward()


def test_a_winner_of_another_contract_is_refused_by_name(fresh_choice):
    text = Source("MARK = 1\n")
    installed.install("embedding", text, contract=ops.get("swiglu").contract.hash, **fresh_choice)
    message = f"the installed embedding {text.short} was promoted under another contract"
    with pytest.raises(RuntimeError, match=message):
        embedding(torch.tensor([1]), X)


def test_first_calls_of_many_threads_load_one_implementation(fresh_choice):
    text = "LOADED = []\nclass Mark: pass\nMARK = Mark()\n"
    contract = ops.get("swiglu").contract.hash
    installed.install("swiglu", Source(text), contract=contract, **fresh_choice)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: dispatch.implementation("swiglu", CPU).MARK, range(32)))
    assert len(set(map(id, found))) == 1


@pytest.fixture
def a_gpu(monkeypatch, fresh_choice):
    def become(model, *capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: model)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)

    return become


@pytest.mark.parametrize("name", NAMES)
def test_gpus_older_than_the_oldest_are_refused_by_name(name, a_gpu):
    a_gpu("Tesla V100", 7, 0)
    with pytest.raises(RuntimeError, match=f"cuda:0 is Tesla V100, sm_70: {name} needs sm_80 or newer"):
        dispatch.implementation(name, CUDA)


def test_gpus_of_others_are_refused(a_gpu, monkeypatch):
    a_gpu("MI300X", 9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(RuntimeError, match="cuda:0 is MI300X: only NVIDIA's GPUs are supported"):
        dispatch.implementation("swiglu", CUDA)


def test_a_gpu_gets_the_gpus_implementation(a_gpu):
    pytest.importorskip("triton")
    a_gpu("NVIDIA A100", 8, 0)
    assert dispatch.implementation("swiglu", CUDA).__name__ == "kernelbraid.ops.swiglu.gpu"


def test_arrays_are_the_tensors_memory(monkeypatch):
    seen = []
    stand_in = SimpleNamespace(entry=lambda *operands: seen.extend(operands))
    monkeypatch.setattr(dispatch, "implementation", lambda name, device: stand_in)
    leaf = torch.ones(3, requires_grad=True)
    dispatch.call("any", "entry", CPU, leaf, X, 7, None)
    assert isinstance(seen[0], np.ndarray) and seen[2:] == [7, None]
    seen[0][0] = 5
    assert leaf[0] == 5 and np.shares_memory(seen[1], X.numpy())


# ---- Who watches.


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_modes_transforms_and_subclasses_watch():
    assert not dispatch.is_traced(X) and not dispatch.is_traced(torch.nn.Parameter(X))
    assert not dispatch.is_traced("no tensor")
    assert dispatch.is_traced(X.as_subclass(Subclass))
    with Watching():
        assert dispatch.is_traced(X)
    with FakeTensorMode():
        assert dispatch.is_traced(torch.empty(1))
    seen = []
    torch.func.vmap(lambda x: seen.append(dispatch.is_traced(x)) or x)(X)
    assert seen == [True] and not dispatch.is_traced(X)


def test_watched_calls_go_through_the_registered_operators():
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    ids, weight = torch.tensor([1, 2, 1]), X.clone().requires_grad_()
    with Names():
        out = swiglu(embedding(ids, weight))
        rms_norm(out, torch.ones(4)).sum().backward()
    for name in ("embedding", "swiglu", "rms_norm"):
        assert f"kernelbraid.{name}.default" in names and f"kernelbraid.{name}_backward.default" in names


def test_no_memory_is_needed_to_trace_on_a_gpu():
    """Shapes, dtypes and devices of results, with tensors that have no memory; ids are not read."""
    with FakeTensorMode():
        x = torch.empty(2, 5, 16, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(30, 16, dtype=torch.float16, device="cuda")
        ids = torch.empty(2, 7, dtype=torch.int32, device="cuda")
        for out, shape, dtype in (
            (swiglu(x), (2, 5, 8), torch.bfloat16),
            (swiglu(x, x), (2, 5, 16), torch.bfloat16),
            (embedding(ids, weight), (2, 7, 16), torch.float16),
        ):
            assert out.shape == shape and out.dtype == dtype and out.device.type == "cuda"


# ---- Gradients on their way in.


def test_gradients_get_a_layout_that_kernels_read():
    assert dispatch.rows_contiguous(X) is X
    wide = torch.randn(6, 16)[:, :8]
    assert dispatch.rows_contiguous(wide) is wide
    expanded = torch.ones(()).expand(6, 8)
    found = dispatch.rows_contiguous(expanded)
    assert found.is_contiguous() and torch.equal(found, expanded)
    negated = torch.randn(6, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    found = dispatch.rows_contiguous(negated)
    assert not found.is_neg() and found.stride(-1) == 1 and torch.equal(found, negated)


def test_writes_are_counted_but_not_of_inference_tensors():
    version = X._version
    dispatch.count_write(X, X)
    assert X._version == version + 2
    with torch.inference_mode():
        dispatch.count_write(torch.ones(1))


def test_second_derivatives_name_their_operator():
    with pytest.raises(RuntimeError, match=r"swiglu has first derivatives only: .*create_graph=True"):
        dispatch.refuse_second("swiglu")(None, X, X)


# ---- Checks of arguments.


def test_contracts_follow_the_device():
    assert arguments.contract_of("swiglu", "x", X) is ops.get("swiglu").contract
    with FakeTensorMode():
        gpu = torch.empty(1, device="cuda")
        found = arguments.contract_of("swiglu", "x", gpu)
    assert found is ops.get("swiglu", "cuda").contract
    assert arguments.dtypes_of(found) == (torch.bfloat16, torch.float16)
    for wrong, message in ((X.to("meta"), "x is on meta, for which this version has no backend"), (3, "int")):
        with pytest.raises(ValueError, match=message):
            arguments.contract_of("swiglu", "x", wrong)
    with pytest.raises(ValueError, match="unknown operator 'none'; operators are attention, "):
        arguments.contract_of("none", "x", X)


FLOAT = (torch.float32,)


@pytest.mark.parametrize(
    ("tensor", "dtypes", "dimensions", "message"),
    [
        ([1.0], FLOAT, 1, "t must be a torch tensor, got list"),
        (X.to("meta"), FLOAT, 2, "t is on meta, others on cpu: move them to one device"),
        (X.to_sparse(), FLOAT, 2, "t must be a dense tensor, got torch.sparse_coo"),
        (X.double(), FLOAT, 2, "t must be torch.float32, got torch.float64 on cpu"),
        (X, (torch.int32, torch.int64), 2, "t must be torch.int32 or torch.int64, got torch.float32 on cpu"),
        (X.double(), arguments.INDEX_DTYPES, 2, "t must be torch.int32, got torch.float64$"),
        (X, FLOAT, 3, r"t must have 3 dimensions, got shape \(6, 8\)"),
        (X.t(), FLOAT, 2, r"t's last dimension must have stride 1, not 8: call .contiguous\(\)"),
        (torch.randn(6, dtype=torch.complex64).conj().imag, FLOAT, 1, "t is a lazily negated view"),
    ],
)
def test_unfit_tensors_are_refused(tensor, dtypes, dimensions, message):
    with pytest.raises(ValueError, match=message):
        arguments.check_tensor("t", tensor, dtypes, dimensions, CPU)


def test_fitting_tensors_pass():
    for tensor in (X, X[::2], X[:, :3], X[:, 3:4].expand(6, 1), X[:0].t(), X[:, 2:3]):
        arguments.check_tensor("t", tensor, FLOAT, 2, CPU)
    arguments.check_tensor("t", X, FLOAT, 2, None)


def test_shapes_are_compared_with_their_source():
    arguments.check_shape("t", X, (6, 8), "x")
    arguments.check_shape("t", X, (None, 8), "x")
    with pytest.raises(ValueError, match=r"t must have shape \[any, 9\] to fit x, got \[6, 8\]"):
        arguments.check_shape("t", X, (None, 9), "x")


def test_axes_say_their_limits():
    contract = ops.get("swiglu").contract
    arguments.check_axis(contract, "tokens", "x", 0)
    with pytest.raises(ValueError, match="x: tokens must be between 0 and 131072, got 131073"):
        arguments.check_axis(contract, "tokens", "x", 131073)
    with pytest.raises(ValueError, match="swiglu has no axis 'height'"):
        contract.axis("height")


@pytest.mark.parametrize("wrong", [1.5, "1", True, None])
def test_integers_are_integers(wrong):
    arguments.check_integer("n", 3)
    with pytest.raises(ValueError, match="n must be an int, got"):
        arguments.check_integer("n", wrong)


@pytest.mark.parametrize("wrong", [0.0, -1, 2.5, float("nan"), float("inf"), "1", True, None])
def test_numbers_lie_between_their_limits(wrong):
    for fine in (1, 0.5, 2.0, 1e-30):
        arguments.check_number("n", fine, 0.0, 2.0)
    with pytest.raises(ValueError, match="n must be"):
        arguments.check_number("n", wrong, 0.0, 2.0)


def test_excluded_features_say_why():
    contract = ops.get("swiglu").contract
    arguments.refuse_features(contract, limit=None, alpha=None, others=1)
    with pytest.raises(ValueError, match=r"limit is not part of contract swiglu/1: gpt-oss .*; pass None"):
        arguments.refuse_features(contract, limit=7.0)


def test_tangents_are_refused_inside_of_forward_mode_only():
    arguments.refuse_tangents("swiglu", x=X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        arguments.refuse_tangents("swiglu", x=X, y="no tensor")
        with pytest.raises(ValueError, match="y has a tangent, and swiglu has no forward-mode derivatives"):
            arguments.refuse_tangents("swiglu", x=X, y=dual)


def test_written_tensors_have_memory_of_their_own():
    whole = torch.zeros(4, 8)
    arguments.check_written("t", whole[:, :4], {"x": whole[:, 4:], "y": torch.ones(3)})
    arguments.check_written("t", whole.t(), {})
    with pytest.raises(ValueError, match="t must not share memory with x"):
        arguments.check_written("t", whole[:, :5], {"x": whole[:, 4:]})
    with pytest.raises(ValueError, match="t's elements overlap in memory"):
        arguments.check_written("t", torch.zeros(8).expand(4, 8), {})
    with pytest.raises(ValueError, match="t's elements overlap in memory"):
        arguments.check_written("t", torch.zeros(32).as_strided((4, 8), (4, 1)), {})
