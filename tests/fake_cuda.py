"""A CUDA device without a GPU: tensors with real numbers on the CPU that claim to be on cuda:0.

Operands on two devices are refused in torch's words. Kernels, and waits of the host for the device, are counted.
Speed, memory, rounding and Triton are not simulated; attention kernels follow their documented contracts.

    with FakeCuda() as gpu:
        model = gpu.put(model)
        ...  # anything on device 'cuda'
    gpu.kernels, gpu.waits
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = torch.device('cuda', 0)
CPU = torch.device('cpu')
PATCHES_OF_TORCH_CUDA = {
    '_lazy_init': lambda: None,
    'is_available': lambda: True,
    'current_device': lambda: 0,
    'device_count': lambda: 1,
    'get_device_capability': lambda *_: (8, 0),
    'empty_cache': lambda: None,
    'is_bf16_supported': lambda *_, **__: True,
}
HALF = (torch.float16, torch.bfloat16)
SOURCES = ('/llmfoundry_gauntlet/', '/transformers/')  # lines of code are reported in these
TWO_DEVICES = 'Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!'

NO_KERNELS = {  # operators that touch no data, besides views
    'empty',
    'empty_like',
    'new_empty',
    'empty_strided',
    'new_empty_strided',
    'detach',
    'alias',
    '_unsafe_view',
    'lift_fresh',
    'resize_',
    'set_',
    'is_same_size',
    '_assert_async',
    '_local_scalar_dense',
}
KERNELS = {'nonzero': 4, 'masked_select': 5, 'sort': 4, 'topk': 2, 'cumsum': 2, '_unique2': 6}  # others have one
WAITS = {'_local_scalar_dense', 'nonzero', 'masked_select', 'equal', '_unique2', 'unique_consecutive', 'bincount'}
INDEXED = {'index', 'index_put', 'index_put_', '_unsafe_index', '_index_put_impl_'}
FLASH_BACKEND = 1  # torch.nn.attention.SDPBackend
LOWER_RIGHT = 2  # torch.nn.attention.bias.CausalVariant

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void set_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""


@functools.cache
def set_device_guard() -> None:
    """Keep C++ from asking the driver for the current device; below torch 2.8 by compiled code."""
    if hasattr(torch._C, '_ensureCUDADeviceGuardSet'):
        torch._C._ensureCUDADeviceGuardSet()
        return
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / 'guard.cpp', Path(folder) / 'guard.so'
        source.write_text(GUARD)
        flags = ['-std=c++17', '-shared', '-fPIC', f'-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}']
        paths = [f'-I{torch_folder}/include', f'-L{torch_folder}/lib', '-lc10', f'-Wl,-rpath,{torch_folder}/lib']
        subprocess.run(['g++', *flags, str(source), '-o', str(library), *paths], check=True)
        ctypes.CDLL(str(library)).set_guard()


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0 whose numbers are in `elem`, on the CPU."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> CudaTensor:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=DEVICE,
            requires_grad=elem.requires_grad,
        )
        tensor.elem = elem.detach()
        return tensor

    def __repr__(self) -> str:
        return f'CudaTensor({self.elem!r})'

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert FakeCuda.active is not None, 'a tensor of the fake device is used outside of FakeCuda'
        return FakeCuda.active.run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def plain(value: Any) -> Any:
    """Return a tensor's numbers on the CPU; other values unchanged."""
    return value.elem if isinstance(value, CudaTensor) else value


def put_on_gpu(value: Any) -> Any:
    """Return a CPU tensor as one of the device; other values unchanged."""
    return CudaTensor(value) if isinstance(value, torch.Tensor) else value


def is_on_two_devices(leaves: list[Any], indices: list[torch.Tensor]) -> bool:
    """Return whether an operator has tensors of the device and of the CPU; scalars and indices may be on either."""
    if not any(isinstance(leaf, CudaTensor) for leaf in leaves):
        return False
    on_cpu = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, CudaTensor)]
    return any(leaf.dim() > 0 and not any(leaf is index for index in indices) for leaf in on_cpu)


