"""Launch of a kernel on the device of its tensors: CPU loops on NumPy views, GPU grids through the driver or the
simulator.

`pull_by_torch` returns gradients of custom steps by torch's functions, for gradients of gradients and for batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_direct.compiler.jit import SIMULATED, THREADS, CpuKernel, GpuKernel, get_cpu_threads, run_alone
from pyg_direct.runtime.cuda.device import abilities
from pyg_direct.runtime.cuda.launch import OPEN, Launcher

_CODES = {torch.int8: "i1", torch.uint8: "u1", torch.int16: "i2", torch.int32: "i4", torch.uint32: "u4",
          torch.int64: "i8", torch.float32: "f4", torch.float64: "f8"}  # fmt: skip
# Blocks of a grid that share the work; each leaves one partial sum, which every block adds up.
_BLOCKS_PER_MULTIPROCESSOR = 8
MAX_BLOCKS = 3 if SIMULATED else 4096
# Edges of a batch that one thread samples in half a millisecond, as long as it takes to wake others for every loop.
FEW_ITEMS = 8192


def runs_on_gpu(tensor: Tensor) -> bool:
    """Report whether kernels over this tensor run as GPU grids (under the simulator: always)."""
    return SIMULATED or tensor.is_cuda


def is_heard(tensor: Tensor) -> bool:
    """Report whether a mode or a batch of gradients needs torch's dispatcher, slower than a launch."""
    return torch._C._len_torch_dispatch_stack() > 0 or is_batch(tensor)


def is_batch(tensor: Tensor) -> bool:
    """Report whether a tensor stands for a batch, of gradients or of `torch.func.vmap`, without memory."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor) or torch._C._functorch.is_batchedtensor(tensor)


def is_transformed() -> bool:
    """Report whether a transform of functions (`torch.func`) or forward-mode derivatives are active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Report whether torch is compiling or tracing."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_ordinary() -> bool:
    """Report whether torch runs calls eagerly: neither compiled, traced nor transformed."""
    return not (is_recorded() or is_transformed())


def full_grid(tensor: Tensor, resident_blocks: int = _BLOCKS_PER_MULTIPROCESSOR) -> int:
    """Return the blocks that fill the GPU of `tensor` if each multiprocessor holds `resident_blocks` at once."""
    if SIMULATED:
        return MAX_BLOCKS
    return min(MAX_BLOCKS, abilities(tensor.device.index).multiprocessors * resident_blocks)


