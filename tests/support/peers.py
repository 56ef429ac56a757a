"""Two ranks of one machine beside a real communication service, in this process, and what they deal with each other
through. Fixtures by assignment: ``ranks = pytest.fixture(two_ranks)``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from byteps_py.session.peers import PeerTransport, Stream
from byteps_py.session.service.remote import RemoteSession
from support.sessions import WAIT_S, Service, end, start


def lasting_service() -> Iterator[Service]:
    """One for many pairs of ranks; to be the fixture ``lasting``, of a module."""
    service = start("--stay")
    yield service
    end(service)
    assert service.process.returncode == 0


def two_ranks(lasting: Service) -> Iterator[list[RemoteSession]]:
    sessions = [lasting.rank(0), lasting.rank(1)]
    yield sessions
    for session in sessions:
        session.close()


def doomed_pair() -> Iterator[list[RemoteSession]]:
    """Two ranks whose job will not end well."""
    service = start()
    sessions = [service.rank(0), service.rank(1)]
    yield sessions
    for session in sessions:
        session.close()
    end(service)


def peers(session: RemoteSession) -> PeerTransport:
    found = session.peers
    assert found is not None
    return found


def met(ranks: list[RemoteSession]) -> tuple[str, list[Stream]]:
    """A name, and what both ranks know it as."""
    name = f"stream-{uuid.uuid4()}"
    for session in ranks:
        peers(session).directory.request_introduction(name, (1 - session.rank,))
    for session in ranks:
        peers(session).directory.introduction_wait(name, (1 - session.rank,))(WAIT_S)
        assert peers(session).directory.are_introduced(name)
    return name, [peers(session).stream(name, (1 - session.rank,)) for session in ranks]
