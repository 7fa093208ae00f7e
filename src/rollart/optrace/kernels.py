"""What one call of a torch operator asks of a device: its kind, shape, FLOPs, bytes moved and bytes communicated.

Owns the reading of operator calls. Invariant: a call that runs a kernel has FLOPs or bytes, and one that runs none (views,
allocations, waiting) is told apart by its schema or its name, never by a cost of zero. Why: everything after capture knows
operators by these few numbers only. Imports torch: import this module inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from rollart.optrace.ops import Kind, Stream
from rollart.perf.operators import FLASH_BACKWARD_FLOPS

DTYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int64",
    torch.int32: "int32", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool", torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}  # fmt: skip
FREE = frozenset({
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided", "aten._unsafe_view",
    "aten.lift_fresh", "aten.lift", "aten._local_scalar_dense", "aten.set_", "aten.resize_", "aten.is_same_size",
    "aten.record_stream", "aten.sym_size", "aten.sym_stride", "aten.sym_numel", "aten.sym_storage_offset", "aten.stride",
    "aten.is_contiguous", "aten.scalar_tensor", "aten._reshape_alias", "prim.device", "prim.layout", "aten.equal",
    "aten.is_pinned", "aten.is_nonzero", "_c10d_functional.wait_tensor", "c10d.barrier", "c10d.monitored_barrier_",
    "inductor.resize_storage_bytes_",
})  # fmt: skip
"""No kernel of their own: they allocate, rename, wait for others or ask the host."""
FUNCTIONAL = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
              "all_to_all_single": "alltoall", "broadcast": "broadcast", "shard_dim_alltoall": "alltoall"}  # fmt: skip
IN_PLACE = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
            "alltoall_base_": "alltoall", "broadcast_": "broadcast", "allgather_": "all_gather", "alltoall_": "alltoall",
            "reduce_scatter_": "reduce_scatter", "send": "send_recv", "recv_": "send_recv"}  # fmt: skip
CAUSAL_SHARE = 0.5
"""Of the pairs of a query and a key that a causal mask leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call asks for; the fields are those of `ops.Op`."""

    kind: Kind
    stream: Stream = "compute"
    shape: tuple[int, ...] = ()
    dtype: str = "bf16"
    flops: float = 0.0
    moved_bytes: float = 0.0
    written_bytes: float = 0.0
    collective: str = ""
    payload_bytes: float = 0.0
    group: str = ""
    """Name of the process group of a collective."""
    ranks: int = 0


def base_name(func: OpOverload) -> str:
    """`aten.mm` for `aten.mm.default`."""
    return str(func.overloadpacket)


@cache
def is_view(func: OpOverload) -> bool:
    """Whether all results only rename storage that an argument has."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def written(func: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes."""
    arguments = func._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors(item)]


def touched_bytes(tensor: torch.Tensor) -> float:
    """Bytes of distinct elements: a dimension that is only repeated counts once."""
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return float(elements)


def _bytes(values: Sequence[torch.Tensor]) -> float:
    return sum(touched_bytes(tensor) for tensor in values)


