"""A collective in which ranks send different amounts: the announced total equals what each rank is counted to send."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, P, compile
from shardc.runtime.comm.simulated import SimulatedComm
from shardc.runtime.simulator import simulate


class Shifted(nn.Module):
    """Each row takes the one before it; then the rows lie along other axes."""

    def __init__(self, spec: P) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.cat([x[:1], x[:-1]])
        return shardc.annotate(y * 2, self.spec).square()


@pytest.mark.parametrize(
    ("rows", "mesh", "before", "after", "permutes"),
    [
        (13, Mesh(a=2, b=2), P("a"), P("b"), True),
        (16, Mesh(a=2, b=4), P(("a", "b")), P(("b", "a")), True),
        (13, Mesh(a=2, b=4), P(("a", "b")), P(("b", "a")), False),
        (12, Mesh(a=3, b=2), P(("a", "b")), P(("b", "a")), True),
        (8, Mesh(a=2, b=4, c=2), P("b"), P(("a", "c")), True),
        (13, Mesh(a=5), P("a"), P(), True),
    ],
)
def test_all_ranks_send_what_is_announced_of_all(rows: int, mesh: Mesh, before: P, after: P, permutes: bool) -> None:
    x = torch.randn(rows, 4)
    compiled = compile(Shifted(after), mesh, {"x": before}, args=(x,), train=False)
    comm = SimulatedComm(mesh)
    compiled.run(lambda program, inputs: simulate(program, inputs, comm), compiled.program, (x,), {})
    announced, counted = Counter[str](), Counter[str]()
    for found in compiled.collectives:
        announced[found.kind] += found.wire_bytes_total
        assert found.wire_bytes <= found.wire_bytes_total <= found.wire_bytes * mesh.size
    for traffic in comm.traffic:
        counted.update(traffic.bytes)
    assert +announced == +counted and (announced["collective_permute"] > 0) is permutes
    for kind in announced:
        most = sum(found.wire_bytes for found in compiled.collectives if found.kind == kind)
        assert max(traffic.bytes[kind] for traffic in comm.traffic) <= most
