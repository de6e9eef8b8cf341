"""Settings of every test: no deadline per example, because the machine may be busy; failures can be replayed."""

import pytest
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crashes", type=int, default=200, help="crash points of the disk tier; 10,000 take minutes")
    parser.addoption("--kills", type=int, default=3, help="how often a daemon with a disk is killed under load")


settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    print_blob=True,
    # Contract suites are inherited by each implementation's class: their methods run on several classes.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")
