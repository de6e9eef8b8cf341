"""Tests that need a GPU, and say why where there is none."""

import functools

import pytest

from kvist.device.cuda import driver
from kvist.errors import DeviceError


@functools.cache
def why_not() -> str:
    """Return why there is no GPU to test with; empty if there is one."""
    try:
        return "" if driver.devices() else "no GPU is visible"
    except DeviceError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if reason := why_not():
                item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))


@pytest.fixture(scope="session")
def gpu() -> str:
    """The UUID of the first GPU."""
    return next(iter(driver.devices()))
