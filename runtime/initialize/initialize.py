"""Initial values: each rank computes its shards of a model's parameters and buffers and puts them into the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.capture.initial_values import Initialized, set_tensors
from shardc.capture.model import state_names
from shardc.language.errors import ShardingError, error_text
from shardc.language.sharding import Sharding
from shardc.ops.pointwise import unwritten
from shardc.ops.random import uniform
from shardc.program.node import arguments, is_getitem, operand, takes_device
from shardc.program.program import Program

from ..comm.dtensor import pad, region
from ..comm.dtensor import region as piece_bounds
from ..module.conversion import Conversion, conversion_on


def initialize(
    initialized: Initialized, mesh: Any, shardings: Callable[[str, tuple[int, ...]], Sharding], seed: int
) -> nn.Module:
    """Give a model on meta its values: plain whole tensors on a Mesh, DTensors of this rank's shards on a DeviceMesh.

    ``initialized.program`` is canonical. ``shardings`` returns the sharding of a parameter or buffer, given its name
    and shape. Warns of cut values that every rank had to compute whole. Raises a ShardingError that names the values
    that no initializer writes.
    """
    conversion = conversion_on(mesh, "cpu")
    device = conversion.comm.device
    evaluator = Evaluator(initialized.program, torch.tensor([seed, 0], device=device), initialized.constants, device)
    tensors, unwritten, whole = dict[str, Tensor](), list[str](), dict[str, set[str]]()
    for output, node in zip(initialized.program.outputs, initialized.program.results, strict=True):
        assert node is not None, output
        shape = initialized.program.value_type(initialized.program.value(node)).shape
        sharding = shardings(output.name, shape).storable(shape)
        try:
            tensors[output.name] = _placed(evaluator, conversion, node, sharding, shape, output.name)
        except Unwritten:
            unwritten.append(output.name)
        if sharding.cut_axes and evaluator.whole:
            whole[output.name] = evaluator.whole
    _check(unwritten, whole)
    for name, parameter in state_names(initialized.model)[0].items():
        tensors[name] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
        tensors[name].__dict__.update(parameter.__dict__)
    set_tensors(initialized.model, tensors)
    return initialized.model


def values_of(program: Program, constants: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Whole initial values of the tensors ``names``; ``program`` is canonical. ShardingError for one without values."""
    cpu = torch.device("cpu")
    evaluator = Evaluator(program, torch.tensor([0, 0]), constants, cpu)
    tensors = dict[str, Tensor]()
    for output, node in zip(program.outputs, program.results, strict=True):
        if output.name in names:
            assert node is not None, output
            shape = program.value_type(program.value(node)).shape
            try:
                tensors[output.name] = evaluator.value(node, tuple(torch.arange(size) for size in shape))
            except Unwritten:
                _check([output.name], {})
    return tensors


def _placed(
    evaluator: Evaluator, conversion: Conversion, node: Any, sharding: Sharding, shape: tuple[int, ...], name: str
) -> Tensor:
    """The value as a tensor of the model; ranks in this process that hold the same piece compute it once."""
    shared, pieces = dict[Any, Tensor](), list[Tensor]()
    for position in conversion.comm.positions:
        where = region(sharding, shape, position)
        if where not in shared:
            piece = evaluator.value(node, piece_region(sharding, shape, position, evaluator.device))
            shared[where] = pad(piece, sharding, shape, position)
        pieces.append(shared[where])
    return conversion.converter(sharding, shape, name).to_tensor(pieces, is_plain=False)


def _check(unwritten: list[str], whole: Mapping[str, set[str]]) -> None:
    """Raise a ShardingError for values that no initializer writes; warn of those that every rank computed whole."""
    if unwritten:
        raise ShardingError(
            f"initial value of {', '.join(unwritten[:8])}" + (", ..." if len(unwritten) > 8 else ""),
            f"{len(unwritten)} on meta",
            "no initialiser writes it, so it has no value",
            "give the function that makes the model, init_parameters(lambda: Model(config), ...), or say initialize=",
        )
    if whole:
        who = f"initial value of {', '.join(whole)}"
        what = f"{', '.join(sorted(set().union(*whole.values())))} makes it"
        problem = "it is made whole on every rank before it is cut, in memory for all of it"
        remedy = "draw each element by itself, as normal_ and uniform_ do, or say initialize="
        warnings.warn(error_text(who, what, problem, remedy), stacklevel=4)


