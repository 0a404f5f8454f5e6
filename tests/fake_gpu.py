"""A GPU that is not there: it runs the engine's GPU path on any CPU, with real tokens.

    with FakeGpu() as gpu:
        llm = LLM(folder, device="cuda", dtype="bfloat16")
        llm.generate(prompts, params)
    assert not gpu.host_reads

Inside the block, tensors with device="cuda" are `CudaTensor`s: they say that they are on cuda:0,
and hold memory of the CPU. A dispatch mode hands each operator of PyTorch to `FakeGpu.execute`,
which computes it on that memory by the rules of a GPU. Each rule has its check, and an error names
the line of nanoengine that broke it:

- An operator may not mix tensors of both devices, but for 0-dim tensors of the host.
- A host that reads a value waits for the device. `gpu.host_reads` counts such places; while a graph
  is captured they are errors.
- A copy to the host that does not block arrives when an event behind it is waited for. Until then
  there is rubbish.
- A copy from pinned memory that does not block may read that memory until an event behind it is
  waited for. What is written there in between breaks the copy.
- A CUDA graph is a list of operators over fixed memory. A replay runs these operators again, not
  the Python around them. All graphs share one pool: a replay spoils what the others have computed.
- Work of two streams on the same memory needs one that waits for the other. A graph holds the work
  of streams that wait for the captured one, and that one has to wait for theirs in the end.
- flash-attn and PyTorch's varlen kernel take only some types, shapes and strides.
- Each thread has a current device, and an event or a kernel of Triton goes there. `gpu.use_thread`
  begins a thread of the test, with any current device.
- The kernels of nanoengine_extras.gpu are one launch each, and compute what PyTorch's operators
  would.

Products, norms and attention are summed in float64. So a row has the same bits whatever rows are
beside it, and tokens must be equal with graphs or without, alone, in a batch or in chunks.

What it cannot check: kernels themselves, how much memory is free, memory that is freed and used
again, and speed. What passes here is not proven to work on a GPU, but what fails here is wrong.
"""

import ctypes
import importlib.machinery
import math
import os
import sys
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import nanoengine
from nanoengine import features as seams, model, sampler
from nanoengine.features import optional

HAS_TRITON = find_spec("triton") is not None
ENGINE_FOLDER = str(Path(nanoengine.__file__).parent)


class GpuError(Exception):
    """The engine did what a GPU would not allow, or what would give wrong results there.

    It is no RuntimeError: nothing that is prepared for those may catch it.
    """


# --------------------------------------------------------------------------------- tensors


class CudaTensor(Tensor):
    """A tensor that says that it is on cuda:0.

    memory: the tensor of the CPU that holds its numbers.
    """

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> "CudaTensor":
        self = Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), storage_offset=memory.storage_offset(),
            dtype=memory.dtype, device=torch.device("cuda:0"))
        self.memory = memory
        return self

    @classmethod
    def __torch_dispatch__(cls, operator: Any, kinds: Any, arguments: Any = (),
                           options: Any = None) -> Any:
        return active_gpu().execute(operator, arguments, options or {})

    # PyTorch refuses it for subclasses
    def tolist(self) -> Any:
        active_gpu().read_on_host("tolist")
        return self.memory.tolist()


@cache
def kind_of(each: type) -> type | None:
    """Which of these a type is, if any. To ask whether a number is a tensor takes long."""
    return next((kind for kind in (Tensor, dict, tuple, list) if issubclass(each, kind)), None)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists and dictionaries."""
    kind = kind_of(type(tree))
    if kind is Tensor:
        return [tree]
    found: list[Tensor] = []
    for each in (tree.values() if kind is dict else tree) if kind else ():
        kind = kind_of(type(each))
        if kind is Tensor:
            found.append(each)
        elif kind and each:
            found += tensors_of(each)
    return found


def with_others(kind: type[Tensor], function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest, with what a function returns in place of all tensors of a kind.

    For tuples, named tuples, lists and dictionaries it does what PyTorch's `tree_map_only` does, in
    a tenth of the time.
    """
    found = kind_of(type(tree))
    if found is Tensor:
        return function(tree) if isinstance(tree, kind) else tree
    if not found or not tree:
        return tree
    if found is dict:
        return {name: with_others(kind, function, each) for name, each in tree.items()}
    made = [with_others(kind, function, each) for each in tree]
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)


def to_memory(tree: Any) -> Any:
    """The same nest of arguments, with the memory of the tensors that are on the device."""
    return with_others(CudaTensor, lambda tensor: tensor.memory, tree)


def storage_of(tensor: Tensor) -> int:
    """Where its storage begins, which all views of it have in common."""
    return tensor.untyped_storage().data_ptr()


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def spoil(memory: Tensor) -> None:
    """Fills it with rubbish that no result can depend on by accident."""
    memory.fill_(torch.nan if memory.is_floating_point() else 77)


def is_same(left: Tensor, right: Tensor) -> bool:
    """Equal, where NaN is equal to NaN."""
    both_nan = (left != left) & (right != right)
    return bool(((left == right) | both_nan).all())


def place() -> str:
    """The line of nanoengine that is running now."""
    frame: Any = sys._getframe()
    while frame and not frame.f_code.co_filename.startswith(ENGINE_FOLDER):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "a test"


def warn_here(message: str) -> None:
    """A warning at the line that has called PyTorch, as PyTorch's own are."""
    frame: Any = sys._getframe()
    within = str(Path(torch.__file__).parent), __file__
    while frame.f_code.co_filename.startswith(within):
        frame = frame.f_back
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno)


# ------------------------------------------------------------------------------- operators

