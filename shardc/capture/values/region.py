"""The sizes at which a captured program holds: symbols for dims that may have other sizes, and guards on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sympy import Eq, Symbol
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shardc.capture.values.refusals import known_number
from shardc.capture.values.symbols import Sizes, evaluated
from shardc.language.sharding import TensorType
from shardc.language.size import number_of

Symbols = Mapping[tuple[str, int], str]  # by the name of an input and a dim, the name of the dim's symbol


class Region:
    """The sizes at which a program holds. ``symbols``: those of dims of its inputs; every other dim has one size.

    ``shapes`` collects guards while the program is captured. ``numbers``: the numbers that the model read from tensors
    that follow from sizes alone, each with its node and the root of the traced graph; at other sizes they must be the
    same. Sizes of 0 and 1 are in no region, since torch treats them in special ways.
    """

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.numbers: list[tuple[fx.Node, nn.Module, Any]] = []
        self._types: dict[str, TensorType] = {}
        self._torchs: dict[str, Symbol] = {}  # torch's symbols by the names of ours
        self._sizes: dict[str, int] = {}

    def type(self, name: str, type_: TensorType) -> TensorType:
        """The type of an input of the call, with a Size for each dim that has a symbol."""
        symbols = (self.symbols.get((name, dim)) for dim in range(len(type_.shape)))
        pairs = zip(symbols, type_.shape, strict=True)
        shape = tuple(size if symbol is None else self._size(symbol, size) for symbol, size in pairs)
        self._types[name] = TensorType(shape, type_.dtype)
        return self._types[name]

    def _size(self, name: str, size: int) -> int:
        from torch._dynamo.source import ConstantSource  # takes a second to import, and is needed here alone

        if name not in self._sizes:
            source = ConstantSource(name)
            self._torchs[name] = self.shapes.create_symbol(size, source, DimDynamic.DYNAMIC, None)
            self._sizes[name] = number_of(self.shapes.create_symintnode(self._torchs[name], hint=size, source=source))
        return self._sizes[name]

    @property
    def is_one_call(self) -> bool:
        """Whether guards allow no other sizes than those that it was made for."""
        return all(self.shapes.replacements.get(each, each).is_number for each in self._torchs.values())

    def values(self, types: Mapping[str, TensorType]) -> Sizes | None:
        """The values of torch's symbols for inputs of these types; None if the types are outside the region."""
        values: dict[Symbol, int] = {}
        for name, type_ in self._types.items():
            for dim, (size, before) in enumerate(zip(types[name].shape, type_.shape, strict=True)):
                symbol = self.symbols.get((name, dim))
                if size != (before if symbol is None else values.setdefault(self._torchs[symbol], size)):
                    return None
        equal = (Eq(symbol, other) for symbol, other in self.shapes.replacements.items())
        guards = (*(guard.expr for guard in self.shapes.guards), *equal)
        if min(values.values()) < 2 or not all(evaluated(each, values) for each in guards):
            return None
        sizes = {symbol.name: size for symbol, size in values.items()}
        is_read_alike = all(known_number(node, root, sizes) == number for node, root, number in self.numbers)
        return sizes if is_read_alike else None
