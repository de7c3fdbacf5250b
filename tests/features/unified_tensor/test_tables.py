"""The tables of PyTorch-Direct, row by row: the calls, the hints and the rules of placement.

On a GPU, device and address of every result are asserted; without one, that the same calls give the same numbers.
"""

import pytest
import torch

import pyg_direct
from pyg_direct import MemAdvise, UnifiedTensor, to_unified, unified_device
from pyg_direct.features.unified_tensor import RULES
from pyg_direct.runtime.cuda.memory import find_block

pytestmark = pytest.mark.apart


@pytest.fixture(scope="module", autouse=True)
def _device_by_name():
    pyg_direct.enable_unified_device()


def lies_on_host(tensor):
    """Report whether a unified tensor lies at the address that both sides use, in memory that the driver manages."""
    if not torch.cuda.is_available():
        return tensor.data_ptr() == tensor.on_cpu().data_ptr()
    return tensor.memory.block.placement == "unified" and tensor.on_gpu().data_ptr() == tensor.on_cpu().data_ptr()


def kind_of(tensor):
    """`unified`, `cuda` or `cpu`, by type and address."""
    if isinstance(tensor, UnifiedTensor):
        assert lies_on_host(tensor)
        assert tensor.device == torch.device("cpu")
        return "unified"
    assert tensor.device.type in ("cpu", "cuda")
    return tensor.device.type


def table(propagated=True):
    """A unified tensor of 0 to 11, `[4, 3]`."""
    return to_unified(torch.arange(12.0).view(4, 3).clone(), propagatedToCUDA=propagated)


# Table 1: how unified tensors are made and used.


def test_table1_to_unified(device):
    source = torch.arange(6.0, device=device)

    got = source.to("unified")

    assert (kind_of(got), got.tolist()) == ("unified", [0, 1, 2, 3, 4, 5])
    source.fill_(7)
    assert got.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("make", "numbers"), [
    (lambda d: torch.ones(3, device=d), [1, 1, 1]), (lambda d: torch.zeros(3, device=d), [0, 0, 0]),
    (lambda d: torch.full((3,), 7, device=d), [7, 7, 7]), (lambda d: torch.arange(3, device=d), [0, 1, 2]),
    (lambda d: torch.linspace(0, 1, 3, device=d), [0, 0.5, 1]), (lambda d: torch.eye(2, device=d), [[1, 0], [0, 1]]),
    (lambda d: torch.tensor([3, 4], device=d), [3, 4]), (lambda d: torch.as_tensor([3, 4], device=d), [3, 4]),
    (lambda d: torch.ones(2, dtype=torch.bfloat16, device=d), [1, 1]), (lambda d: torch.empty(0, device=d), []),
    (lambda d: torch.zeros_like(torch.ones(2), device=d), [0, 0]),
    (lambda d: torch.ones(2).new_ones(2, device=d), [1, 1]), (lambda d: torch.randint(1, (2,), device=d), [0, 0]),
    (lambda d: torch.tril_indices(2, 2, device=d), [[0, 1, 1], [0, 0, 1]]),
])  # fmt: skip
def test_table1_factories(make, numbers):
    got = make("unified")

    assert got.tolist() == numbers
    assert kind_of(got) == "unified"


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_table1_factories_of_random_numbers(draw):
    got = draw(1000, device="unified")

    assert kind_of(got) == "unified"
    assert len(set(got.tolist())) > 990


def test_table1_randperm():
    got = torch.randperm(100, device="unified")

    assert (kind_of(got), sorted(got.tolist())) == ("unified", list(range(100)))


def test_table1_is_unified(device):
    assert torch.ones(128, device="unified").is_unified
    assert table().is_unified
    assert not torch.ones(128, device=device).is_unified


def test_table1_index_by_a_gpu_tensor(device):
    ids = torch.tensor([3, 0, 3], device=device)

    got = table()[ids]

    assert got.tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    # By ids on the CPU it is an operation with a tensor on the CPU, see Table 3.
    assert kind_of(got) == ("cuda" if device.type == "cuda" else "unified" if torch.cuda.is_available() else "cpu")


def test_table1_arithmetic_reads_the_operand_in_place(device):
    left = table()
    address = left.data_ptr()

    got = left + torch.ones(4, 3, device=device)

    assert got.tolist() == (torch.arange(12.0).view(4, 3) + 1).tolist()
    assert (left.data_ptr(), lies_on_host(left)) == (address, True)


@pytest.mark.parametrize("back", [lambda t: t.cpu(), lambda t: t.to("cpu"), lambda t: torch.empty(4, 3).copy_(t)])
def test_table1_to_the_cpu(back):
    source = table()

    got = back(source)

    assert (kind_of(got), got.tolist()) == ("cpu", table().tolist())
    got.zero_()
    assert source[1, 1].item() == 4


@pytest.mark.gpu
@pytest.mark.parametrize("back", [lambda t: t.cuda(), lambda t: t.to("cuda"), lambda t: t.T.to("cuda").T])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.complex64, torch.float64])
def test_table1_to_the_gpu(back, dtype):
    source = table().on_cpu().to(dtype).to("unified")

    got = back(source)

    assert (kind_of(got), got.dtype) == ("cuda", dtype)
    assert got.cpu().tolist() == source.tolist()


# Table 2: additional methods of a unified tensor.