def work(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work | None:
    """What the call asks of the device; None if it runs no kernel."""
    name = base_name(func)
    if name in FREE or is_view(func):
        return None
    if func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d"):
        return _collective(name.split(".", 1)[1], args, out)
    short = name.split(".", 1)[1]
    if "attention" in short and short.endswith(("attention", "_for_cpu", "_forward", "_overrideable", "_backward")):
        found = _attention(func, short, args, kwargs, out)
        if found is not None:
            return found
    if short in _GEMMS:
        return _GEMMS[short](args, out)
    return _pass(func, short, args, kwargs, out)


def _collective(short: str, args: Sequence[Any], out: Any) -> Work | None:
    functional = short.removesuffix("_coalesced").removesuffix("_out")
    collective = IN_PLACE.get(short) or FUNCTIONAL.get(functional) or FUNCTIONAL.get(functional.removesuffix("_"))
    if collective is None:
        return None
    given, made = tensors(args), tensors(out)
    whole = max([_full(tensor) for tensor in (*given, *made)], default=0.0)
    if collective in ("all_gather", "alltoall") and short.endswith("_coalesced"):
        whole = sum(_full(tensor) for tensor in made)
    elif short.endswith(("_coalesced", "allreduce_")):
        whole = sum(_full(tensor) for tensor in tensors(args[0]))
    group, ranks = _group(args)
    if ranks <= 1 or whole <= 0:
        return None
    largest = max((*given, *made), key=_full)
    return Work(
        kind="send" if short == "send" else "recv" if short == "recv_" else "collective", stream="comm",
        shape=tuple(largest.shape), dtype=DTYPES.get(largest.dtype, str(largest.dtype)), collective=collective,
        payload_bytes=whole, group=group, ranks=ranks,
    )  # fmt: skip


def _full(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _group(args: Sequence[Any]) -> tuple[str, int]:
    """Name and size of the process group among the arguments."""
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for value in reversed(args):
        if isinstance(value, str):  # the group stands behind the name of the reduction
            found = _resolve_process_group(value)  # type: ignore[arg-type]  # a name is a plain string here
        elif isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            found = ProcessGroup.unbox(value)
        elif isinstance(value, ProcessGroup):
            found = value
        else:
            continue
        return str(found.group_name), int(found.size())
    return "", 0


def _attention(func: OpOverload, short: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work | None:
    backward = short.endswith("_backward")
    given = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
    operands = given[1:4] if backward else given[:3]
    if len(operands) < 3 or any(tensor.dim() != 4 for tensor in operands):
        return None
    heads_first = "scaled_dot_product" in short
    query, key, value = operands
    batch, heads = query.shape[0], query.shape[1 if heads_first else 2]
    queries, keys = (tensor.shape[2 if heads_first else 1] for tensor in (query, key))
    dims = query.shape[3] + value.shape[3]
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    causal = bool(named.get("is_causal") or named.get("custom_mask_type"))
    window = named.get("window_size_left")
    if window is not None and 0 <= int(window) < keys:
        keys = min(keys, 2 * (int(window) + 1))  # half of it is masked, as of all keys without a window
    flops = 2.0 * queries * keys * batch * heads * dims * (CAUSAL_SHARE if causal else 1.0)
    return Work(
        kind="attention_backward" if backward else "attention", shape=(queries, keys, batch * heads, dims),
        dtype=DTYPES.get(query.dtype, str(query.dtype)), flops=flops * (FLASH_BACKWARD_FLOPS if backward else 1.0),
        moved_bytes=_bytes(given) + _bytes(tensors(out)), written_bytes=_bytes(tensors(out)),
    )  # fmt: skip


def _gemm(
    rows: int, columns: int, inner: int, batch: int, operands: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> Work:
    return Work(
        kind="gemm", shape=(rows, columns, inner, batch), dtype=DTYPES.get(operands[0].dtype, str(operands[0].dtype)),
        flops=2.0 * rows * columns * inner * batch, moved_bytes=_bytes(operands) + _bytes(made),
        written_bytes=_bytes(made),
    )  # fmt: skip


def _mm(args: Sequence[Any], out: Any) -> Work:
    given = tensors(args)
    left, right = given[:2]
    return _gemm(left.shape[0], right.shape[1], left.shape[1], 1, given[:2], tensors(out))


def _addmm(args: Sequence[Any], out: Any) -> Work:
    bias, left, right = args[:3]
    return _gemm(left.shape[0], right.shape[1], left.shape[1], 1, [left, right, bias], tensors(out))


def _bmm(args: Sequence[Any], out: Any) -> Work:
    left, right = args[:2]
    return _gemm(left.shape[1], right.shape[2], left.shape[2], left.shape[0], [left, right], tensors(out))


def _baddbmm(args: Sequence[Any], out: Any) -> Work:
    bias, left, right = args[:3]
    return _gemm(left.shape[1], right.shape[2], left.shape[2], left.shape[0], [left, right, bias], tensors(out))


def _mv(args: Sequence[Any], out: Any) -> Work:
    left, right = args[:2]
    return _gemm(left.shape[0], 1, left.shape[1], 1, [left, right], tensors(out))


def _grouped(args: Sequence[Any], out: Any) -> Work:
    """Products of rows that are spread evenly over groups: experts forward, or the gradients of their weights."""
    left, right = args[:2]
    made = tensors(out)
    if right.dim() == 3:
        groups = right.shape[0]
        return _gemm(max(1, left.shape[0] // groups), right.shape[2], right.shape[1], groups, [left, right], made)
    groups = made[0].shape[0]
    return _gemm(left.shape[0], right.shape[1], max(1, left.shape[1] // groups), groups, [left, right], made)


def _convolution(args: Sequence[Any], out: Any) -> Work:
    image, kernel = args[:2]
    made = tensors(out)
    inner = kernel.numel() // kernel.shape[0]
    return _gemm(made[0].numel() // kernel.shape[0], kernel.shape[0], inner, 1, [image, kernel], made)


def _convolution_backward(args: Sequence[Any], out: Any) -> Work:
    grad, image, kernel = args[:3]
    made = tensors(out)
    wanted = sum(1 for tensor in made if tensor.dim() > 1)
    inner = kernel.numel() // kernel.shape[0]
    return _gemm(grad.numel() // kernel.shape[0], kernel.shape[0], inner, max(1, wanted), [grad, image, kernel], made)


_GEMMS = {
    "mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm, "mv": _mv, "_scaled_mm": _mm, "_grouped_mm": _grouped,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
}  # fmt: skip
_WRITES_ONLY = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"})
"""What they write is not read before."""
_MADE_ALIKE = frozenset(
    {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}
)
"""Their operand only gives the shape."""
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
_SCATTERS = frozenset(
    {"index_put_", "index_add_", "scatter_", "scatter_add_", "scatter_reduce_", "index_copy_", "_index_put_impl_"}
)


def _pass(func: OpOverload, short: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work | None:
    given, made = [*tensors(args), *tensors(kwargs)], tensors(out)
    if not given and not made:
        return None
    largest = max((*given, *made), key=_full)
    read_bytes, written_bytes = _row_bytes(short, args, made) or _plain_bytes(func, short, args, kwargs, made)
    if read_bytes + written_bytes <= 0:
        return None
    return Work(
        kind="pass", shape=tuple(largest.shape), dtype=DTYPES.get(largest.dtype, str(largest.dtype)),
        moved_bytes=read_bytes + written_bytes, written_bytes=written_bytes,
    )  # fmt: skip


def _row_bytes(short: str, args: Sequence[Any], made: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    """(read, written) of operators that touch only some rows of an operand, or whose schema does not say what they touch."""
    given = tensors(args)
    found: tuple[float, float] | None = None
    if short in _GATHERS:
        found = _bytes(made) + _bytes(given[1:]), _bytes(made)
    elif short in _SCATTERS:
        values = touched_bytes(given[-1])
        found = _bytes(given[1:-1]) + 2 * values, values
    elif short in _MADE_ALIKE:
        found = 0.0, _bytes(made)
    elif short == "embedding_dense_backward":  # rows are added to what was set to zero
        rows = touched_bytes(given[0])
        found = _bytes(given), _bytes(made) + rows
    elif short == "all_gather_copy_in":
        found = _bytes(tensors(args[0])), _bytes(tensors(args[0]))
    elif short in ("nll_loss_forward", "nll_loss_backward"):
        found = 2 * _bytes([tensor for tensor in given if tensor.dim() <= 1]), _bytes(made)
    elif short.startswith("_fused_adam"):
        found = sum(_bytes(tensors(value)) for value in args[:4]), sum(_bytes(tensors(args[i])) for i in (0, 2, 3))
    return found


def _plain_bytes(
    func: OpOverload, short: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(read, written): every operand read once, every result written once; what is changed in place both."""
    given = [*tensors(args), *tensors(kwargs)]
    writes = [tensor for i in written(func) for tensor in tensors(_argument(func, i, args, kwargs))]
    changed = {id(tensor) for tensor in writes}
    read_bytes = _bytes([tensor for tensor in given if id(tensor) not in changed])
    if not (short in _WRITES_ONLY or func._overloadname.endswith("out") or func.namespace == "fsdp"):
        read_bytes += _bytes(writes)
    # an in-place operator returns what it wrote under another handle
    old = {tensor.untyped_storage()._cdata for tensor in given}
    fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in old]
    return read_bytes, _bytes(writes) + _bytes(fresh)


def _argument(func: OpOverload, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[index] if index < len(args) else kwargs.get(func._schema.arguments[index].name)
