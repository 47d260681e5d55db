"""The interval around a speedup: it covers a known ratio, is the same every time, and cancels what both sides share."""

from __future__ import annotations

import numpy as np
import pytest

from env.timing import CENTERS, interval, lower_mean, middle_mean, relative_error

pytestmark = pytest.mark.budget(20)


def noisy(
    rng, median_us: float, blocks: int = 4, calls: int = 20, noise: float = 0.05, drift=None
) -> list[list[float]]:
    drift = [1.0] * blocks if drift is None else drift
    return [list(median_us * drift[i] * np.exp(noise * rng.standard_normal(calls))) for i in range(blocks)]


def test_known_ratio():
    rng = np.random.default_rng(0)
    found = interval(noisy(rng, 300.0), noisy(rng, 100.0), seed=0)
    assert found["speedup"] == pytest.approx(3.0, rel=0.03)
    assert found["reference_us"] == pytest.approx(300.0, rel=0.03)
    assert found["candidate_us"] == pytest.approx(100.0, rel=0.03)
    assert found["speedup"] == found["reference_us"] / found["candidate_us"]
    assert found["speedup_low"] < found["speedup"] < found["speedup_high"]
    assert found["speedup_high"] / found["speedup_low"] < 1.15


def test_times_are_those_of_the_middle_half_of_all_calls():
    reference, candidate = [[1.0, 2.0, 30.0], [4.0, 5.0]], [[1.0], [2.0, 3.0]]
    found = interval(reference, candidate, seed=0)
    assert found["reference_us"] == pytest.approx((2.0 + 4.0 + 5.0) / 3)
    assert found["candidate_us"] == 2.0 and found["speedup"] == pytest.approx(11.0 / 6)


def test_a_mean_where_others_report_one():
    found = interval([[1.0, 2.0, 30.0]], [[1.0, 1.0, 4.0]], seed=0, kind="mean")
    assert found["reference_us"] == 11.0 and found["candidate_us"] == 2.0


def test_middle_mean_is_what_a_plain_loop_makes():
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 4, 5, 11, 40):
        times = list(rng.random(count))
        kept = sorted(times)[count // 4 : count - count // 4]
        assert middle_mean(np.array(times)) == pytest.approx(sum(kept) / len(kept))


def test_lower_mean_is_what_a_plain_loop_makes():
    rng = np.random.default_rng(4)
    for count in (1, 2, 3, 5, 20, 41):
        times = list(rng.random(count))
        low = count // 20
        kept = sorted(times)[low : max(low + 1, round(0.35 * count))]
        assert lower_mean(np.array(times)) == pytest.approx(sum(kept) / len(kept))


def test_a_block_that_the_host_spoiled_does_not_move_the_lower_mean():
    rng = np.random.default_rng(5)
    quiet = noisy(rng, 100.0, noise=0.01)
    spoiled = [*quiet[:3], [3 * time for time in quiet[3]]]
    assert interval(quiet, spoiled, seed=0, kind="lower")["speedup"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", ["middle", "lower"])
def test_relative_error_is_the_spread_of_repeated_measurements(kind):
    """The quick estimate that ends a measurement says about what repeating it would show."""
    found, centers = [], []
    for run in range(200):
        blocks = noisy(np.random.default_rng(run), 100.0)
        found.append(relative_error(blocks, kind))
        centers.append(float(CENTERS[kind](np.concatenate(blocks))))
    assert np.mean(found) == pytest.approx(np.std(centers) / np.mean(centers), rel=0.5)


def test_interval_covers_the_true_ratio_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr("env.timing.BOOTSTRAP_DRAWS", 100)
    covered, runs = 0, 40
    for run in range(runs):
        rng = np.random.default_rng(run)
        found = interval(noisy(rng, 150.0), noisy(rng, 100.0), seed=run)
        covered += found["speedup_low"] <= 1.5 <= found["speedup_high"]
    # 95 % of 40 is 38; an interval that covered 80 % would reach 34 in one run of seven.
    assert covered >= 34, f"{covered} of {runs}"


def test_interval_of_an_unchanged_program_contains_one():
    rng = np.random.default_rng(7)
    found = interval(noisy(rng, 100.0), noisy(rng, 100.0), seed=0)
    assert found["speedup_low"] <= 1.0 <= found["speedup_high"]


def test_a_drift_that_both_sides_share_cancels():
    """Blocks are drawn in pairs: a clock that slows down by half leaves the interval narrow."""
    drift = [1.0, 1.2, 1.6, 2.0]
    rng = np.random.default_rng(1)
    shared = interval(noisy(rng, 200.0, noise=0.005, drift=drift), noisy(rng, 100.0, noise=0.005, drift=drift), seed=0)
    rng = np.random.default_rng(1)
    apart = interval(
        noisy(rng, 200.0, noise=0.005, drift=drift), noisy(rng, 100.0, noise=0.005, drift=drift[::-1]), seed=0
    )
    assert shared["speedup"] == pytest.approx(2.0, rel=0.02)

    def width(found):
        return found["speedup_high"] - found["speedup_low"]

    assert width(shared) < 0.5 * width(apart)


def test_more_noise_gives_a_wider_interval():
    widths = []
    for noise in (0.01, 0.3):
        rng = np.random.default_rng(3)
        found = interval(noisy(rng, 100.0, noise=noise), noisy(rng, 100.0, noise=noise), seed=0)
        widths.append(found["speedup_high"] - found["speedup_low"])
    assert widths[1] > 5 * widths[0]


def test_same_seed_same_interval():
    rng = np.random.default_rng(2)
    reference, candidate = noisy(rng, 100.0), noisy(rng, 90.0)
    assert interval(reference, candidate, seed=5) == interval(reference, candidate, seed=5)
    assert interval(reference, candidate, seed=5) != interval(reference, candidate, seed=6)


def test_one_call_a_block_has_no_width():
    assert interval([[10.0]], [[4.0]], seed=0) == {
        "reference_us": 10.0, "candidate_us": 4.0, "speedup": 2.5, "speedup_low": 2.5, "speedup_high": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(("reference", "candidate"), [([[1.0]], []), ([], []), ([[1.0], [1.0]], [[1.0]])])
def test_blocks_that_do_not_match_are_refused(reference, candidate):
    with pytest.raises(ValueError, match="same number of blocks"):
        interval(reference, candidate, seed=0)
