"""What the policy is told: compact, the same words for the same fact, nothing that is only the judge's business."""

from __future__ import annotations

import pytest

from env.feedback import MAX_MESSAGE, MAX_ROWS, render
from env.records import BLAMELESS_STATUSES, CANDIDATE_STATUSES, STATUSES, Verdict

pytestmark = pytest.mark.budget(5)


def row(name: str, time_us: float, own: bool = True, count: int = 1) -> dict:
    return {"name": name, "own": own, "count": count, "time_us": time_us}


def correct(**changes) -> Verdict:
    fields = {
        "speedup": 1.23456,
        "profiling_ratio": 0.75,
        "time_kind": "modelled",
        "profile": [row("relu_kernel", 7.5), row("aten::copy_", 2.5, own=False, count=3)],
    }
    return Verdict(status="correct", **{**fields, **changes})


def test_correct_names_speedup_ratio_and_kernels():
    assert render(correct()).split("\n") == [
        "status: correct",
        "speedup: 1.23x (modelled)",
        "profiling ratio: 0.75",
        "- triton relu_kernel x1: 75%",
        "- torch aten::copy_ x3: 25%",
    ]
    assert "speedup: 1.23x\n" in render(correct(time_kind="eager"))


def test_noise_in_the_last_digits_does_not_change_the_text():
    assert render(correct(speedup=1.2341)) == render(correct(speedup=1.2339))


def test_long_profiles_are_cut_and_counted():
    text = render(correct(profile=[row(f"kernel_{i}" + "x" * 100, 1.0) for i in range(MAX_ROWS + 3)]))
    assert text.count("- triton") == MAX_ROWS and text.endswith("- and 3 more")
    assert max(map(len, text.split("\n"))) < 100


@pytest.mark.parametrize("status", [s for s in CANDIDATE_STATUSES if s != "correct"])
def test_failure_shows_status_message_and_own_lines(status):
    verdict = Verdict(
        status=status, message="ValueError: no", evidence={"lines": ["line 1", "line 2", "line 3", "line 4"]}
    )
    assert render(verdict).split("\n") == [f"status: {status}", "ValueError: no", "line 2", "line 3", "line 4"]


def test_long_message_keeps_its_start_and_its_end():
    verdict = Verdict(status="runtime_error", message="START" + "x" * 10_000 + "END")
    text = render(verdict)
    assert len(text) < MAX_MESSAGE + 60 and "START" in text and text.endswith("END") and " ... " in text


@pytest.mark.parametrize("status", BLAMELESS_STATUSES)
def test_our_own_failures_are_not_explained(status):
    text = render(Verdict(status=status, message="Traceback: the judge's secret", evidence={"lines": ["secret"]}))
    assert text.split("\n")[0] == f"status: {status}" and "secret" not in text


@pytest.mark.parametrize("status", STATUSES)
def test_seeds_and_digests_stay_with_the_judge(status):
    verdict = correct(message="wrong") if status == "correct" else Verdict(status=status, message="wrong")
    verdict.seeds = {"inputs": 987654321}
    verdict.problem_sha256 = verdict.candidate_sha256 = "deadbeef"
    assert "987654321" not in render(verdict) and "deadbeef" not in render(verdict)


def test_profile_without_time_does_not_divide_by_zero():
    assert "0%" in render(correct(profile=[row("a", 0.0)]))


def test_unknown_status_is_refused():
    with pytest.raises(ValueError, match="unknown status 'fast'; known: correct"):
        Verdict(status="fast")


def test_verdict_round_trip():
    verdict = correct()
    assert Verdict.from_json(verdict.to_json()) == verdict
