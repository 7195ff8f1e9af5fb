"""The dump of a small model, whole: a change to any pass or to the printing shows here as a difference to read.

``pytest tests/test_golden.py --write-golden`` writes what is printed now.
"""

from pathlib import Path

import pytest
from targets import mlp

from shardc import Mesh, compile

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("format_", ["text", "json", "dot"])
def test_the_dump_of_two_layers_cut_as_megatron_is_the_one_that_was_read(
    format_: str, request: pytest.FixtureRequest
) -> None:
    model, args, kwargs, annotations = mlp()
    dumped = compile(model, Mesh(dp=2, tp=2), annotations, args=args, kwargs=kwargs).dump(format=format_)
    path = GOLDEN / f"mlp.{format_.replace('text', 'txt')}"
    if request.config.getoption("--write-golden"):
        path.write_text(dumped)
    assert dumped == path.read_text()