def line_of_code() -> str:
    """Return the innermost line in SOURCES that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for source in SOURCES:
            if source in name and not name.endswith('_cuda.py'):
                return f'{source[1:]}{name.split(source)[-1]}:{frame.f_lineno}'
        frame = frame.f_back
    return 'elsewhere'


class FakeCuda:
    """The device, with `kernels` by operator and `waits` by (operator, line of code) since `clear`."""

    active: FakeCuda | None = None
    device = DEVICE

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()

    def put(self, model: Any) -> Any:
        """Move a model to the device: parameters, buffers and plain tensors, which rotary embeddings keep."""
        moved: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    copy = torch.nn.Parameter(CudaTensor(parameter.data), parameter.requires_grad)
                    module._parameters[name] = moved.setdefault(id(parameter), copy)
            for attributes in (module._buffers, vars(module)):
                for name, value in attributes.items():
                    if isinstance(value, torch.Tensor):
                        attributes[name] = CudaTensor(value)
        return model

    def clear(self) -> None:
        """Forget what was counted."""
        self.kernels.clear()
        self.waits.clear()

    def own_waits(self) -> list[tuple[str, str]]:
        """Return the waits that this package causes, not those inside of transformers' models."""
        return [wait for wait in self.waits.elements() if not wait[1].startswith('transformers')]

    def __enter__(self) -> FakeCuda:
        set_device_guard()
        self._stack = ExitStack()
        for name, value in PATCHES_OF_TORCH_CUDA.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        has_no_autocast = 'torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available'
        self._stack.enter_context(mock.patch(has_no_autocast, lambda: False))
        self._stack.enter_context(mock.patch.object(FakeCuda, 'active', self))
        self._stack.enter_context(_Functions())
        self._stack.enter_context(_Operators())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def wait(self, name: str) -> None:
        """Count a wait."""
        self.waits[name, line_of_code()] += 1

    def count(self, func: Any, name: str) -> None:
        """Count the kernels of an operator."""
        if name not in NO_KERNELS and not getattr(func, 'is_view', False):
            self.kernels[name] += KERNELS.get(name, 1)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator: check devices, count kernels and waits, and compute on the CPU."""
        name = func._schema.name.split('::')[1]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        reads_gpu = any(isinstance(leaf, CudaTensor) for leaf in leaves)
        target = torch.device(kwargs.get('device') or (DEVICE if reads_gpu else CPU))

        if not reads_gpu and target.type != 'cuda':
            return func(*args, **kwargs)
        if name == '_to_copy':
            return self.copy_to(func, args[0], kwargs, target)
        if name == 'copy_':
            return self.copy_into(func, *args, **kwargs)

        indices = [index for index in args[1] if index is not None] if name in INDEXED else []
        # The size of what a boolean index selects is known to the device only.
        if name in WAITS or any(index.dtype == torch.bool for index in indices):
            self.wait(name)
        if not all(isinstance(index, CudaTensor) for index in indices):
            self.wait(f'{name} by an index on the CPU')
        if is_on_two_devices(leaves, indices):
            raise RuntimeError(TWO_DEVICES)

        cpu_args, cpu_kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], structure)
        if 'device' in cpu_kwargs:
            cpu_kwargs['device'] = CPU
        compute = COMPUTED_HERE.get(name, func)
        result = compute(*cpu_args, **cpu_kwargs)
        self.count(func, name)

        if name in ('_local_scalar_dense', 'equal'):
            return result
        writes_into_its_argument = len(func._schema.returns) == 1 and func._schema.is_mutable
        if writes_into_its_argument:
            return kwargs.get('out', args[0])
        return pytree.tree_map(put_on_gpu, result)

    def copy_to(self, func: Any, source: torch.Tensor, kwargs: dict[str, Any], target: torch.device) -> torch.Tensor:
        """Copy to a device or to another dtype. Only copies from pinned memory need not wait."""
        options = {name: value for name, value in kwargs.items() if name not in ('device', 'non_blocking')}
        copy: torch.Tensor = func(plain(source), **options, device=CPU)

        is_from_gpu, is_to_gpu = isinstance(source, CudaTensor), target.type == 'cuda'
        need_not_wait = kwargs.get('non_blocking') and hasattr(source, 'is_pinned_here')
        if is_from_gpu and is_to_gpu:
            self.count(func, '_to_copy')
        elif is_from_gpu:
            self.wait('copy to host')
        elif not need_not_wait:
            self.wait('copy to device')
        return CudaTensor(copy) if is_to_gpu else copy

    def copy_into(self, func: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy a tensor into another one, maybe across devices."""
        plain(to).copy_(plain(source))
        if isinstance(to, CudaTensor) and (isinstance(source, CudaTensor) or source.dim() == 0):
            self.count(func, 'copy_')
        else:
            self.wait('copy between devices')
        return to


