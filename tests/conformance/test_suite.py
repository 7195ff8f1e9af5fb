"""The exit code of a conformance suite."""

from conformance.suite import Result, exit_code


def test_a_suite_fails_where_a_case_is_wrong_or_refused() -> None:
    right, apart = Result("a", "right"), Result("b", "apart", "not deterministic")
    assert exit_code([right, apart]) == 0
    assert exit_code([right, Result("c", "wrong")]) == exit_code([Result("d", "refused")]) == 1
