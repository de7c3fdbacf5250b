"""The device `unified` by its name: for the thread that enables it, in all forms of calls, and without other
changes.
"""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import pyg_direct
from pyg_direct import UnifiedTensor, to_unified, unified_device
from pyg_direct.errors import DeviceError

pytestmark = pytest.mark.apart


@pytest.fixture(scope="module", autouse=True)
def _device_by_name():
    pyg_direct.enable_unified_device()


def run_in_thread(function):
    """Return the result of a function in a new thread, or its exception."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_backward_passes_run_as_before(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).to(device)
    x = torch.rand(5, 4, device=device, requires_grad=True)

    def run():
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()], x.grad.tolist()

    with torch._C.DisableTorchFunction():
        expected = run()
    x.grad = None

    assert run() == expected


# Python warns of a forked worker, because a process with a GPU has threads of the driver.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_page_locked_batches_are_as_before(real_device, num_workers):
    is_gpu = real_device.type == "cuda"
    loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=4, pin_memory=is_gpu, num_workers=num_workers)

    batch = next(iter(loader))[0]

    assert (batch.tolist(), batch.is_pinned()) == ([1] * 4, is_gpu)
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


@pytest.mark.gpu
def test_a_backward_pass_is_ordered_after_its_forward_pass_on_another_stream():
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        loss = (x * x.detach().cumsum(0)).sum()
    torch.cuda.current_stream().wait_stream(stream)
    loss.backward()

    assert x.grad[:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_flow_back_to_where_the_tensor_came_from(device, dtype):
    x = torch.arange(6.0, dtype=torch.float64, device=device).view(3, 2).requires_grad_()

    got = x.to("unified", dtype)
    got[torch.tensor([0, 2, 2], device=device)].mul(3).sum().backward()

    assert (type(got), got.dtype) == (UnifiedTensor, dtype)
    assert (type(x.grad), x.grad.dtype, x.grad.device) == (torch.Tensor, torch.float64, x.device)
    assert x.grad.tolist() == [[3, 3], [0, 0], [6, 6]]


def test_gradients_are_those_of_finite_differences():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda t: t.to("unified").to("unified:1").cpu(), x)


def test_what_has_no_gradient_gets_none():
    x = torch.ones(3, requires_grad=True)

    assert not x.to("unified", torch.int64).requires_grad
    with torch.no_grad():
        assert not x.to("unified").requires_grad


@pytest.mark.parametrize("source", [lambda t: t, lambda t: t.transpose(1, 2), lambda t: t[..., 1:], lambda t: t[:, :0],
                                    lambda t: t[:, :1].expand(2, 5, 3, 4), lambda t: t.conj(), lambda t: t[0, 0, 0, 0]],
                         ids=["whole", "transposed", "part", "empty", "expanded", "conjugate", "scalar"])  # fmt: skip
@pytest.mark.parametrize("form", [
    lambda t, d: t.to(d), lambda t, d: t.to(device=d), lambda t, d: t.to(d, torch.complex128),
    lambda t, d: t.to(d, None, True, True), lambda t, d: t.to(d, dtype=torch.complex128, non_blocking=True),
    lambda t, d: t.to(device=d, copy=True), lambda t, d: t.to(d, memory_format=torch.contiguous_format),
    lambda t, d: t.to(torch.ones(1, dtype=torch.complex128, device=d)),
    lambda t, d: t.to(tensor=t.new_empty(1, device=d)),
])  # fmt: skip
def test_to_is_as_for_other_devices(source, form):
    tensor = source(torch.randn(2, 2, 3, 4, dtype=torch.complex64))

    got, expected = form(tensor, "unified"), form(tensor, "cpu")

    assert (type(got), got.dtype, got.propagatedToCUDA) == (UnifiedTensor, expected.dtype, True)
    assert got.tolist() == expected.tolist()
    assert got.numel() == 0 or got.stride() == torch.empty_like(expected).stride()


def test_to_where_it_is_already_is_itself():
    tensor = torch.ones(3, device=unified_device(propagatedToCUDA=False))

    assert tensor.to("unified") is tensor.to("unified:1") is tensor.to(tensor) is tensor
    assert tensor.to("unified", copy=True) is not tensor
    assert tensor.to("unified:0").propagatedToCUDA
    assert torch.Tensor.to(tensor, "unified") is tensor


@pytest.mark.parametrize("make", [
    lambda d: torch.rand(2, 3, device=d), lambda d: torch.randn(5, device=d, dtype=torch.float64),
    lambda d: torch.randint(2, 9, (4,), device=d), lambda d: torch.randperm(7, device=d),
    lambda d: torch.rand(3, device=d, generator=torch.Generator().manual_seed(4)),
    lambda d: torch.normal(0.0, 1.0, (3,), device=d), lambda d: torch.rand_like(torch.ones(3), device=d),
    lambda d: torch.full((2,), 3 + 1j, device=d), lambda d: torch.full((2,), True, device=d),
    lambda d: torch.logspace(0, 2, 3, device=d), lambda d: torch.arange(1, 2, 0.25, device=d),
    lambda d: torch.ones(2).new_full((2, 2), 7, device=d), lambda d: torch.ones(2).new_tensor([3, 4], device=d),
    lambda d: torch.asarray([1, 2], device=d), lambda d: torch.as_tensor(torch.ones(2), device=d),
    lambda d: torch.hann_window(4, device=d), lambda d: torch.zeros(3, device=d, pin_memory=False),
])  # fmt: skip
def test_factories_give_what_they_give_on_the_cpu(make):
    torch.manual_seed(5)
    got = make("unified")
    torch.manual_seed(5)
    expected = make("cpu")

    assert (type(got), got.dtype, got.stride()) == (UnifiedTensor, expected.dtype, expected.stride())
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("make", [
    lambda d: torch.empty(2, 3, device=d), lambda d: torch.empty((2, 3), dtype=torch.int8, device=d),
    lambda d: torch.empty_strided((2, 3), (1, 2), device=d), lambda d: torch.ones(1).new_empty(2, 3, device=d),
    lambda d: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last, device=d),
    lambda d: torch.empty_like(torch.ones(2, 3, dtype=torch.float16), device=d),
])  # fmt: skip
def test_empty_tensors_are_not_made_by_the_cpu_first(make, monkeypatch):
    monkeypatch.setattr("pyg_direct.features.unified_device.run_to", None)

    got, expected = make("unified"), make("cpu")

    assert (type(got), got.dtype) == (UnifiedTensor, expected.dtype)
    assert (got.shape, got.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("make", [lambda **k: torch.ones(3, **k), lambda **k: torch.tensor([1.0, 1, 1], **k),
                                  lambda **k: torch.ones_like(torch.zeros(3), **k)])  # fmt: skip
def test_a_leaf_is_a_leaf(make):
    got = make(device="unified", requires_grad=True)

    assert (got.requires_grad, got.is_leaf, got.tolist()) == (True, True, [1, 1, 1])
    got.cpu().sum().backward()
    assert got.grad.tolist() == [1, 1, 1]


def test_the_paper_s_name_of_the_device():
    assert torch.ones(2, device=torch.device("unified")).is_unified
    assert not torch.ones(2, device=torch.device("unified", 1)).propagatedToCUDA
    assert torch.device("cpu", 0) == torch.device("cpu:0")


@pytest.mark.parametrize(("act", "words"), [
    (lambda: torch.ones(2).to("unified:2"), "device must be one of unified, unified:0, unified:1, got 'unified:2'"),
    (lambda: torch.ones(2, device="unifiedx"), "got 'unifiedx'"),
    (lambda: torch.device("unified", 3), "got 'unified:3'"),
    (lambda: torch.ones(2, 2).to_sparse().to("unified"), "needs a strided tensor, got one of layout torch.sparse_coo"),
    (lambda: torch.zeros(2, 2, layout=torch.sparse_coo, device="unified"), "got zeros, which made torch.sparse_coo"),
    (lambda: torch.nn.Linear(2, 2).to("unified"), "Module.to must name cpu or a GPU, .*, got 'unified'"),
    (lambda: torch.ones(2, out=torch.empty(2), device="unified"), "out must be a unified tensor .*, got one on cpu"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(act, words):
    with pytest.raises(DeviceError, match=words):
        act()


def test_a_module_can_be_made_of_unified_tensors(device):
    table = torch.nn.Embedding(4, 2, device="unified")

    rows = table.weight[torch.tensor([3, 3], device=device)]
    rows.sum().backward()

    assert isinstance(table.weight, UnifiedTensor)
    assert table.weight.grad.tolist() == [[0, 0], [0, 0], [0, 0], [2, 2]]


def test_each_thread_asks_for_itself():
    refused = run_in_thread(lambda: torch.ones(2, device="unified"))
    not_asked = run_in_thread(unified_device)
    made = run_in_thread(lambda: [pyg_direct.enable_unified_device(), torch.ones(2, device="unified")][1])

    assert isinstance(refused, RuntimeError)
    assert "unified" in str(refused)
    assert "a call of enable_unified_device in this thread" in str(not_asked)
    assert isinstance(made, UnifiedTensor)


def count_modes():
    return sum("unified" in type(mode).__module__ for mode in _get_current_function_mode_stack())


def use_default_device():
    """Use devices without a name, a named one, unified tensors, and the same after the default is reset."""
    torch.set_default_device("meta")
    with torch.device("cpu"):
        inside = torch.ones(1).device.type
    found = [inside, torch.ones(1).device.type, torch.ones(1, device="cpu").device.type]
    found.append(torch.ones(1, device="unified").tolist() + torch.ones(1, device="cpu").to("unified").tolist())
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    return [*found, torch.ones(1).device.type, torch.ones(1, device="unified").tolist(), count_modes()]


def enable_first():
    pyg_direct.enable_unified_device()
    return use_default_device()


def enable_with_default():
    torch.set_default_device("meta")
    pyg_direct.enable_unified_device()
    return use_default_device()


def enable_in_blocks():
    with Passing(), torch.device("meta"), Passing():
        pyg_direct.enable_unified_device()
        pyg_direct.enable_unified_device()
        assert torch.ones(1).device.type == "meta"
    return use_default_device()


def enable_in_one_block():
    with torch.device("meta"):
        pyg_direct.enable_unified_device()
    return use_default_device()


@pytest.mark.parametrize("enable", [enable_first, enable_with_default, enable_in_blocks, enable_in_one_block])
def test_default_devices_and_other_modes_keep_their_places(enable):
    assert run_in_thread(enable) == ["cpu", "meta", "cpu", [1, 1], "cpu", [1], 1]


@pytest.mark.slow
def test_compiled_programs_name_it():
    table = to_unified(torch.arange(6.0).view(3, 2).clone())

    def run(x):
        made = torch.zeros(2, device="unified") + 1
        return (x * 2).to("unified")[1:].cpu() + made.cpu() + table[:1].cpu()

    assert torch.compile(run, backend="aot_eager")(torch.ones(2, 2)).tolist() == run(torch.ones(2, 2)).tolist()
