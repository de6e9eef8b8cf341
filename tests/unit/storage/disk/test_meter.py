"""Rates of a disk: busy time counts, once; what is long past weighs little."""

from __future__ import annotations

import pytest

from kvist.storage.disk.meter import RateMeter


def test_nothing_done_has_no_rate():
    """Before the first operation ends, the rate is 0."""
    meter = RateMeter()
    assert meter.rate == 0
    meter.begin(5.0)
    assert meter.rate == 0


def test_what_runs_at_once_counts_once_and_idle_time_not():
    """Two operations of a second each, side by side, move twice as much in that second; a pause changes nothing."""
    meter = RateMeter()
    for begin in (10.0, 1000.0):
        meter.begin(begin)
        meter.begin(begin)
        meter.end(begin + 1, 500)
        meter.end(begin + 1, 500)
        assert meter.rate == pytest.approx(1000)


def test_what_is_long_past_weighs_little():
    """After ten busy seconds at another speed the rate is that speed."""
    meter = RateMeter()
    for second in range(100):
        meter.begin(second / 10)
        meter.end(second / 10 + 0.1, 10)
    for second in range(100):
        meter.begin(100 + second / 10)
        meter.end(100 + second / 10 + 0.1, 100)
    assert meter.rate == pytest.approx(1000, rel=0.05)
