"""A communication service of a real process, and its two ranks, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sessions import Service, end, start

from byteps_py.session.service.remote import RemoteSession


@pytest.fixture(scope="module")
def lasting() -> Iterator[Service]:
    """One service for all tests that leave the job well."""
    service = start("--stay")
    yield service
    end(service)
    assert service.process.returncode == 0


@pytest.fixture
def ranks(lasting: Service) -> Iterator[list[RemoteSession]]:
    sessions = [lasting.rank(0), lasting.rank(1)]
    yield sessions
    for session in sessions:
        session.close()
