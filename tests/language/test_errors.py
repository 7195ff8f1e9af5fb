"""Errors of users stay what they are when another process or a copy takes them."""

from __future__ import annotations

import copy
import pickle

import pytest

from shardc.language.errors import (
    CaptureError,
    CheckpointError,
    CommunicationError,
    InternalError,
    OptionError,
    OrderError,
    RankError,
    ShardingError,
    UsageError,
    UserError,
    raise_all,
)

FOUR_PARTS = (ShardingError, OptionError, UsageError, OrderError, CheckpointError, RankError, InternalError)
ERRORS = [
    *(kind("input 'x'", "of shape (3,)", "3 is odd", "pad it") for kind in FOUR_PARTS),
    CaptureError("model.py:3", "a branch on a value", "use torch.where"),
    CommunicationError("all_reduce over dp", "rank 1 is gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_is_the_same_after_pickle_and_copy(error: UserError) -> None:
    error.add_note("raised by the model at model.py:3")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)


def test_errors_that_were_joined_keep_their_text() -> None:
    with pytest.raises(ShardingError) as joined:
        raise_all([ShardingError(name, "an int", "it is no tensor", "pass a tensor") for name in ("x", "y")])
    other = pickle.loads(pickle.dumps(joined.value))
    assert str(other) == str(joined.value) and "likewise y" in str(other) and other.parts == joined.value.parts