def grid_for(items: int, tensor: Tensor) -> int:
    """Return the blocks for `items` independent items, one a thread, at most a full GPU."""
    return max(1, min(full_grid(tensor), -(-items // THREADS)))


def shared_grid(tensor: Tensor, rows: int, block_rows: int, resident_blocks: int) -> int:
    """Return the blocks that share rows, `block_rows` at a time, at most as many as the GPU holds at once."""
    return min(full_grid(tensor, resident_blocks), -(-rows // block_rows))


def grid_of(groups: int, lane_bits: int) -> int:
    """Return the blocks with a thread for each lane of each group."""
    return min(3 if SIMULATED else 2**31 - 1, max(1, -(-(groups << lane_bits) // THREADS)))


def choose_lane_bits(items: int, most: int = 32) -> int:
    """Return the logarithm of the threads that share a row: one for each item, at most a warp or so many."""
    return min(min(most, THREADS).bit_length() - 1, max(0, (items - 1).bit_length()))


def cpu_chunks() -> int:
    """Return the pieces into which a CPU loop is cut: one a thread."""
    return get_cpu_threads()


class threads_for:  # noqa: N801
    """One thread for the CPU loops of this block if they have few items, for which waking others would take longer."""

    # Not a generator: entering and leaving it would take as long as many a small loop.
    __slots__ = "before", "is_few"

    def __init__(self, items: int) -> None:
        self.is_few, self.before = items <= FEW_ITEMS, False

    def __enter__(self) -> None:
        if self.is_few:
            self.before = run_alone(True)

    def __exit__(self, *error: object) -> None:
        if self.is_few:
            run_alone(self.before)


def run_cpu(kernel: CpuKernel, *args: Any) -> Any:
    """Call a CPU loop; tensors become NumPy arrays over the same memory."""
    return kernel(*[a.numpy() if isinstance(a, Tensor) else a for a in args])


class _Dispatch:
    """Compiled specializations of a kernel, found by the arguments that distinguish them."""

    def __init__(self, kernel: GpuKernel) -> None:
        self.kernel = kernel
        codes = [token.removesuffix("[]") for token in kernel.signature]
        # Of a kernel that is given addresses alone, the current GPU is the one that they are of.
        self.first_array = next((i for i, token in enumerate(kernel.signature) if token.endswith("[]")), None)
        self.telling = [codes.index(letter) for letter in kernel.variants]
        self.several_gpus = torch.cuda.device_count() > 1
        self.launchers: dict[Any, Launcher] = {}
        # Their `launch`.
        self.launches: dict[Any, Callable[..., None]] = {}

    def compile(self, key: Any, args: tuple[Any, ...]) -> Callable[..., None]:
        """Compile and return a launch for the GPU and the dtypes of `args`, which `key` stands for."""
        index = self.find_gpu(args)
        choice = self.kernel.choose([_CODES.get(a.dtype, "") if isinstance(a, Tensor) else "" for a in args])
        code = self.kernel.compile(abilities(index).compute_capability, choice)
        self.launchers[key] = launcher = Launcher(code, self.kernel.parameters(choice), index, self.kernel.shared_bytes)
        self.launches[key] = launcher.launch
        return launcher.launch

    def find_gpu(self, args: Sequence[Any]) -> int:
        """Return the number of the GPU that the arguments are on."""
        return torch.cuda.current_device() if self.first_array is None else args[self.first_array].get_device()

    def make_key(self, args: Sequence[Any]) -> Any:
        """Return the key that distinguishes specializations."""
        index = self.find_gpu(args)
        return (index, *[args[i].dtype for i in self.telling]) if self.telling else index


_DISPATCHES: dict[GpuKernel, _Dispatch] = {}


def run_gpu(kernel: GpuKernel, grid: int, *args: Any, stream: int | None = None) -> None:
    """Enqueue a GPU grid on `stream`, or on torch's current one; tensors are contiguous, on the GPU, and seen flat."""
    if SIMULATED:
        kernel.simulate(grid, kernel.threads, [a.view(-1).numpy() if isinstance(a, Tensor) else a for a in args])
        return
    dispatch = _DISPATCHES.get(kernel)
    if dispatch is None:
        # The launch of another thread, if it came first.
        dispatch = _DISPATCHES.setdefault(kernel, _Dispatch(kernel))
    # As in `make_key`, without a call.
    index = dispatch.find_gpu(args)
    key = (index, *[args[i].dtype for i in dispatch.telling]) if dispatch.telling else index
    launch = dispatch.launches.get(key) or dispatch.compile(key, args)
    if dispatch.several_gpus and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(grid, kernel.threads, args, stream)
    else:
        launch(grid, kernel.threads, args, stream)


def prepare_gpu(kernel: GpuKernel, *args: Any) -> Callable[[int, tuple[Any, ...]], None]:
    """Return a `run_gpu` on torch's current stream for calls that differ in few arguments: (grid, those arguments) ->
    None.

    The others are written for the driver once, from the second call on: the first may be the only one.

    Args:
        args: Arguments of the kernel, with `OPEN` for those that differ; the first of these is an array on the GPU. If
            the kernel has variants, the dtype of that array alone chooses one.
    """
    changing, threads = [i for i, arg in enumerate(args) if arg is OPEN], kernel.threads
    settled: dict[Any, Callable[..., None] | None] = {}
    several_gpus = not SIMULATED and torch.cuda.device_count() > 1

    def start(key: Any, grid: int, values: tuple[Any, ...]) -> None:
        whole = list(args)
        for i, value in zip(changing, values, strict=True):
            whole[i] = value
        run_gpu(kernel, grid, *whole)
        # The kernel is compiled now, even if calls of other threads still wait for it or failed.
        if key in settled:
            dispatch = _DISPATCHES[kernel]
            settled[key] = dispatch.launchers[dispatch.make_key(whole)].settle(args)
        elif not SIMULATED:
            settled[key] = None

    def launch_settled(grid: int, values: tuple[Any, ...]) -> None:
        first = values[0]
        key = (first.dtype, first.get_device()) if several_gpus else first.dtype
        launch = settled.get(key)
        if launch is None:
            start(key, grid, values)
        elif several_gpus and key[1] != torch.cuda.current_device():
            with torch.cuda.device(key[1]):
                launch(grid, threads, values)
        else:
            launch(grid, threads, values)

    return launch_settled


def is_asked_again(grads: Sequence[Tensor | None]) -> bool:
    """Report whether gradients need gradients, or come as a batch, which the package's loops cannot compute."""
    return torch.is_grad_enabled() or any(is_heard(grad) for grad in grads if grad is not None)


def pull_by_torch(run: Callable[..., Sequence[Tensor]], given: Sequence[Tensor | None], needed: Sequence[bool],
                  grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the needed gradients of `given` through the result of `run(*given)`, which torch can differentiate again
    if gradients are enabled.

    Args:
        given: Inputs; None for those that are missing, which need no gradient.
        grads: Gradient of each result, None if nothing depends on it.
    """
    again = torch.is_grad_enabled()
    # Within a transform a new tensor cannot require gradients.
    is_known = again or is_transformed()
    with torch.enable_grad():
        # Views, because some inputs may be one tensor.
        views = [value if value is None else value.view_as(value) if is_known else value.detach().requires_grad_()
                 for value in given]  # fmt: skip
        # Of several results those with a gradient may depend on no input that needs one.
        pairs: Any = [pair for pair in zip(run(*views), grads, strict=True) if pair[1] is not None
                      and pair[0].requires_grad]  # fmt: skip
    wanted: Any = [view for view, is_needed in zip(views, needed, strict=True) if is_needed]
    if not pairs or not wanted:
        return (None,) * len(given)
    results, of_results = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, of_results, create_graph=again, allow_unused=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)
