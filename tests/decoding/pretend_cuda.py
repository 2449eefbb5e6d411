"""A CUDA device that is not there: tensors that say they are on one and are computed by this CPU.

What only a GPU would complain of is an error here: an operation over tensors of both places, one that CUDA does not
implement for a type, pinned memory that is overwritten while a copy of it may be under way, and in a capture whatever a
CUDA graph cannot record. How often the host waits for the device is counted. A replayed graph computes what it recorded
in the memory that it was recorded with, and spoils that of the other graphs, as theirs is the same on a GPU. Under
autocast products are computed in its type, as torch's own autocast does on tensors of a real device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from operator import attrgetter
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from laserbatch.pipeline.decoding.model import checks

CPU, META, DEVICE = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "prelu")  # that autocast casts
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # their results' sizes or values


class PretendError(AssertionError):
    """An operation that a GPU would refuse."""


class OnDevice(torch.Tensor):
    """A tensor that claims to be on the device; `held` is the CPU tensor with its numbers."""

    device, is_cuda, is_meta = DEVICE, True, False

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        # torch without CUDA has no such device to name, so that for torch itself it is "meta".
        place = held if held.layout == torch.strided else torch.empty(held.size(), device="meta")  # sparse: no strides
        with torch.inference_mode(False):  # so that what is computed there can be of what was put there before
            own = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), place.stride(), place.storage_offset(), dtype=held.dtype, device="meta"
            )
        own.held = held
        return own

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> list:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> "OnDevice":
        copied = OnDevice(self.held.detach().clone())
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise PretendError(f"{function} after the pretended device is gone")


class PretendCuda(TorchDispatchMode):
    """While it lasts, tensors can be put on "cuda".

    `num_waits`: how often the host waited for the device. `num_launches`: what it gave the device to do, a replayed
    graph being one. `num_replays`, of them. `under_way`: copies that may not be done, each as pinned memory and what
    it held then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = self.num_launches = self.num_replays = 0
        self.graphs: list[_Graph] = []
        self.recording: _Graph | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # by storage; never freed, so that a place is used once
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self, what: str) -> None:
        """The host waits until the device has done all that it was given."""
        if self.recording is not None:
            raise PretendError(f"{what} waits for the device in a capture")
        self.num_waits += 1
        for source, copied in self.under_way:
            if not torch.equal(source, copied):
                raise PretendError("pinned memory was overwritten while a copy of it was under way")
        self.under_way.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._opname
        if _is_composite(function):
            with self:
                return function.decompose(*args, **kwargs)
        if name in ("is_pinned", "_pin_memory"):
            return self._pinned_already(args[0]) if name == "is_pinned" else self._pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self._pin(function(*args, **{**kwargs, "pin_memory": False}))
        if name in ("copy_", "_to_copy"):
            return self._copy(function, args, kwargs)
        tensors = _tensors((args, kwargs))
        is_on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if name == "_embedding_bag_per_sample_weights_backward" and is_on_device and args[0].dtype == torch.bfloat16:
            raise NotImplementedError(f"{name} of bfloat16, which CUDA does not implement")
        place = torch.device(kwargs["device"] if kwargs.get("device") is not None else DEVICE if is_on_device else CPU)
        place = DEVICE if place == META else place  # a part of an operation on the device
        if place.type != "cuda" and not is_on_device:
            return function(*args, **kwargs)
        elsewhere = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
        if elsewhere or place.type != "cuda":
            raise PretendError(f"{function} over both places: {elsewhere} on {place}")
        if name in READS:
            self.wait(str(function))
        return self._launch(function, args, kwargs)

    def _launch(self, function, args, kwargs):
        held_args, held_kwargs = _held(args), _held(kwargs)
        if held_kwargs.get("device") is not None:
            held_kwargs["device"] = CPU
        result = function(*held_args, **held_kwargs)
        if self.recording is None:
            self.num_launches += 1
        else:
            self.recording.calls.append((function, held_args, held_kwargs, result))
        returns_anything, written = _returns(function)
        if not returns_anything:
            return None
        if written is not None:
            place, argument_name = written
            return args[place] if place < len(args) else kwargs[argument_name]
        return _mapped(result, torch.Tensor, OnDevice)

    def _copy(self, function, args, kwargs):
        """`target.copy_(source)` and `source.to(device)`, within a place or between both."""
        writes = function._opname == "copy_"
        source = args[1] if writes else args[0]
        device = args[0].device if writes else torch.device(kwargs.get("device") or source.device)
        device = source.device if device == META else device  # as torch itself says of the device's tensors
        if device == source.device:
            return function(*args, **kwargs) if device.type == "cpu" else self._launch(function, args, kwargs)
        if device.type == "cpu":
            self.wait(f"{function} to the CPU")
            return function(*_held(args), **kwargs)
        if self.recording is not None:
            raise PretendError(f"{function} from the CPU in a capture")
        is_queued = bool(args[2] if writes and len(args) > 2 else kwargs.get("non_blocking"))
        if is_queued and self._pinned_already(source):
            self.under_way.append((source, source.clone()))
        elif source.dim() > 0:
            self.wait(f"{function} of memory that is not pinned")
        self.num_launches += 1
        if writes:
            args[0].held.copy_(source)
            return args[0]
        return OnDevice(function(*args, **{**kwargs, "device": CPU}))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _pinned_already(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self._pinned


class _Autocast(TorchFunctionMode):
    """`torch.autocast("cuda", ...)` of what is on the pretended device, which torch's own does not see there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in PRODUCTS and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            args, kwargs = tree_map(
                lambda value: (
                    value.to(dtype) if isinstance(value, OnDevice) and value.dtype == torch.float32 else value
                ),
                (args, kwargs or {}),
            )
        return function(*args, **(kwargs or {}))


class _Graph:
    """`torch.cuda.CUDAGraph`: operations in their order, each with the memory it reads and the memory it wrote."""

    def __init__(self, cuda: PretendCuda) -> None:
        self.calls: list[tuple] = []
        self._cuda = cuda
        cuda.graphs.append(self)

    def pool(self) -> PretendCuda:
        return self._cuda

    def replay(self) -> None:
        self._cuda.num_launches += 1
        self._cuda.num_replays += 1
        for graph in self._cuda.graphs:
            if graph is not self:
                graph.spoil()
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or in place
                    old.copy_(new)

    def spoil(self) -> None:
        """Nonsense in all memory that its operations took."""
        inputs, made = set(), set()
        for _, args, kwargs, result in self.calls:
            inputs |= {_storage(tensor) for tensor in _tensors((args, kwargs))} - made
            made |= {_storage(tensor) for tensor in _tensors(result)} - inputs
            for tensor in _tensors(result):
                if _storage(tensor) in made and tensor.is_floating_point():
                    tensor.fill_(float("nan"))


@contextmanager
def pretend_cuda() -> Iterator[PretendCuda]:
    """A device for as long as the block lasts, with events, streams and graphs."""
    cuda = PretendCuda()

    class Event:
        copies: tuple = ()  # that were under way when it was recorded

        def record(self) -> None:
            self.copies = tuple(map(id, cuda.under_way))

        def synchronize(self) -> None:
            if any(id(copy) in self.copies for copy in cuda.under_way):
                cuda.wait("an event")

    _device._device_constructors()  # torch keeps what it finds here first: its own, not the one below
    make = torch.tensor

    def literal(data, *, device=None, **kwargs) -> torch.Tensor:
        tensor = make(data, **kwargs)  # made on the device, torch 2.11 for CUDA looks for a driver
        return tensor if device is None else tensor.to(device)

    original_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments, **named) -> torch.Tensor:
        parsed = {name: value for name, value in named.items() if name != "copy"}
        device, dtype, is_queued, _ = torch._C._nn._parse_to(*arguments, **parsed)
        if device is None or device.type != "cuda" or isinstance(tensor, OnDevice):
            return original_to(tensor, *arguments, **named)
        with torch.no_grad(), cuda:  # a graph of gradients never goes from one place to another here
            target = {"device": DEVICE, "dtype": dtype or tensor.dtype, "non_blocking": is_queued}
            return cuda._copy(torch.ops.aten._to_copy.default, (tensor.detach(),), target)

    load = PreTrainedModel.from_pretrained.__func__

    @wraps(load)
    def loaded(cls, *arguments, **named) -> PreTrainedModel:
        device = named.pop("device_map", {"": CPU})[""]
        with _disable_current_modes():  # it begins with models that are nowhere ("meta"), and ends on the CPU
            model = load(cls, *arguments, **named)
        if device.type == "cuda":
            move(model[0] if isinstance(model, tuple) else model)
        return model

    @contextmanager
    def graph(captured: _Graph, **_) -> Iterator[None]:
        cuda.recording = captured
        try:
            yield
        finally:
            cuda.recording = None
        captured.spoil()  # nothing is computed while it is recorded

    with (
        mock.patch.multiple(
            torch.cuda,
            CUDAGraph=lambda: _Graph(cuda),
            Event=Event,
            graph=graph,
            stream=lambda stream: nullcontext(),
            current_stream=lambda device=None: None,
            device=lambda device: nullcontext(),
            is_current_stream_capturing=lambda: cuda.recording is not None,
            empty_cache=lambda: None,
            is_bf16_supported=lambda: True,
            _lazy_init=lambda: None,
        ),
        mock.patch.object(torch, "tensor", literal),
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(loaded)),
        # Triton's kernels cannot be run on tensors that pretend, nor can a module's tensors be replaced by others.
        mock.patch.multiple(checks, _add_cuda_layers=mock.DEFAULT, _first_layers_in_float32=lambda model: None),
        _Autocast(),
        cuda,
    ):
        yield cuda


@torch.inference_mode()
def move(model: nn.Module) -> nn.Module:
    """A model put on the pretended device: every parameter and buffer.

    Under inference mode as what is computed from them, since torch 2.11 cannot view one as the other.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(OnDevice(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model


@cache  # torch looks for it by name, in every call
def _is_composite(function) -> bool:
    """Whether an operation is made of others, which are launched in its place."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    has_parts = composite in function.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), composite
    )
    return has_parts and function._opname != "native_batch_norm"


@cache
def _returns(function) -> tuple[bool, tuple[int, str] | None]:
    """Whether an operation returns anything; place and name of the argument that it writes and returns, if any."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return bool(function._schema.returns), (place, argument.name)
    return bool(function._schema.returns), None


def _mapped(tree, kind: type, change: Callable):
    """`tree_map_only` for what arguments and results of operations are made of, which takes a fraction of its time."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(part, kind, change) for part in tree)
    if type(tree) is dict:
        return {name: _mapped(part, kind, change) for name, part in tree.items()}
    return tree


def _held(tree):
    return _mapped(tree, OnDevice, attrgetter("held"))


def _tensors(tree) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _mapped(tree, torch.Tensor, tensors.append)
    return tensors


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
