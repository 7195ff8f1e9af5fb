"""The exit code of a conformance suite, its time limit and its results on disk."""

import time

from conformance.suite import Result, exit_code, read_json, run_cases, write_json


def test_a_suite_fails_where_a_case_is_wrong_refused_or_late() -> None:
    right, apart = Result("a", "right"), Result("b", "apart", "not deterministic")
    assert exit_code([right, apart]) == 0
    assert exit_code([right, Result("c", "wrong")]) == exit_code([Result("d", "refused")]) == 1
    assert exit_code([right, Result("e", "late")]) == 1


def sleep(seconds: float) -> Result:
    time.sleep(seconds)
    return Result(str(seconds), "right")


def test_a_case_that_takes_too_long_is_late_and_the_next_one_runs() -> None:
    results = run_cases(sleep, [0.0, 60.0, 0.1], jobs=1, limit=2.0)
    assert [result.outcome for result in results] == ["right", "late", "right"]
    assert results[1].detail == "not done after 2 s"


def test_results_are_written_as_they_come_and_read_again(tmp_path) -> None:
    path = str(tmp_path / "results.json")
    assert read_json(path) == []
    written: list[int] = []

    def watch(results: list[Result]) -> None:
        write_json(path, results)
        written.append(len(read_json(path)))

    results = run_cases(sleep, [0.0, 0.01], jobs=1, watch=watch)
    assert written == [1, 2]
    assert read_json(path) == results