@pytest.mark.parametrize("hint", [True, False])
def test_table2_set_propagated_to_cuda(hint):
    tensor = torch.ones(3, device="unified")

    tensor.set_propagatedToCUDA(hint)

    assert tensor.propagatedToCUDA is hint
    assert tensor[1:].propagatedToCUDA is hint
    assert tensor.clone().propagatedToCUDA is hint


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("make", [lambda d: torch.ones(3, device=d), lambda d: torch.ones(3).to(d),
                                  lambda d: torch.empty(3, device=d), lambda d: torch.rand(3, device=d),
                                  lambda d: torch.ones(3, device="unified").to(d, copy=True)])  # fmt: skip
def test_table2_hint_at_creation(make, hint):
    got = make(unified_device(propagatedToCUDA=hint))

    assert (kind_of(got), got.propagatedToCUDA) == ("unified", hint)


def test_table2_hint_of_to_unified():
    assert not to_unified(torch.ones(3), propagatedToCUDA=False).propagatedToCUDA


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["cpu", "cuda", None])
@pytest.mark.parametrize("advice", [*MemAdvise, "SetAccessedBy", "cudaMemAdviseUnsetReadMostly", 5], ids=str)
def test_table2_mem_advise(advice, target):
    tensor = torch.ones(1000, device="unified")

    tensor.memAdvise(advice, target)

    assert (tensor.tolist(), tensor.cuda().sum().item()) == ([1.0] * 1000, 1000)


@pytest.mark.gpu
def test_table2_advice_at_creation():
    got = to_unified(torch.ones(3), advise="SetPreferredLocation", adviseDevice="cpu")

    assert kind_of(got) == "unified"


def test_table2_mem_advise_needs_a_unified_tensor(device):
    with pytest.raises(RuntimeError, match="memAdvise needs a unified tensor, got one on c"):
        torch.ones(3, device=device).memAdvise(MemAdvise.cudaMemAdviseSetReadMostly, "cpu")


def test_table2_the_hint_needs_a_unified_tensor(device):
    with pytest.raises(RuntimeError, match="set_propagatedToCUDA needs a unified tensor"):
        torch.ones(3, device=device).set_propagatedToCUDA(True)


# Table 3: devices of operations and memory of results.

OTHERS = {"cuda": lambda: torch.full((4, 3), 2.0, device="cuda"), "cpu": lambda: torch.full((4, 3), 2.0),
          "none": lambda: torch.tensor(2.0)}  # fmt: skip
CASES = [pytest.param(*case, marks=pytest.mark.gpu if case[0] == "cuda" else [],
                      id=f"{case[0]}-{'propagated' if case[1] else 'not propagated'}") for case in RULES]  # fmt: skip


@pytest.mark.parametrize(("kind", "propagated"), CASES)
@pytest.mark.parametrize("swap", [False, True], ids=["unified first", "unified second"])
def test_table3_rule(kind, propagated, swap):
    left, right = table(propagated), OTHERS[kind]()
    expected = torch.arange(12.0).view(4, 3) * 2

    got = right * left if swap else left * right

    result = RULES[kind, propagated].result if torch.cuda.is_available() else "cpu"
    assert kind_of(got) == result
    assert got.cpu().tolist() == expected.tolist()
    if result == "unified":
        assert got.propagatedToCUDA is propagated
        assert got.data_ptr() != left.data_ptr()


@pytest.mark.parametrize(("kind", "propagated"), CASES)
def test_table3_an_operation_in_place_stays_in_place(kind, propagated):
    left = table(propagated)
    address = left.data_ptr()

    got = left.mul_(OTHERS[kind]())

    assert got is left
    assert (kind_of(left), left.data_ptr()) == ("unified", address)
    assert left.tolist() == (torch.arange(12.0).view(4, 3) * 2).tolist()


@pytest.mark.parametrize("propagated", [True, False])
def test_table3_python_numbers_are_scalars(propagated):
    got = table(propagated) * 2

    assert kind_of(got) == (("cuda" if propagated else "unified") if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("hints", [(True, True), (True, False), (False, False)])
def test_table3_one_propagated_operand_suffices(hints):
    got = table(hints[0]) + table(hints[1])

    assert kind_of(got) == (("cuda" if any(hints) else "unified") if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "propagated"), CASES)
def test_table3_operations_run_where_they_should(kind, propagated):
    left, right = table(propagated), OTHERS[kind]()
    before = left.tolist()
    # Loading a kernel may wait for the GPU.
    table(propagated).mul_(right)
    left.on_gpu()
    torch.cuda.synchronize()

    # Work queued after a long wait has not run when the CPU reads; the CPU's own work has.
    torch.cuda._sleep(200_000_000)
    left.mul_(right)
    early = left.host_view.tolist()

    assert (early == before) == (RULES[kind, propagated].compute == "cuda")
    assert left.tolist() == (torch.arange(12.0).view(4, 3) * 2).tolist()


def test_table3_views_stay_unified():
    tensor = table()
    views = [tensor[1:], tensor[:, 1], tensor.T, tensor.view(3, 4), tensor.reshape(12), tensor.unsqueeze(0),
             *tensor.split(2), tensor.detach(), tensor.expand(2, 4, 3)]  # fmt: skip

    assert {kind_of(view) for view in views} == {"unified"}
    tensor[1, 1] = 70
    assert (views[0][0, 1].item(), views[2][1, 1].item(), views[4][4].item()) == (70, 70, 70)


@pytest.mark.gpu
def test_a_page_locked_block_is_not_taken_for_a_unified_one():
    assert find_block(table().on_cpu()).placement == "unified"