Region = tuple[Tensor, ...]  # for each dim the int64 indices of its elements


def piece_region(sharding: Sharding, shape: tuple[int, ...], position: int, device: torch.device) -> Region:
    """The region of a value that the rank at ``position`` holds."""
    bounds, region = iter(piece_bounds(sharding, shape, position)), list[Tensor]()
    for dim, size in zip(sharding.dims, shape, strict=True):
        subs = [sub for sub, _ in dim.subdims(size)]
        starts = [next(bounds) for _ in subs]
        region.append(join_index([torch.arange(a, a + n, device=device) for a, n in starts], subs))
    return tuple(region)


def take(value: Tensor, region: Region) -> Tensor:
    """A region of a value, contiguous."""
    for dim, index in enumerate(region):
        if not torch.equal(index, torch.arange(value.shape[dim], device=index.device)):
            value = value.index_select(dim, index)
    return value.contiguous()


def broadcast_region(region: Region, shape: Sequence[int]) -> Region:
    """The region of a broadcast operand of ``shape`` that a region of the result reads."""
    pairs = zip(region[len(region) - len(shape) :], shape, strict=True)
    return tuple(index.new_zeros(min(len(index), 1)) if size == 1 else index for index, size in pairs)


def join_index(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Flatten indices: for all combinations of indices in several dims, the index in the flattened dim, row-major."""
    if not indices:
        return torch.zeros(1, dtype=torch.int64)
    pairs = list(zip(indices, sizes, strict=True))
    return reduce(lambda joined, pair: (joined[:, None] * pair[1] + pair[0]).flatten(), pairs[1:], indices[0])


def split_index(index: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
    """The inverse of ``join_index``: indices in several dims whose combinations are ``index``; None if impossible."""
    if not sizes:
        return []
    if len(sizes) == 1:
        return [index]
    if not len(index):
        return None
    inner = math.prod(sizes[1:])
    first = torch.unique_consecutive(index // inner)
    rest = (index % inner)[: len(index) // len(first)]
    if not torch.equal(join_index([first, rest], [0, inner]), index):
        return None
    others = split_index(rest, sizes[1:])
    return None if others is None else [first, *others]


def _groups(shape: Sequence[int], source: Sequence[int]) -> list[tuple[tuple[int, int], Sequence[int]]]:
    """The shortest runs of dims of ``shape``, each with the sizes of the dims of ``source`` that it is a view of."""
    result: list[tuple[tuple[int, int], Sequence[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        start, first, left, right = i, j, 1, 1
        while (left != right or (i, j) == (start, first)) and (i < len(shape) or j < len(source)):
            if j == len(source) or (i < len(shape) and left <= right):
                left, i = left * shape[i], i + 1
            else:
                right, j = right * source[j], j + 1
        result.append(((start, i), source[first:j]))
    return result


aten = torch.ops.aten
CHUNK = {"cpu": 2**18}  # elements that are computed at a time, by device type; as many as fit into its caches
# Elementwise ops whose kernels compute the same bits for an element whatever the number of elements; tests check this.
# Other kernels, such as those of pow and sigmoid, compute the last few elements by different code.
STEADY = {
    getattr(packet, overload)
    for packet in (
        *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.sign, aten.sqrt, aten.reciprocal),
        *(aten.floor, aten.ceil, aten.round, aten.trunc, aten.minimum, aten.maximum, aten.where, aten.masked_fill),
        *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
        *(aten.logical_and, aten.logical_or, aten.logical_not, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not),
        *(aten.exp, aten.expm1, aten.log, aten.log1p, aten.sin, aten.cos, aten.tan, aten.tanh, aten.erf, aten.erfinv),
        *(aten.clone, aten.complex, aten.real, aten.imag),
    )
    for overload in packet.overloads()
    if [str(result.type) for result in getattr(packet, overload)._schema.returns] == ["Tensor"]
    and "out" not in overload
}


class Unwritten(Exception):
    """A value is needed that no initializer writes."""


class Evaluator:
    """Evaluates nodes of a canonical program whose inputs are a seed and constants.

    State: ``_memo``, the regions of one chunk by node; ``_whole``, the whole values of nodes for one result; ``whole``,
    the names of ops that ran whole for the latest result and returned at least as many elements as it has.
    """

    def __init__(self, program: Program, random: Tensor, constants: Mapping[str, Tensor], device: torch.device) -> None:
        self.program, self.device = program, device
        named = program.named_inputs.items()
        self._inputs = {node: random if kind == "random" else constants[name] for (kind, name), node in named}
        self._memo: dict[Any, tuple[Region, Tensor]] = {}
        self._whole: dict[fx.Node, Any] = {}
        self._numel = 0
        self.whole: set[str] = set()

    def value(self, node: fx.Node, region: Region) -> Tensor:
        """A region of a node's value."""
        type_ = self.program.value_type(self.program.value(node))
        self._numel, self.whole = type_.numel, set()
        result = torch.empty([len(index) for index in region], dtype=type_.dtype, device=self.device)
        if not result.numel():
            return result
        chunk = CHUNK.get(self.device.type, 2**24)
        rows = max(1, chunk * len(region[0]) // result.numel()) if region else 1
        for start in range(0, len(region[0]) if region else 1, rows):
            part = self.at(node, (region[0][start : start + rows], *region[1:]) if region else region)
            result[start : start + rows].copy_(part) if region else result.copy_(part)
            self._memo.clear()
        self._whole.clear()
        return result

    def at(self, node: fx.Node, region: Region) -> Tensor:
        """A region of a node's value, computed once for each chunk."""
        key = node, *map(id, region)
        if key not in self._memo:
            self._memo[key] = region, self._compute(node, region)
        return self._memo[key][1]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The whole shape of a node's value."""
        return self.program.value_type(self.program.value(node)).shape

    def _compute(self, node: fx.Node, region: Region) -> Tensor:
        def part(each: fx.Node) -> Tensor:
            return self.at(each, broadcast_region(region, self.shape(each)))

        result: Tensor | None = None
        if node.target in REGIONAL:
            result = REGIONAL[node.target](self, node, region)
        elif node.target in STEADY:
            args, kwargs = fx.map_arg((node.args, node.kwargs), part)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        return take(self._all(node), region) if result is None else result.contiguous()

    def _all(self, node: fx.Node) -> Any:
        """The whole value of a node, or the tuple of its values."""
        if node not in self._whole:
            value = self._whole[node] = self._run(node)
            if isinstance(value, Tensor) and node.all_input_nodes and value.numel() >= self._numel:
                target = operand(node).target if is_getitem(node) else node.target
                self.whole.add(str(getattr(target, "__name__", target)))
        return self._whole[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._inputs[node].to(self.device)
        if is_getitem(node):
            return self._all(operand(node))[node.args[1]]
        if node.target is unwritten:
            raise Unwritten

        def whole(each: fx.Node) -> Any:
            if each.op == "placeholder" or is_getitem(each):
                return self._all(each)
            return self.at(each, tuple(torch.arange(size, device=self.device) for size in self.shape(each)))

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), whole)
        device = {"device": self.device} if takes_device(node.target) else {}
        return node.target(*args, **kwargs, **device)  # type: ignore[operator]


# Ops that read a known region of their operands. They return None if the elements that they read are no region.


def _uniform(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    random, key, index = node.args
    assert isinstance(random, fx.Node) and isinstance(index, fx.Node)
    return uniform(evaluator._all(random), key, evaluator.at(index, region))  # type: ignore[arg-type]


def _to_copy(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    return evaluator.at(operand(node), region).to(node.kwargs.get("dtype"))  # type: ignore[arg-type]


def _full(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    value, dtype = arguments(node).get("fill_value", 0), evaluator.program.type(node).dtype
    return torch.full([len(index) for index in region], value, dtype=dtype, device=evaluator.device)


def _reshape(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor | None:
    """None if the elements are no region of the operand; a run of a matrix's elements is one if it has whole rows."""
    source, shape, needed = operand(node), evaluator.shape(node), list[Tensor]()
    for (start, stop), sizes in _groups(shape, evaluator.shape(source)):
        joined = join_index(region[start:stop], shape[start:stop]).to(evaluator.device)
        split = split_index(joined, sizes)
        if split is None:
            return None
        needed += split
    return evaluator.at(source, tuple(needed)).reshape([len(index) for index in region])


def _permute(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    dims = [dim % len(region) for dim in arguments(node)["dims"]]
    source = tuple(region[dims.index(dim)] for dim in range(len(dims)))
    return evaluator.at(operand(node), source).permute(dims)


def _expand(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    source = operand(node)
    part = evaluator.at(source, broadcast_region(region, evaluator.shape(source)))
    return part.expand([len(index) for index in region])


def _select(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    source = operand(node)
    dim, at = _place(node, evaluator.shape(source))
    index = torch.tensor([at], device=evaluator.device)
    return evaluator.at(source, (*region[:dim], index, *region[dim:])).squeeze(dim)


def _slice(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    source, (dim, start, _, step) = operand(node), _bounds(node, evaluator.shape(operand(node)))
    return evaluator.at(source, (*region[:dim], region[dim] * step + start, *region[dim + 1 :]))


def _select_scatter(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    dim, at = _place(node, evaluator.shape(node))
    return _scattered(evaluator, node, region, dim, at, at + 1, 1)


def _slice_scatter(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    return _scattered(evaluator, node, region, *_bounds(node, evaluator.shape(node)))


def _place(node: fx.Node, shape: tuple[int, ...]) -> tuple[int, int]:
    """``dim, index`` of a selected row, neither of them negative."""
    args = arguments(node)
    dim = args["dim"] % len(shape)
    return dim, args["index"] % shape[dim]


def _bounds(node: fx.Node, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """``dim, start, end, step`` of a slice, none of them negative, and within the dim's bounds."""
    args = arguments(node)
    dim = args["dim"] % len(shape)
    return (dim, *slice(args["start"], args["end"], args["step"]).indices(shape[dim]))


def _scattered(
    evaluator: Evaluator, node: fx.Node, region: Region, dim: int, start: int, end: int, step: int
) -> Tensor:
    """A value with a slice of a dim overwritten; the old and the new value are each evaluated only where needed."""
    index, source = region[dim], operand(node, 1)
    is_new = (index >= start) & (index < end) & ((index - start) % step == 0)
    new = (*region[:dim], (index[is_new] - start) // step, *region[dim + 1 :])
    old = (*region[:dim], index[~is_new], *region[dim + 1 :])
    if len(evaluator.shape(source)) < len(region):
        new = (*region[:dim], *region[dim + 1 :])
    dtype = evaluator.program.type(node).dtype
    result = torch.empty([len(each) for each in region], dtype=dtype, device=evaluator.device)
    if not is_new.all():
        result.index_copy_(dim, (~is_new).nonzero().flatten(), evaluator.at(operand(node), old))
    if is_new.any():
        part = evaluator.at(source, new)
        part = part.unsqueeze(dim) if part.ndim < result.ndim else part
        result.index_copy_(dim, is_new.nonzero().flatten(), part.to(dtype))
    return result


def _cat(evaluator: Evaluator, node: fx.Node, region: Region) -> Tensor:
    args = arguments(node)
    dim = args["dim"] % len(region)
    dtype, start = evaluator.program.type(node).dtype, 0
    result = torch.empty([len(index) for index in region], dtype=dtype, device=evaluator.device)
    for part in args["tensors"]:
        size = evaluator.shape(part)[dim] if len(evaluator.shape(part)) == len(region) else 0
        is_here = (region[dim] >= start) & (region[dim] < start + size)
        if is_here.any():
            here = (*region[:dim], region[dim][is_here] - start, *region[dim + 1 :])
            result.index_copy_(dim, is_here.nonzero().flatten(), evaluator.at(part, here).to(result.dtype))
        start += size
    return result


Regional = Callable[[Evaluator, fx.Node, Region], "Tensor | None"]
REGIONAL: dict[Any, Regional] = {
    uniform: _uniform,
    aten._to_copy.default: _to_copy,
    **dict.fromkeys((aten.full.default, aten.zeros.default), _full),
    **dict.fromkeys((aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.view.default), _reshape),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.cat.default: _cat,
}
