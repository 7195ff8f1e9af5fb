"""``dot`` equals einsum, is as exact as a matrix product, and is one product a call."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.ops.contraction import dot

SPECS = [
    "b t k, k n -> b t n",
    "b t n, k n -> b t k",
    "b t k, b t n -> k n",
    "b t k, b t n -> n k",
    "b h t d, b h s d -> b h t s",
    "b t h d, b s h d -> b h t s",
    "b h t s, b s h d -> b t h d",
    "b t h d, h d n -> b t n",
    "a, c -> c a",
    "a c, c -> a",
    "k, k -> ",
    "a b, a b -> a b",
]
SIZES = dict(zip("abchdkstn", (3, 2, 5, 2, 4, 6, 7, 3, 8), strict=True))


def tensors(spec: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [[SIZES[name] for name in side.split()] for side in spec.partition("->")[0].split(",")]
    left, right = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    return left, right


@pytest.mark.parametrize("spec", SPECS)
def test_dot_is_einsum(spec: str) -> None:
    a, b = tensors(spec)
    expected = torch.einsum(spec.replace(" ", ""), a, b)
    torch.testing.assert_close(dot(a, b, spec), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_bits_of_mm(dtype: torch.dtype) -> None:
    x, w = tensors("b t k, k n -> b t n", dtype)
    assert torch.equal(dot(x, w, "b t k, k n -> b t n"), torch.mm(x.flatten(0, 1), w).unflatten(0, x.shape[:2]))
    assert torch.equal(dot(x, w.t(), "b t k, n k -> b t n"), torch.mm(x.flatten(0, 1), w).unflatten(0, x.shape[:2]))


class Ops(TorchDispatchMode):
    """The names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_linear_layer_and_its_gradients_copy_nothing() -> None:
    x, w = tensors("b t k, k n -> b t n")
    y = torch.randn(2, 3, 8, dtype=torch.float64)
    with Ops() as ops:
        results = [
            dot(x, w, "b t k, k n -> b t n"),
            dot(y, w, "b t n, k n -> b t k"),
            dot(x, y, "b t k, b t n -> k n"),
            dot(x, y, "b t k, b t n -> n k"),
        ]
    assert [name for name in ops.names if "mm" in name] == ["aten.mm.default"] * 4
    assert not [name for name in ops.names if "clone" in name or "copy" in name]
    assert all(result.is_contiguous() for result in results)


@pytest.mark.parametrize("spec", ["a b, b c -> a", "a a, a b -> b", "a b, c d -> a b c"])
def test_a_factor_alone_or_twice_is_refused(spec: str) -> None:
    with pytest.raises(AssertionError, match=r"a factor (that one operand has alone|twice)"):
        dot(torch.ones(2, 2), torch.ones(2, 2), spec)