# their results, or the shapes of their results, depend on values: the host waits for them
DATA_DEPENDENT = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::bincount", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
SUMS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linalg_vector_norm",
        "aten::scaled_dot_product_attention"}


def compute(function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Calls an operator or a kernel on memory of the CPU.

    Matrix products, norms and attention are summed in float64 and rounded once: with any order of
    the sums, the result is the same.
    """
    if name_of(function) not in SUMS:
        return function(*arguments, **options)
    exact, options = with_others(Tensor, in_float64, (arguments, options))
    return function(*exact, **options).to(arguments[0].dtype)


def in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def without_gpu() -> Iterator[None]:
    """PyTorch as it is without a GPU. What is made here can be written to at any time."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


@cache
def name_of(function: Any) -> str:
    """"aten::mm" for an operator of PyTorch, or the name of a kernel."""
    return function.name().split(".")[0] if hasattr(function, "name") else function.__name__


@cache
def can_decompose(operator: Any) -> bool:
    return operator._can_decompose()


@cache
def is_mutable(function: Any) -> bool:
    """Whether it writes to its arguments; of kernels, that is not known."""
    return hasattr(function, "_schema") and function._schema.is_mutable


def is_kernel(function: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether it computes anything: it makes a tensor, and not only a view, or writes to one.

    given, made: the tensors among its arguments, and among its results.
    """
    # memory alone
    if name_of(function) in ("aten::empty_like", "aten::new_empty", "aten::empty"):
        return False
    if is_mutable(function):
        return True
    known = {storage_of(tensor) for tensor in given}
    return any(storage_of(tensor) not in known for tensor in made)


@dataclass(eq=False)
class Transfer:
    """A copy between pinned memory and the device, until an event behind it is waited for.

    number: it is the how-manieth of its device.
    pinned: its part of the pinned memory.
    value: what the device has written there, or what it has to find there.
    """

    number: int
    pinned: Tensor
    value: Tensor
    is_to_host: bool
    place: str

    def land(self) -> None:
        if self.is_to_host:
            self.pinned.copy_(self.value)
        elif not is_same(self.pinned, self.value):
            raise GpuError(
                f"a pinned buffer was rewritten before its copy at {self.place} was done")


class Intercept(TorchDispatchMode):
    """Hands all operators to a fake GPU, also those that make tensors."""

    def __init__(self, gpu: "FakeGpu") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operator: Any, kinds: Any, arguments: Any = (),
                           options: Any = None) -> Any:
        return self.gpu.execute(operator, arguments, options or {})


class FakeGpu:
    """While it is entered, PyTorch has this GPU. It can be entered again, with all its tensors.

    library: whether nanoengine_extras.gpu is, with Triton; by default where Triton is really
        installed.
    num_bytes: the size of its memory. All of it is always free.
    capability: what it can do, as CUDA numbers it.

    host_reads: how often the host had to wait for the device, by place and cause.
    num_launched: operators that ran outside of graphs.
    kernels: the names of those that are kernels, as views are not.
    pinned_bytes: of memory that is pinned now; PyTorch takes it in powers of two.
    num_replays, num_graphs: of CUDA graphs, how often they ran, and how many were captured.
    """

    active: "FakeGpu | None" = None
    capability = 9, 0

    def __init__(self, num_bytes: int = 2**28, library: bool = HAS_TRITON) -> None:
        self.library = library_functions() if library else {}
        self.num_bytes = num_bytes
        self.reset_counters()
        self.num_graphs = 0
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.captured: FakeGraph | None = None
        # by storage; kept for good, so that no other tensor comes to lie there
        self.pinned: dict[int, Tensor] = {}
        # by storage
        self.pinned_bytes: Counter[int] = Counter()
        self.num_transfers = 0
        self.in_flight: list[Transfer] = []
        self.main_stream = self.stream = FakeStream()
        # by storage: the stream that has last used it, and in the how-manieth of its operators
        self.last_used: dict[int, tuple[FakeStream, int]] = {}
        # of the main stream, when the capture of a graph began
        self.capture_began = 0
        self.intercept = Intercept(self)
        self.of_thread = threading.local()
        self.sync_debug_mode = "default"

    def reset_counters(self) -> None:
        self.host_reads: Counter[str] = Counter()
        self.num_launched = 0
        self.num_replays = 0
        self.kernels: list[str] = []

    # -------------------------------------------------------------------- entering and leaving

    def __enter__(self) -> "FakeGpu":
        assert FakeGpu.active is None, "one fake GPU at a time"
        # what `with torch.device(…)` knows is found once: it must be the functions of before
        _device_constructors()
        with ExitStack() as stack:
            stack.enter_context(device_guard())
            for owner, name, replacement in replacements(self):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            # mock.patch.dict would also forget every other module that is imported meanwhile
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setitem(sys.modules, "flash_attn", flash_attn_module())
            # the functions of a device are found once
            for found in (seams.kernels, optional):
                found.cache_clear()
                stack.callback(found.cache_clear)
            for name, function in self.library.items():
                patch.setattr(name, function)
            if not self.library:
                patch.setattr(seams, "optional", find_without_library)
            # so that torch.tensor(…, device="cuda") begins on the host
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, False)
            stack.enter_context(mock.patch.object(FakeGpu, "active", self))
            stack.enter_context(self.intercept)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.captured = None
        self.stack.__exit__(*exception)

    # ----------------------------------------------------------------------- one operator

    def execute(self, operator: Any, arguments: Any, options: Any) -> Any:
        """Runs an operator of PyTorch by the rules of a GPU, if it has to do with one."""
        # it makes tensors that a wrapper cannot hold
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.execute(operator, arguments, options)
        name = name_of(operator)
        options = dict(options)
        # `Tensor.to` of another tensor gives its device among the arguments
        given = (each for each in arguments if isinstance(each, torch.device))
        device = options.get("device") or next(given, None)
        if name == "aten::_to_copy" and device is not None and device.type == "meta":
            # "cuda" without an index: `device_guard` was asked for it, and is meta's
            device = options["device"] = torch.device("cuda:0")
        tensors = tensors_of((arguments, options))
        is_on_device = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        if not is_on_device and not is_cuda(device):
            return self.execute_on_host(operator, arguments, options)

        if can_decompose(operator) and name not in SUMS:
            # PyTorch 2.9 would ask the GPU what its kernels for attention can do
            is_attention = "attention" in name
            with self.intercept, sdpa_kernel(SDPBackend.MATH) if is_attention else nullcontext():
                result = operator.decompose(*arguments, **options)
            if result is not NotImplemented:
                return result
        if name == "aten::_to_copy":
            return self.copy(operator, arguments[0], options)
        if name == "aten::copy_":
            return self.copy_into(operator, *arguments, **options)
        self.check_arguments(name, arguments, options, tensors)
        if is_cuda(device):
            options["device"] = torch.device("cpu")
        return self.launch(operator, arguments, options)

    def execute_on_host(self, operator: Any, arguments: Any, options: Any) -> Any:
        is_pinned = options.pop("pin_memory", False)
        result = operator(*arguments, **options)
        return self.note_pinned(result) if is_pinned else result

    def note_pinned(self, tensor: Tensor) -> Tensor:
        """Notes that a new tensor is in pinned memory of PyTorch's own allocator."""
        storage = storage_of(tensor)
        self.pinned[storage] = tensor
        self.pinned_bytes[storage] = 1 << max(tensor.nbytes - 1, 0).bit_length()
        return tensor

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        """What cudaHostRegister does."""
        if address in self.pinned_bytes or num_bytes == 0 or flags:
            return 1
        self.pinned[address] = torch.empty(0)
        self.pinned_bytes[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        """What cudaHostUnregister does. Copies must have ended."""
        if any(storage_of(transfer.pinned) == address for transfer in self.in_flight):
            return 1
        del self.pinned[address], self.pinned_bytes[address]
        return 0

    def check_arguments(self, name: str, arguments: Any, options: Any,
                        tensors: list[Tensor]) -> None:
        """Raises GpuError for tensors of both devices; notes what the host has to wait for."""
        on_host = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        on_host = [tensor for tensor in on_host if tensor.ndim > 0]
        if name in INDEXING:
            indices = tensors_of(arguments[1])
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.read_on_host("indexing by a mask")
            # an index from the host is copied to the device
            from_host = [tensor for tensor in on_host if any(tensor is index for index in indices)]
            if from_host:
                self.read_on_host("an index from the host")
            on_host = on_host[len(from_host):]
            if "put" in name and not isinstance(arguments[2], CudaTensor):
                self.read_on_host("a number from the host that is put into places")
        makes_tensor = name.endswith("_like") or "::new_" in name
        if on_host and not makes_tensor:
            shown = [(type(tensor).__name__, tuple(tensor.shape)) for tensor in tensors]
            raise GpuError(f"{name} on tensors of both devices at {place()}: {shown}")
        is_of_unknown_size = name == "aten::repeat_interleave" and not options.get("output_size")
        if name in DATA_DEPENDENT or is_of_unknown_size:
            self.read_on_host(name.removeprefix("aten::"))

    def launch(self, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
        """Runs an operator or a kernel on the device; a graph that is captured records it."""
        of_memory = to_memory((arguments, options))
        # what a kernel does is no work of the host; in an operator, no mode is on
        with nullcontext() if hasattr(function, "_schema") else without_gpu():
            result = compute(function, *of_memory)
        given = [each for each in tensors_of((arguments, options)) if isinstance(each, CudaTensor)]
        self.use(given)
        made = tensors_of(result)
        computes = is_kernel(function, tensors_of(of_memory), made)
        if self.captured is None:
            self.num_launched += 1
            if computes:
                self.kernels.append(name_of(function))
        # views need no work when a graph runs again
        elif computes:
            self.captured.record(function, *of_memory, made)
        # an operator that works in place returns its argument
        by_memory = {id(each.memory): each for each in given}
        assert all(each.shape == each.memory.shape for each in given), "a wrapper keeps its shape"

        def wrap(made: Tensor) -> CudaTensor:
            return by_memory[id(made)] if id(made) in by_memory else CudaTensor(made)

        return with_others(Tensor, wrap, result)

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Notes that an operator of the current stream uses the tensors that are on the device.

        Raises GpuError if another stream might still be at work on one of them.
        """
        stream = self.stream
        if not self.is_held(stream):
            raise GpuError(f"work at {place()} on a stream that the graph does not hold")
        stream.num_operators += 1
        for tensor in tensors:
            if isinstance(tensor, CudaTensor):
                storage = storage_of(tensor.memory)
                other, number = self.last_used.get(storage, (stream, 0))
                if other is not stream and stream.waited.get(other, 0) < number:
                    raise GpuError(f"work at {place()} does not wait for another stream")
                self.last_used[storage] = stream, stream.num_operators

    def is_held(self, stream: "FakeStream") -> bool:
        """Whether the graph that is captured, if there is one, holds the work of the stream."""
        is_forked = stream.waited.get(self.main_stream, -1) >= self.capture_began
        return self.captured is None or stream is self.main_stream or is_forked

    def use_stream(self, stream: "FakeStream") -> Any:
        """What `torch.cuda.stream` does."""
        return mock.patch.object(self, "stream", stream)

    # ------------------------------------------------------------------ the current device

    def current_device(self) -> int:
        """That of this thread; all tensors are on device 0."""
        return getattr(self.of_thread, "device", 0)

    def exchange_device(self, device: int) -> int:
        """What `torch.cuda._exchange_device` does."""
        before = self.current_device()
        self.of_thread.device = device
        return before

    def set_device(self, device: Any) -> None:
        self.exchange_device(torch.device("cuda", device).index)

    def check_device(self, what: str) -> None:
        if self.current_device() != 0:
            raise GpuError(f"{what} at {place()} goes to cuda:{self.current_device()}, the current "
                           "device of this thread, and its tensors are on cuda:0")

    def current_stream(self, device: Any = None) -> "FakeStream":
        if device is None:
            self.check_device("the current stream")
        return self.stream

    def use_thread(self, function: Callable[[], Any], device: int = 0) -> Any:
        """Calls a function in another thread, with a current device; returns its result."""
        def call() -> Any:
            self.set_device(device)
            # a dispatch mode belongs to a thread, too
            with self.intercept:
                return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    # ---------------------------------------------------------------- between the two memories

    def copy(self, operator: Any, source: Tensor, options: Any) -> Tensor:
        """A copy of another type, or on another device: what `Tensor.to` does."""
        non_blocking = options.pop("non_blocking", False)
        target_device = options.pop("device", source.device)
        options.pop("pin_memory", None)
        if isinstance(source, CudaTensor) and is_cuda(target_device):
            return self.launch(operator, (source,), options)
        self.check_not_capturing("a copy between the devices")
        self.num_launched += 1
        if not isinstance(source, CudaTensor):
            return CudaTensor(operator(self.read_from_host(source, non_blocking), **options))
        target = operator(source.memory, **options)
        if non_blocking:
            # PyTorch makes the new tensor in pinned memory
            self.note_pinned(target)
        self.write_to_host(target, target.clone(), non_blocking)
        return target

    def copy_into(self, operator: Any, target: Tensor, source: Tensor,
                  non_blocking: bool = False) -> Tensor:
        """A copy into a tensor that is there already: what `Tensor.copy_` does."""
        # a graph copies from the same pinned memory each time
        is_captured = self.captured is not None and non_blocking and self.is_pinned(source)
        if isinstance(target, CudaTensor) and (isinstance(source, CudaTensor) or is_captured):
            return self.launch(operator, (target, source), {})
        self.check_not_capturing("a copy between the devices")
        self.num_launched += 1
        self.use((target, source))
        if isinstance(target, CudaTensor):
            target.memory.copy_(self.read_from_host(source, non_blocking))
        else:
            assert isinstance(source, CudaTensor)
            value = source.memory.to(target.dtype, copy=True).expand_as(target)
            self.write_to_host(target, value, non_blocking)
        return target

    def read_from_host(self, source: Tensor, non_blocking: bool) -> Tensor:
        """What the device finds in memory of the host when it comes to it."""
        source = source.detach()
        if source.numel() == 0:
            return source
        if not non_blocking or not self.is_pinned(source):
            what = "memory that is not pinned" if non_blocking else "the host that blocks"
            self.read_on_host(f"a copy from {what}")
            return source
        # The device does one thing after the other: what it writes there comes first.
        writes = [each for each in self.in_flight_at(source) if each.is_to_host]
        for transfer in writes:
            transfer.land()
        value = source.clone()
        for transfer in writes:
            spoil(transfer.pinned)
        if not writes:
            self.begin_transfer(source, value, is_to_host=False)
        return value

    def write_to_host(self, target: Tensor, value: Tensor, non_blocking: bool) -> None:
        """Writes a value of the device to memory of the host, now or when it is waited for."""
        if not non_blocking or not self.is_pinned(target):
            what = "memory that is not pinned" if non_blocking else "the host that blocks"
            self.read_on_host(f"a copy to {what}")
            target.copy_(value)
            return
        # The device does one thing after the other: what it reads there comes first.
        for transfer in self.in_flight_at(target):
            if not transfer.is_to_host:
                transfer.land()
                self.in_flight.remove(transfer)
        self.begin_transfer(target, value, is_to_host=True)
        spoil(target)

    def begin_transfer(self, pinned: Tensor, value: Tensor, is_to_host: bool) -> None:
        self.num_transfers += 1
        self.in_flight.append(Transfer(self.num_transfers, pinned, value, is_to_host, place()))

    def in_flight_at(self, pinned: Tensor) -> list[Transfer]:
        here = storage_of(pinned)
        return [transfer for transfer in self.in_flight if storage_of(transfer.pinned) == here]

    def is_pinned(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """What `Tensor.pin_memory` does."""
        return tensor if self.is_pinned(tensor) else self.note_pinned(tensor.clone())

    # -------------------------------------------------------------------------- waiting

    def read_on_host(self, cause: str) -> None:
        """The host needs a value, or memory, that the device has: it waits for all of its work."""
        self.check_not_capturing(cause)
        self.host_reads[f"{place()}: {cause}"] += 1
        if self.sync_debug_mode == "warn":
            warn_here("called a synchronizing CUDA operation")
        self.wait_for(self.num_transfers)

    def check_not_capturing(self, what: str) -> None:
        if self.captured is not None:
            raise GpuError(f"{what} while a graph is captured, at {place()}")

    def wait_for(self, number: int) -> None:
        """Ends all transfers up to that number."""
        done = [transfer for transfer in self.in_flight if transfer.number <= number]
        self.in_flight = [transfer for transfer in self.in_flight if transfer.number > number]
        with without_gpu():
            for transfer in done:
                transfer.land()

    def synchronize(self, device: Any = None) -> None:
        """What `torch.cuda.synchronize` does."""
        self.read_on_host("synchronize")

    @contextmanager
    def capture(self, graph: "FakeGraph", pool: Any = None, stream: Any = None,
                capture_error_mode: str = "global") -> Iterator[None]:
        """What `torch.cuda.graph` does; it begins by waiting for the device."""
        self.wait_for(self.num_transfers)
        self.num_graphs += 1
        self.main_stream.num_operators += 1
        self.capture_began = self.main_stream.num_operators
        with mock.patch.object(self, "captured", graph):
            yield
            for other in {stream for stream, _ in self.last_used.values()} - {self.main_stream}:
                is_waited = self.main_stream.waited.get(other, 0) >= other.num_operators
                if self.is_held(other) and not is_waited:
                    raise GpuError("a capture ended before the work of another stream")


def active_gpu() -> FakeGpu:
    if FakeGpu.active is None:
        raise GpuError("a tensor of a fake GPU is used where no fake GPU is entered")
    return FakeGpu.active


# --------------------------------------------------------------- events, streams and graphs


class FakeEvent:
    """Stands in for torch.cuda.Event. It is behind all transfers that had begun."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.enable_timing = enable_timing
        self.number: int | None = None
        self.time = 0

    def record(self, stream: Any = None) -> None:
        gpu = active_gpu()
        if stream is None:
            gpu.check_device("an event")
        self.number = gpu.num_transfers
        self.time = gpu.num_launched + gpu.num_replays

    def synchronize(self) -> None:
        gpu = active_gpu()
        gpu.check_not_capturing("waiting for an event")
        gpu.wait_for(self.number or 0)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds; here each operator takes one."""
        if not (self.enable_timing and end.enable_timing):
            raise GpuError("events without enable_timing=True know no time")
        return float(end.time - self.time)


class FakeStream:
    """Stands in for torch.cuda.Stream.

    num_operators: how many it has run.
    waited: by stream, how many of another's operators have surely run before the next one here.
    """

    def __init__(self) -> None:
        self.num_operators = 0
        self.waited: dict[FakeStream, int] = {}

    def wait_stream(self, other: "FakeStream") -> None:
        if not active_gpu().is_held(other):
            raise GpuError(f"a graph waits, at {place()}, for work that it does not hold")
        for stream, number in (*other.waited.items(), (other, other.num_operators)):
            self.waited[stream] = max(number, self.waited.get(stream, 0))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event


@dataclass
class Record:
    """An operator of a graph, with the memory that it reads and writes.

    outputs: the memory of its results, None for those that lie in memory of its arguments.
    """

    function: Callable[..., Any]
    arguments: Any
    options: Any
    outputs: list[Tensor | None]

    def run(self) -> None:
        results = tensors_of(compute(self.function, self.arguments, self.options))
        for output, result in zip(self.outputs, results):
            if output is not None:
                output.copy_(result)


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph: operators in order, over fixed memory."""

    def __init__(self) -> None:
        self.gpu = active_gpu()
        self.gpu.graphs.add(self)
        self.records: list[Record] = []

    def record(self, function: Callable[..., Any], arguments: Any, options: Any,
               made: list[Tensor]) -> None:
        """Notes what has just been computed. made: the tensors among the results"""
        known = {storage_of(tensor) for tensor in tensors_of((arguments, options))}
        outputs = [None if storage_of(tensor) in known else tensor for tensor in made]
        self.records.append(Record(function, arguments, options, outputs))

    def replay(self) -> None:
        self.gpu.check_not_capturing("the replay of another graph")
        self.gpu.num_replays += 1
        with without_gpu():
            for graph in self.gpu.graphs:
                if graph is not self:
                    graph.spoil()
            for record in self.records:
                record.run()

    def spoil(self) -> None:
        """Another graph has used the pool for what it computes."""
        for record in self.records:
            for output in record.outputs:
                if output is not None:
                    spoil(output)


# ------------------------------------------------------------------------ attention kernels


def check(condition: bool, message: str) -> None:
    if not condition:
        raise GpuError(f"attention at {place()}: {message}")


def check_paged(query: Tensor, keys: Tensor, values: Tensor, block_tables: Any,
                num_seqs: int) -> None:
    """What flash-attn demands of queries and of a paged cache (2.8.3, flash_api.cpp)."""
    named = {"queries": query, "keys": keys, "values": values, "block_table": block_tables}
    for name, tensor in named.items():
        check(isinstance(tensor, CudaTensor), f"{name} must be on the GPU")
        check(tensor.stride(-1) == 1, f"{name} must be contiguous in the last dimension")
    check(query.dtype in (torch.float16, torch.bfloat16), f"float16 or bfloat16, not {query.dtype}")
    check(query.dtype == keys.dtype == values.dtype, "queries, keys and values must have one dtype")
    check(block_tables.dtype == torch.int32, f"block_table must be int32, not {block_tables.dtype}")
    check(keys.ndim == 4 and keys.shape == values.shape,
          "keys and values must be (blocks, block_size, kv_heads, head_dim)")
    check(keys.shape[1] % 256 == 0, f"blocks of {keys.shape[1]} tokens are no multiple of 256")
    head_dim = query.shape[-1]
    check(head_dim == keys.shape[3], "queries and keys must have one size of heads")
    check(head_dim <= 256 and head_dim % 8 == 0, f"heads of {head_dim} numbers")
    check(query.shape[-2] % keys.shape[2] == 0, "the number of heads of queries and of keys")
    check(num_seqs > 0, "an empty batch")
    check(block_tables.ndim == 2 and len(block_tables) == num_seqs,
          f"block_table must have {num_seqs} rows, and has the shape {tuple(block_tables.shape)}")
    # the kernel loads 16 bytes at a time
    for name, tensor in list(named.items())[:3]:
        offsets = [tensor.storage_offset(), *tensor.stride()[:-1]]
        is_aligned = all(offset * tensor.itemsize % 16 == 0 for offset in offsets)
        check(is_aligned, f"{name} must be aligned to 16 bytes")


def check_counts(name: str, counts: Any, size: int) -> None:
    """What flash-attn demands of lengths, and of numbers that are summed up."""
    check(isinstance(counts, CudaTensor), f"{name} must be on the GPU")
    check(counts.dtype == torch.int32, f"{name} must be int32, not {counts.dtype}")
    check(counts.is_contiguous(), f"{name} must be contiguous")
    check(counts.shape == (size,), f"{name} must have the shape ({size},), not {counts.shape}")


def check_maximum(name: str, value: Any, most: int) -> None:
    check(type(value) is int, f"{name} must be an int, not {type(value).__name__}")
    check(most <= value, f"{name} is {value}, and there are {most}")


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor,
                    counts: list[int], lengths: list[int], window: int, is_causal: bool,
                    soft_cap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """What the kernels compute, in float64, rounded once.

    query: (T, heads, head_dim); keys, values: (blocks, block_size, kv_heads, head_dim).
    counts, lengths: how many queries, and how many keys, each sequence has.
    window: a query sees so many keys to its left, -1 for all.
    soft_cap, sinks: as those of nanoengine_extras.gpu.
    """
    block_size, kv_heads = keys.shape[1:3]
    check(max(lengths) <= block_tables.shape[1] * block_size, "more keys than the table has blocks")
    check(sum(counts) == len(query), f"{len(query)} queries, and {sum(counts)} of all sequences")
    out = torch.empty_like(query)
    stop = 0
    for table, count, length in zip(block_tables, counts, lengths):
        start, stop = stop, stop + count
        if not count:
            continue
        blocks = table[:-(-length // block_size)].long()
        # (kv_heads, keys, head_dim) and (kv_heads, queries of its group, head_dim)
        key, value = (cache[blocks].flatten(0, 1)[:length].double().transpose(0, 1)
                      for cache in (keys, values))
        heads = query[start:stop].double().unflatten(1, (kv_heads, -1)).movedim(0, 2)
        scores = (heads.flatten(1, 2) @ key.mT).view(-1, count, length)
        scores *= query.shape[-1] ** -0.5
        positions = torch.arange(length - count, length)
        ages = positions[:, None] - torch.arange(length)
        is_seen = (ages >= 0) if is_causal else torch.ones_like(ages, dtype=torch.bool)
        if window >= 0:
            is_seen &= ages <= window
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        found = weights.reshape(kv_heads, -1, length) @ value
        out[start:stop] = found.view(-1, count, query.shape[2]).transpose(0, 1)
    return out


def decode_kernel(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor,
                  block_tables: Tensor, window: int) -> Tensor:
    """Each sequence has one query. This runs, on memory of the CPU, in each replay of a graph."""
    counts = [1] * len(query)
    return paged_attention(query[:, 0], keys, values, block_tables, counts, lengths.tolist(),
                           window, True)[:, None]


def varlen_kernel(query: Tensor, keys: Tensor, values: Tensor, query_starts: Tensor,
                  lengths: Tensor, block_tables: Tensor, longest_query: int, longest_keys: int,
                  window: int, is_causal: bool) -> Tensor:
    """A sequence has any number of queries. This, too, runs in each replay of a graph."""
    counts = query_starts.diff().tolist()
    check_maximum("max_seqlen_q", longest_query, max(counts))
    check_maximum("max_seqlen_k", longest_keys, int(lengths.max()))
    # rows before those of the first sequence stay as they are
    first = int(query_starts[0])
    out = torch.full_like(query, torch.nan)
    out[first:] = paged_attention(query[first:], keys, values, block_tables, counts,
                                  lengths.tolist(), window, is_causal)
    return out


def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Any, block_table: Any,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """flash-attn's function for decodes, with those of its arguments that the engine gives."""
    check(q.ndim == 4 and q.shape[1] == 1, "queries must be (sequences, 1, heads, head_dim)")
    check_paged(q, k_cache, v_cache, block_table, len(q))
    check_counts("cache_seqlens", cache_seqlens, len(q))
    check(window_size[1] in (-1, 0), "only windows to the left are emulated")
    arguments = q, k_cache, v_cache, cache_seqlens, block_table, window_size[0]
    return active_gpu().launch(decode_kernel, arguments, {})


def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, *, block_table: Any, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """flash-attn's function for prompts and decodes, with the arguments that the engine gives."""
    check(q.ndim == 3, "queries must be (tokens, heads, head_dim)")
    num_seqs = cu_seqlens_q.numel() - 1
    check_paged(q, k, v, block_table, num_seqs)
    check_counts("cu_seqlens_q", cu_seqlens_q, num_seqs + 1)
    check_counts("cu_seqlens_k", cu_seqlens_k, num_seqs + 1)
    check(window_size[1] in (-1, 0), "only windows to the left are emulated")
    is_causal = (causal and max_seqlen_q > 1) or window_size[1] == 0
    arguments = (q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, max_seqlen_q,
                 max_seqlen_k, window_size[0], is_causal)
    return active_gpu().launch(varlen_kernel, arguments, {})


def splits_of_keys(num_heads: int, longest_query: int, longest_keys: int, head_dim: int) -> int:
    """Into how many parts FlashAttention 2 splits the keys on an H100 (`num_splits_heuristic` in
    flash_api.cpp): as few as keep its 132 multiprocessors nearly as busy as they can be."""
    num_blocks = -(-longest_keys // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    work, slots = num_heads * -(-longest_query // 64), 2 * 132
    if work >= 0.8 * slots:
        return 1
    sizes = [size for size in range(1, min(128, slots, num_blocks) + 1)
             if size == 1 or -(-num_blocks // size) != -(-num_blocks // (size - 1))]
    waves = {size: work * size / slots for size in sizes}
    busy = {size: wave / math.ceil(wave) for size, wave in waves.items()}
    return min(size for size in sizes if busy[size] >= 0.85 * max(busy.values()))


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Any, cu_seq_k: Any, max_q: int,
                max_k: int, *, enable_gqa: bool, seqused_k: Any, window_size: tuple[int, int],
                block_table: Any, num_splits: int | None = None) -> Tensor:
    """PyTorch's function, from 2.12 on, with those of its arguments that the engine gives."""
    check(query.ndim == 3, "queries must be (tokens, heads, head_dim)")
    num_seqs = cu_seq_q.numel() - 1
    check_paged(query, key, value, block_table, num_seqs)
    check(enable_gqa or query.size(1) == key.size(2), "more heads of queries need enable_gqa=True")
    check_counts("cu_seq_q", cu_seq_q, num_seqs + 1)
    check_counts("cu_seq_k", cu_seq_k, num_seqs + 1)
    check_counts("seqused_k", seqused_k, num_seqs)
    check(window_size[1] in (-1, 0), "only windows to the left are emulated")
    check(num_splits is None or torch.__version__ >= "2.13", "2.12 refuses num_splits")
    is_grouped = max_q == 1 and window_size == (-1, -1) and query.size(1) > key.size(2)
    if num_seqs > 1 and not is_grouped and num_splits != 1 and torch.__version__ >= "2.13":
        check(splits_of_keys(num_seqs * query.size(1), max_q, max_k, query.size(2)) == 1,
              "the keys of several sequences are split: only the first one's results are right")
    arguments = (query, key, value, cu_seq_q, seqused_k, block_table, max_q, max_k, window_size[0],
                 window_size[1] == 0)
    return active_gpu().launch(varlen_kernel, arguments, {})


def flash_attn_module() -> types.ModuleType:
    """A module that can be imported, and found without being imported."""
    module: Any = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", loader=None)
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


# -------------------------------------------------------------- kernels of nanoengine_extras.gpu


def find_without_library(name: str) -> Any:
    """What `optional` returns where the library is not installed."""
    return None if name == "nanoengine_extras.gpu" else optional(name)


def norm_kernel(x: Tensor, weight: Tensor, eps: float,
                delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    return total, model.rms_norm(total, weight, eps)


def few_rows_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                    norm: Tensor | None = None, eps: float = 0.0, delta: Tensor | None = None,
                    is_gated: bool = False) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    normed = total if norm is None else model.rms_norm(total, norm, eps)
    bias = None if bias is None else bias.double()
    product = F.linear(normed.double(), weight.double(), bias).to(x.dtype)
    return total, model.swiglu(product) if is_gated else product


def in_parts(cache: Any) -> tuple[Any, ...]:
    """A cache as arguments of a kernel: its memory, and its class and types if it has 8 bits."""
    if not hasattr(cache, "stored"):
        return cache, None
    return cache.memory, (type(cache), cache.stored, cache.dtype)


def joined(memory: Tensor, kind: Any) -> Any:
    """The cache with these parts."""
    return kind[0](memory, *kind[1:]) if kind else memory


def heads_kernel(qkv: Tensor, query_norm: Any, key_norm: Any, eps: float, angles: Tensor,
                 memory: Tensor, kind: Any, slots: Tensor) -> Tensor:
    cache = joined(memory, kind)
    num_keys = cache.shape[3]
    query, key, value = qkv.split([qkv.shape[1] - 2 * num_keys, num_keys, num_keys], dim=1)
    if query_norm is not None:
        query, key = (model.rms_norm(query, query_norm, eps), model.rms_norm(key, key_norm, eps))
    cos, sin = angles.view(2, len(qkv), 1, angles.shape[-1])
    cache.flatten(1, 2)[:, slots] = torch.stack((model.rotate(key, cos, sin), value))
    return model.rotate(query, cos, sin)


def triton_kernel(query: Tensor, memory: Tensor, kind: Any, lengths: Tensor, starts: Tensor,
                  block_tables: Tensor, longest_query: int, longest_keys: int,
                  window: int | None, soft_cap: float | None, sinks: Tensor | None) -> Tensor:
    """It takes float32 as well, numbers of 8 bits, and blocks of any size."""
    cache: Any = memory
    if kind:
        # only the blocks that are asked for: to convert all takes seconds
        blocks, places = block_tables.unique(return_inverse=True)
        cache, block_tables = joined(memory, kind)[:, blocks.long()], places
    counts = starts.diff().tolist()
    check_maximum("longest_query", longest_query, max(counts))
    check_maximum("longest_keys", longest_keys, int(lengths.max()))
    left = window - 1 if window else -1
    return paged_attention(query, *cache, block_tables, counts, lengths.tolist(), left, True,
                           soft_cap, sinks)


def draw_kernel(numbers: Tensor, uniform: Tensor, temperature: Tensor | None = None) -> Tensor:
    """numbers: weights; with a temperature, logits"""
    if temperature is not None:
        numbers = sampler.scale(numbers.to(torch.float32, copy=True), temperature).exp_()
    return sampler.draw(numbers, uniform)


def library_functions() -> dict[str, Any]:
    """What stands there instead of a function of the library, by its name where it is called. What
    the library does around its kernels is not emulated: its own tests interpret it."""
    def launch(kernel: Any, *arguments: Any, **options: Any) -> Any:
        active_gpu().check_device(f"the kernel {kernel.__name__}")
        return active_gpu().launch(kernel, arguments, options)

    def few_rows_linear(x: Any, *arguments: Any, **options: Any) -> Any:
        check(x.numel() <= 8 * x.shape[-1], "a kernel for at most 8 rows")
        return launch(few_rows_kernel, x, *arguments, **options)

    def store_heads(*arguments: Any) -> Any:
        check(arguments[5].is_contiguous(), "the cache must be contiguous")
        return launch(heads_kernel, *arguments[:5], *in_parts(arguments[5]), *arguments[6:])

    def attend(query: Any, cache: Any, window: int | None, step: Any,
               soft_cap: float | None = None, sinks: Any = None) -> Any:
        check_counts("query_starts", step.query_starts, len(step.lengths) + 1)
        check_counts("lengths", step.lengths, len(step.lengths))
        check(cache.is_contiguous(), "the cache must be contiguous")
        check(step.block_tables.dtype == torch.int32, "block_tables must be int32")
        if sinks is not None:
            check((sinks.dtype, sinks.shape) == (torch.float32, query.shape[1:2]),
                  "sinks must be float32, one for each head")
        return launch(triton_kernel, query, *in_parts(cache), step.lengths, step.query_starts,
                      step.block_tables, step.longest_query, step.longest_keys, window, soft_cap,
                      sinks)

    def truncate(scores: Any, draws: Any, truncations: set, top_ks: list) -> Any:
        tokens = torch.arange(scores.shape[1], device=scores.device)
        return tokens, launch(sampler.truncate, scores, draws)

    found = {"modules.rms_norm": partial(launch, norm_kernel),
             "modules.swiglu": partial(launch, model.swiglu),
             "modules.few_rows_linear": few_rows_linear, "modules.store_heads": store_heads,
             "paged_attention": attend, "truncate": truncate, "draw": partial(launch, draw_kernel)}
    return {f"nanoengine_extras.gpu.{name}": function for name, function in found.items()}


# ---------------------------------------------------------------- what PyTorch has instead


def replacements(gpu: FakeGpu) -> list[tuple[Any, str, Any]]:
    """(owner, name, what stands there instead) for all that asks a driver."""
    to, tensor = Tensor.to, torch.tensor

    def with_index(each: Any) -> Any:
        return "cuda:0" if isinstance(each, str) and each == "cuda" else each

    def to_with_index(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Without an index, "cuda" would ask the driver which device is the current one."""
        arguments = tuple(with_index(each) for each in arguments)
        if "device" in options:
            options["device"] = with_index(options["device"])
        return to(self, *arguments, **options)

    def tensor_pinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = tensor(*arguments, **options)
        return gpu.pin(made) if pin_memory else made

    def check_error(status: int) -> None:
        if status:
            raise GpuError(f"a call of CUDA's at {place()} returned {status}")

    cudart = types.SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.unregister)
    found: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "cudart", lambda: cudart),
        (torch.cuda, "check_error", check_error),
        (torch.cuda, "current_device", gpu.current_device),
        (torch.cuda, "set_device", gpu.set_device),
        (torch.cuda, "_exchange_device", gpu.exchange_device),
        (torch.cuda, "_maybe_exchange_device", gpu.exchange_device),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        (torch.cuda, "mem_get_info", lambda device=None: (gpu.num_bytes, gpu.num_bytes)),
        (torch.cuda, "synchronize", gpu.synchronize),
        # a fake tensor cannot take the data of another one
        (torch.__future__, "_overwrite_module_params_on_conversion", True),
        (torch.cuda, "get_sync_debug_mode", lambda: gpu.sync_debug_mode),
        (torch.cuda, "set_sync_debug_mode", partial(setattr, gpu, "sync_debug_mode")),
        (torch.cuda, "current_stream", gpu.current_stream),
        (torch.cuda, "stream", gpu.use_stream),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "Event", FakeEvent),
        (torch.cuda, "CUDAGraph", FakeGraph),
        (torch.cuda, "graph", gpu.capture),
        (torch.cuda, "graph_pool_handle", lambda: (0, 1)),
        (torch, "tensor", tensor_pinned),
        (Tensor, "to", to_with_index),
        (Tensor, "pin_memory", lambda self, device=None: gpu.pin(self)),
        (Tensor, "is_pinned", lambda self, device=None: gpu.is_pinned(self))]
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:
        # before torch 2.10
        return found
    return [*found, (varlen, "varlen_attn", varlen_attn)]


@contextmanager
def device_guard() -> Iterator[None]:
    """Indexing a tensor asks PyTorch's core for the guard of its device, which switches devices.

    A PyTorch without CUDA has none for GPUs, and one with CUDA would call the driver. That of meta
    tensors does nothing, so it takes the place in the registry, an array of pointers by device
    type.
    """
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    core = ctypes.CDLL(os.path.join(folder, "libc10.so"))
    registry = "_ZN3c104impl26device_guard_impl_registryE"
    cuda, meta = 1, 14
    guards = (ctypes.c_void_p * (meta + 1)).in_dll(core, registry)
    before = guards[cuda]
    guards[cuda] = guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before
