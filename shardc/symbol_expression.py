"""A program whose sizes are sympy expressions in the symbols, and which of its dims are cut evenly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardc.mesh import Mesh
from shardc.program import Program
from shardc.sharding import Sharding, TensorType, num_shards
from shardc.symbol_form import Form, Point
from shardc.symbol_numbers import with_numbers

if TYPE_CHECKING:
    import sympy


def named(names: Iterable[str]) -> dict[str, sympy.Symbol]:
    """A positive whole number by each name."""
    import sympy

    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


def value(expression: Any, point: Point) -> Any:
    """An expression's value where its symbols are numbers: exact, an int where it is whole."""
    import sympy

    found = sympy.sympify(expression).subs({each: point[each.name] for each in _symbols(expression)})
    return int(found) if found.is_integer else found


def _symbols(expression: Any) -> list[Any]:
    return sorted(getattr(expression, "free_symbols", ()), key=str)


@dataclass(frozen=True, slots=True)
class Cut:
    """A size of a dim, cut in ``shards`` pieces: expressions. ``is_even``: the pieces are equal in this plan."""

    size: Any
    shards: Any
    is_even: bool

    def holds(self, point: Point) -> bool:
        """Whether the pieces are there as even or uneven as here."""
        return (value(self.size, point) % value(self.shards, point) == 0) == self.is_even

    def text(self) -> str:
        """As one says it."""
        import sympy

        whole, parts = sympy.fraction(sympy.together(sympy.sympify(self.size) / self.shards))
        return f"{whole} is {'' if self.is_even else 'no '}multiple of {parts}".replace("is m", "is a m")


@dataclass(frozen=True)
class Symbolic:
    """A lowered program in which every number is a form of the symbols.

    ``program``: with expressions for sizes, local in its types; ``at`` another of numbers. ``cuts``: of all values.
    """

    reference: Program
    forms: Sequence[Form]
    point: Point
    axes: Sequence[str]

    def at(self, point: Point) -> Program:
        """The lowered program at other sizes."""
        return with_numbers(self.reference, mesh_at(self.axes, point), [form.at(point) for form in self.forms])

    def expressed(self) -> tuple[Program, tuple[Cut, ...]]:
        """The program with expressions for its numbers and local types, and how its dims are cut."""
        symbols = named(self.point)
        made = with_numbers(
            self.reference, _symbolic_mesh(self.axes, symbols), [form.expression(symbols) for form in self.forms]
        )
        cuts = tuple(dict.fromkeys(self._cuts(made)))
        return _localized(made, [cut for cut in cuts if cut.is_even]), cuts

    def _cuts(self, program: Program) -> Iterator[Cut]:
        for node in program.graph.nodes:
            if node.op == "output":
                continue
            for type_, sharding in zip(program.types(node), program.shardings(node), strict=False):
                for dim, size in zip(sharding.dims if sharding else (), type_.shape if type_ else (), strict=True):
                    for sub, axes in dim.subdims(size):
                        shards = num_shards(axes)
                        yield Cut(sub, shards, value(sub, self.point) % value(shards, self.point) == 0)


def mesh_at(axes: Sequence[str], point: Point) -> Mesh:
    """The mesh of these axes at a point."""
    return Mesh(device_ids=None, **{name: point[name] for name in axes})


def _symbolic_mesh(axes: Sequence[str], symbols: Mapping[str, Any]) -> Mesh:
    """Whose sizes are symbols, which the constructor of a mesh of ranks does not take."""
    mesh = Mesh.__new__(Mesh)
    mesh.axis_names, mesh.shape, mesh.device_ids = tuple(axes), tuple(symbols[name] for name in axes), None
    return mesh


def _localized(program: Program, even: Sequence[Cut]) -> Program:
    """Local types, in which even cuts need not be rounded up."""
    import sympy

    parts = [-sympy.sympify(cut.size) / cut.shards for cut in even]
    pieces = {sympy.floor(part): part for part in parts}
    local: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def local_type(type_: TensorType | None, sharding: Sharding | None) -> TensorType | None:
        if type_ is None or sharding is None:
            return type_
        key = type_.shape, sharding
        if key not in local:
            shape = sharding.local_shape(type_.shape)
            local[key] = tuple(
                sympy.sympify(size).xreplace(pieces) if not isinstance(size, int) else size for size in shape
            )
        return TensorType(local[key], type_.dtype)

    program = program.copy(level="localized")
    for node in program.graph.nodes:
        if node.op != "output" and program.shardings(node):
            types = tuple(map(local_type, program.types(node), program.shardings(node)))
            program.set_local_types(node, types)
    return program