def attend_sequences(
    query: torch.Tensor,  # [queries, heads, width]
    key: torch.Tensor,  # [keys, key heads, width]
    value: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    longest_key: int,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention of packed sequences, each aligned with the end of its keys.

    Return the output, and the log-sum-exp of each token's scores, float32 [heads, queries].
    """
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert bounds.shape == key_bounds.shape
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert bounds.diff().max() <= longest
    assert key_bounds.diff().max() <= longest_key
    assert len(query) == bounds[-1]
    assert len(key) == len(value) == key_bounds[-1]

    output = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    logsumexp = torch.empty(query.shape[1], query.shape[0])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    for index in range(len(bounds) - 1):
        query_span = slice(bounds[index], bounds[index + 1])
        key_span = slice(key_bounds[index], key_bounds[index + 1])
        queries = query[query_span].transpose(0, 1)
        keys = key[key_span].transpose(0, 1).repeat_interleave(groups, 0)
        values = value[key_span].transpose(0, 1).repeat_interleave(groups, 0)

        positions = torch.arange(keys.shape[1])
        distance = positions[-queries.shape[1] :, None] - positions
        mask = (distance >= 0) & (distance < window)
        attended = torch._C._nn.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        output[query_span] = attended.transpose(0, 1)
        scores = queries.float() @ keys.float().transpose(1, 2) * factor
        logsumexp[:, query_span] = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return output, logsumexp


def flash(q, k, v, bounds, key_bounds, longest, longest_key, dropout, causal, debug, *, scale=None, **windows):
    """aten::_flash_attention_forward with packed sequences."""
    assert q.dim() == 3
    assert q.dtype in HALF
    width = q.shape[-1]
    assert width == k.shape[-1] == v.shape[-1]
    assert width % 8 == 0
    assert width <= 256
    assert causal
    assert not dropout
    assert not debug

    left = windows.pop('window_size_left', None)
    assert not windows
    window = sys.maxsize if left is None or left < 0 else left + 1
    output, logsumexp = attend_sequences(q, k, v, bounds, key_bounds, longest, longest_key, scale, window)
    nothing = torch.empty(0)  # in place of what only dropout needs
    return output, logsumexp, nothing, nothing, nothing


def public_flash(
    q,
    k,
    v,
    bounds,
    key_bounds,
    longest,
    longest_key,
    causal=False,
    scale=None,
    window_size=(-1, -1),
    gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
    backend=FLASH_BACKEND,
):
    """torch_attn::_varlen_attn of torch 2.15, which `torch.nn.attention.varlen.varlen_attn` calls."""
    assert gqa or q.shape[1] == k.shape[1]
    assert backend == FLASH_BACKEND  # cuDNN aligns masks of packed sequences otherwise
    assert [seqused_k, block_table, num_splits] == [None, None, None]
    left, right = window_size
    assert right == 0
    assert causal == (left == -1)

    lengths = (bounds, key_bounds, longest, longest_key)
    output, logsumexp, *_ = flash(q, k, v, *lengths, 0.0, True, False, scale=scale, window_size_left=left)
    nothing = torch.empty(0)  # in place of what only dropout needs
    return output, logsumexp, nothing


def efficient(
    q,
    k,
    v,
    bias,
    bounds,
    key_bounds,
    longest,
    longest_key,
    dropout,
    mask_type,
    wants_logsumexp=False,
    *,
    scale=None,
    window_size=0,
):
    """aten::_efficient_attention_forward with packed sequences.

    The log-sum-exp is [sequences, heads, longest rounded up to 32], as `meta__efficient_attention_forward` has it.
    """
    assert len(q) == 1
    assert q.shape[2] == k.shape[2] == v.shape[2]  # heads are not shared
    assert bias is None
    assert mask_type == LOWER_RIGHT
    assert not dropout
    assert q.shape[-1] % (8 if q.dtype in HALF else 4) == 0

    window = window_size or sys.maxsize
    output, of_tokens = attend_sequences(q[0], k[0], v[0], bounds, key_bounds, longest, longest_key, scale, window)
    num_sequences, num_heads = len(bounds) - 1, q.shape[2]
    longest_padded = -(-longest // 32) * 32 if wants_logsumexp else 0
    logsumexp = torch.full((num_sequences, num_heads, longest_padded), torch.inf)
    if wants_logsumexp:
        for index, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            logsumexp[index, :, : stop - start] = of_tokens[:, start:stop]
    nothing = torch.empty(0)  # in place of what only a backward pass or dropout needs
    return output[None], logsumexp, nothing, nothing, longest, longest_key


def histogram(values, bins=100, min=0, max=0):
    """aten::histc, which counts integers on a GPU only: transformers 5 counts the tokens of each expert with it."""
    return torch.histc(values.float(), bins, min, max).to(values.dtype)


COMPUTED_HERE = {
    '_flash_attention_forward': flash,
    '_varlen_attn': public_flash,
    '_efficient_attention_forward': efficient,
    'histc': histogram,
}


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention, whose C++ chooses a kernel by what the device supports."""
    gpu = FakeCuda.active
    assert gpu is not None
    if torch.is_autocast_enabled('cuda'):
        dtype = torch.get_autocast_dtype('cuda')
        query, key, value = (part.to(dtype) for part in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)

    devices = {part.device for part in (query, key, value, attn_mask) if part is not None}
    if len(devices) > 1:
        raise RuntimeError(TWO_DEVICES)
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f'Expected query, key, and value to have the same dtype: {query.dtype}, {value.dtype}')

    name = 'flash attention' if attn_mask is None and query.dtype in HALF else 'attention'
    gpu.kernels[name] += 1
    if attn_mask is not None:  # a boolean mask is converted, and padded to a multiple of 16
        num_steps = 2 * (attn_mask.dtype == torch.bool) + 2 * (attn_mask.shape[-1] % 16 > 0)
        gpu.kernels['mask of attention'] += num_steps

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        query, key, value, mask = map(plain, (query, key, value, attn_mask))
        if enable_gqa:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        attended = torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    return CudaTensor(attended)


class _Operators(TorchDispatchMode):
    """Operators without a tensor on the device, such as those that create one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert FakeCuda.active is not None
        return FakeCuda.active.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions whose C++ treats a GPU specially, or refuses subclasses of tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_on_gpu = bool(args) and isinstance(args[0], CudaTensor)
        if func is torch._C._nn.scaled_dot_product_attention and is_on_gpu:
            return attend(*args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and is_on_gpu:
            args = (args[0], with_tensors(args[1]), *args[2:])
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get('device') or CPU).type == 'cuda':
            return args[0] if is_on_gpu else func(*args, **{**kwargs, 'device': CPU}).to(DEVICE)
        if func is torch.Tensor.pin_memory:
            args[0].is_pinned_here = True
            return args[0]
        if func is torch.Tensor.tolist and is_on_gpu:
            return args[0].cpu().tolist()
        if func is torch.Tensor.numpy and is_on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return func(*args, **kwargs)


def with_tensors(index: Any) -> Any:
    """Replace lists in an index by tensors on the CPU, as C++ does."""
    if isinstance(index, tuple):
        return tuple(map(with_tensors, index))
    return torch.tensor(index, dtype=torch.long) if isinstance(index, list | range) else index
