"""A pretended CUDA device: its tensors claim to be on a GPU and are computed by this CPU.

Mistakes that only a GPU would notice raise an error here: an operation over tensors of both devices, an operation that
CUDA does not implement for a type, pinned memory that is overwritten while a copy of it may be under way, and within a
capture anything that a CUDA graph cannot record. The device counts how often the host waits for it. A replayed graph
computes in the memory in which it was recorded and overwrites the memory of the other graphs, since graphs share it on
a GPU. Under autocast, products are computed in autocast's type.
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
PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "prelu")  # which autocast casts
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # the host reads their results


class PretendError(AssertionError):
    """An operation that a GPU would refuse."""


class OnDevice(torch.Tensor):
    """A tensor that claims to be on the device. `held` is the CPU tensor with its values."""

    device, is_cuda, is_meta = DEVICE, True, False

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        # torch without CUDA cannot name such a device, so the wrapped tensor is on "meta".
        place = held if held.layout == torch.strided else torch.empty(held.size(), device="meta")  # sparse: no strides
        with torch.inference_mode(False):  # so that later operations may make views of it
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
    """While this mode is active, tensors can be put on "cuda".

    `num_waits`: number of times that the host waited for the device. `num_launches`: operations that it launched, with
    a replayed graph as one. `num_replays`: replayed graphs. `under_way`: copies that may be unfinished, each as the
    pinned memory and its contents when the copy began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = self.num_launches = self.num_replays = 0
        self.graphs: list[_Graph] = []
        self.recording: _Graph | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # by storage; never freed, so that no address is used twice
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self, what: str) -> None:
        """Wait until the device has finished all queued work."""
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
        place = DEVICE if place == META else place  # part of an operation on the device
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
        """`target.copy_(source)` and `source.to(device)`, within a device or between two."""
        writes = function._opname == "copy_"
        source = args[1] if writes else args[0]
        device = args[0].device if writes else torch.device(kwargs.get("device") or source.device)
        device = source.device if device == META else device  # torch names "meta" as the device of such tensors
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
    """`torch.autocast("cuda", ...)` for tensors on the pretended device, which torch's own does not recognise."""

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
    """`torch.cuda.CUDAGraph`: recorded operations in order, with their arguments and results."""

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
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # not a view, nor in place
                    old.copy_(new)

    def spoil(self) -> None:
        """Overwrite all memory that the graph's operations allocated with NaN."""
        inputs, made = set(), set()
        for _, args, kwargs, result in self.calls:
            inputs |= {_storage(tensor) for tensor in _tensors((args, kwargs))} - made
            made |= {_storage(tensor) for tensor in _tensors(result)} - inputs
            for tensor in _tensors(result):
                if _storage(tensor) in made and tensor.is_floating_point():
                    tensor.fill_(float("nan"))


@contextmanager
def pretend_cuda() -> Iterator[PretendCuda]:
    """A pretended device, with events, streams and graphs, for the duration of the block."""
    cuda = PretendCuda()

    class Event:
        copies: tuple = ()  # copies under way when the event was recorded

        def record(self) -> None:
            self.copies = tuple(map(id, cuda.under_way))

        def synchronize(self) -> None:
            if any(id(copy) in self.copies for copy in cuda.under_way):
                cuda.wait("an event")

    _device._device_constructors()  # torch caches its own functions here, before they are replaced
    make = torch.tensor

    def literal(data, *, device=None, **kwargs) -> torch.Tensor:
        tensor = make(data, **kwargs)  # with a device, torch 2.11 for CUDA would look for a driver
        return tensor if device is None else tensor.to(device)

    original_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments, **named) -> torch.Tensor:
        parsed = {name: value for name, value in named.items() if name != "copy"}
        device, dtype, is_queued, _ = torch._C._nn._parse_to(*arguments, **parsed)
        if device is None or device.type != "cuda" or isinstance(tensor, OnDevice):
            return original_to(tensor, *arguments, **named)
        with torch.no_grad(), cuda:  # no gradient goes from one device to another here
            target = {"device": DEVICE, "dtype": dtype or tensor.dtype, "non_blocking": is_queued}
            return cuda._copy(torch.ops.aten._to_copy.default, (tensor.detach(),), target)

    load = PreTrainedModel.from_pretrained.__func__

    @wraps(load)
    def loaded(cls, *arguments, **named) -> PreTrainedModel:
        device = named.pop("device_map", {"": CPU})[""]
        with _disable_current_modes():  # loading starts with models on "meta", and ends on the CPU
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
        captured.spoil()  # a capture records operations and computes nothing

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
        # Triton kernels cannot run on pretended tensors, nor can other tensors replace those of a module.
        mock.patch.multiple(checks, _add_cuda_layers=mock.DEFAULT, _first_layers_in_float32=lambda model: None),
        _Autocast(),
        cuda,
    ):
        yield cuda


@torch.inference_mode()
def move(model: nn.Module) -> nn.Module:
    """Move every parameter and buffer of a model to the pretended device.

    In inference mode, like the tensors computed from them: torch 2.11 cannot make a view of one kind as the other.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(OnDevice(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model


@cache  # torch looks the key up by name in every call
def _is_composite(function) -> bool:
    """Whether an operation is composed of others, which are launched in its place."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    has_parts = composite in function.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), composite
    )
    return has_parts and function._opname != "native_batch_norm"


@cache
def _returns(function) -> tuple[bool, tuple[int, str] | None]:
    """Whether an operation returns anything; index and name of the argument that it writes and returns, if any."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return bool(function._schema.returns), (place, argument.name)
    return bool(function._schema.returns), None


def _mapped(tree, kind: type, change: Callable):
    """A faster `tree_map_only` for the containers in arguments and results of operations."""
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
