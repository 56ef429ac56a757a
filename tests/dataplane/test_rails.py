"""Several network cards: addresses of loopback stand for them. Requests go over all of them, one that breaks does no
harm, and what can't be a network card is refused by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
import zmq
from hypothesis import given, strategies as st
from support.data_plane import WAIT_S, header_for

from byteps_py.config.addresses import joined
from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_burst import BurstTarget, LinkBurst
from byteps_py.dataplane.listener import DataListener, Peer, RemotePeer
from byteps_py.dataplane.stream_listener import StreamListener
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import ConfigurationError
from byteps_py.runtime import Runtime
from byteps_py.system import machine
from byteps_py.system.loop import EventLoop
from byteps_py.system.network_interfaces import NetworkCards, addresses_of, names
from byteps_py.system.shm import Block
from byteps_py.wire.data_link import READER_KINDS, Header, Kind
from byteps_py.worker.io.probe import Probe
from byteps_py.worker.io.railed_link import RailedLink
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget

PLACE = {"scheduler_host": "127.0.0.1", "scheduler_port": 9999, "job_id": "test", "num_workers": 2}
ONE = Settings(**PLACE)  # type: ignore[arg-type]
TWO = Settings(**PLACE, interfaces="127.0.0.1,127.0.0.2")  # type: ignore[arg-type]
THREE = Settings(**PLACE, interfaces="127.0.0.1, 127.0.0.3 ,127.0.0.4")  # type: ignore[arg-type]
MIXED = Settings(**PLACE, interfaces="127.0.0.1,[::1]")  # type: ignore[arg-type]
NBYTES = 300_000


class Pair:
    """A machine and a server, in one thread. The server returns what it is pushed."""

    def __init__(
        self,
        mine: Settings,
        theirs: Settings,
        nbytes: int = NBYTES,
        own_hosts: tuple[str, ...] = (),
        patience_s: float = 10.0,
    ) -> None:
        self.loop, self.context = EventLoop(), zmq.Context()
        self.came: list[int] = []  # rounds of answers
        self.rails: Counter[int] = Counter()
        self.heard: list[tuple[int, Header]] = []  # by rail
        self.resent = 0
        self.holds = False
        self.held: list[tuple[Header, Peer, zmq.Frame]] = []
        kinds = frozenset((Kind.PUSH, Kind.WITHDRAW, Kind.SHADOW_BEGIN, Kind.SHADOW_STATE))
        self.listener = DataListener("127.0.0.1", theirs, Traffic(), kinds, self._hear, lambda peer: None)
        self.listener.attach(self.loop)
        self.data = bytes(nbytes)
        mine = replace(mine, heartbeat_timeout_max_s=max(patience_s, mine.heartbeat_timeout_s))
        events = LinkEvents(lambda header, frame: self.came.append(header.round), self._again, lambda why: None)
        self.link = RailedLink(
            LinkOrigin(
                self.context, Runtime(loop=self.loop), 0, mine,
                lambda block, offset, length: memoryview(self.data)[offset : offset + length],
            ),
            LinkTarget(self.listener.address), events,
        )  # fmt: skip
        self.link._cards = NetworkCards(own_hosts, ("",) * len(own_hosts)) if own_hosts else self.link._cards
        self.due: set[int] = set()

    def _hear(self, header: Header, peer: Peer, frame: zmq.Frame) -> None:
        self.rails[peer.rail] += 1
        self.heard.append((peer.rail, header))
        if header.kind is not Kind.PUSH:
            return
        if self.holds:
            self.held.append((header, peer, frame))
        else:
            peer.answer(header, frame)

    def _again(self) -> None:
        self.resent += 1
        for round_ in self.due - set(self.came):
            self.push(round_)

    def push(self, round_: int, index: int = 0) -> None:
        self.due.add(round_)
        header = header_for(0, self.data, round=round_, index=index)
        self.link.push(header, Block(0, 0, len(self.data), 0), 0, None)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Run until it is so."""
        end_s = self.loop.time() + WAIT_S
        while not is_so():
            assert self.loop.time() < end_s
            self.loop.run_once(self.loop.time() + 0.05)

    def close(self) -> None:
        self.link.close()
        self.listener.detach(self.loop)
        self.loop.close()
        self.context.term()
        self.listener.close()


@pytest.fixture(name="pairs")
def making() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.usefixtures("zeromq_collector")
@pytest.mark.parametrize(
    ("mine", "theirs", "count"),
    [
        (ONE, ONE, 1),
        (TWO, TWO, 2),
        (ONE, TWO, 2),
        (TWO, ONE, 2),
        (THREE, TWO, 3),
        pytest.param(MIXED, MIXED, 2, marks=pytest.mark.skipif("::1" not in addresses_of("lo"), reason="no IPv6")),
    ],
)
def test_requests_go_over_all_network_cards(mine: Settings, theirs: Settings, count: int, pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(mine, theirs))
    pair.until(lambda: len(pair.link.rails) == count and all(rail.is_open for rail in pair.link.rails))
    pair.holds = count > 1
    for round_ in range(6 * count):
        pair.push(round_, round_)
    if count > 1:  # no answer has come, so each card has got as much
        pair.until(lambda: len(pair.held) == 6 * count)
        for header, peer, frame in pair.held:
            peer.answer(header, frame)
    pair.until(lambda: len(pair.came) == 6 * count)
    assert sorted(pair.came) == [*range(6 * count)]
    assert pair.rails == dict.fromkeys(range(count), 6)
    assert sum(rail.bytes_sent for rail in pair.link.rails) == 6 * count * NBYTES
    assert pair.listener.connections == count


@pytest.mark.usefixtures("zeromq_collector")
def test_a_connection_that_breaks_is_made_again_and_nothing_is_lost(pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(TWO, TWO))
    pair.until(lambda: len(pair.link.rails) == 2 and all(rail.is_open for rail in pair.link.rails))
    pair.holds = True
    for round_ in range(8):
        pair.push(round_, round_)
    pair.until(lambda: len(pair.held) == 8)
    pair.holds = False
    pair.link._others[0]._dialer.reconnect()
    pair.until(lambda: set(pair.came) == set(range(8)))
    assert pair.resent == 1
    pair.until(lambda: len(pair.link.rails) == 2 and all(rail.is_open for rail in pair.link.rails))
    assert sum(rail.bytes_sent for rail in pair.link.rails) == 16 * NBYTES  # all were sent twice
    before = pair.rails[1]
    for round_ in range(8, 16):
        pair.push(round_, round_)
    pair.until(lambda: set(pair.came) == set(range(16)))
    assert pair.rails[1] > before


@pytest.mark.usefixtures("zeromq_collector")
def test_a_network_card_that_has_lost_its_address_leaves_all_to_the_others(
    pairs: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again and again, and the log says so once."""
    pairs.append(pair := Pair(TWO, TWO, own_hosts=("127.0.0.1", "192.0.2.7"), patience_s=0.1))
    pair.until(lambda: len(pair.link.rails) == 2 and pair.link.is_open)
    for round_ in range(8):
        pair.push(round_, round_)
    pair.until(lambda: len(pair.came) == 8)
    assert pair.rails == {0: 8}
    pair.until(lambda: pair.link._others[0]._dialer.failures > 3 and "the others carry all" in caplog.text)
    assert caplog.text.count("over network card 1 of BYTEPS_INTERFACES: the others carry all") == 1
    assert pair.resent == 0


class Sums:
    """The server's part of rounds: it answers on the connection on which a contribution came last."""

    def __init__(self, pair: Pair) -> None:
        self.given: dict[int, tuple[Header, Peer, zmq.Frame]] = {}  # by round
        self.answered = 0
        pair.listener._on_message = self.hear
        pair.listener._on_gone = self.forget

    def hear(self, header: Header, peer: Peer, frame: zmq.Frame) -> None:
        self.given[header.round] = header, peer, frame

    def forget(self, peer: Peer) -> None:
        self.given = {round_: each for round_, each in self.given.items() if each[1] is not peer}

    def until_answered(self, pair: Pair, count: int) -> None:
        """Until rounds up to this one have their answers."""

        def is_answered() -> bool:
            while self.given:  # to answer may show that a connection is over
                self.answer(next(iter(self.given)))
            return set(pair.came) == set(range(count))

        pair.until(is_answered)

    def answer(self, round_: int) -> None:
        header, peer, frame = self.given.pop(round_)
        self.answered += 1
        peer.answer(header, frame)


@pytest.mark.usefixtures("zeromq_collector")
@pytest.mark.parametrize("seed", range(6))
def test_whatever_breaks_everything_is_answered(seed: int, pairs: list[Pair]) -> None:
    """A server that answers contributions which it has read from a connection that is over would lose the answers."""
    random = Random(seed)
    pairs.append(pair := Pair(TWO, THREE))
    pair.until(lambda: len(pair.link.rails) == 3 and all(rail.is_open for rail in pair.link.rails))
    sums, broken = Sums(pair), 0
    for round_ in range(150):
        pair.push(round_, round_)
        for _ in range(random.randrange(4)):
            pair.loop.run_once(pair.loop.time())
        if sums.given and random.random() < 0.8:
            sums.answer(random.choice([*sums.given]))
        if random.random() < 0.1:
            rail = random.choice([pair.link, *pair.link._others])
            broken += rail.is_open
            rail._dialer.reconnect()

    sums.until_answered(pair, 150)
    assert broken
    assert pair.resent
    assert sums.answered >= 150


@pytest.mark.usefixtures("zeromq_collector")
def test_what_a_server_has_yet_to_read_from_a_connection_that_is_over_does_no_harm(pairs: list[Pair]) -> None:
    """It may read that after what was sent again. A connection that breaks alone would lose answers here."""
    pairs.append(pair := Pair(TWO, TWO, nbytes=2000))
    sums = Sums(pair)
    for turn in range(1, 21):
        pair.until(lambda: len(pair.link.rails) == 2 and all(rail.is_open for rail in pair.link.rails))
        for round_ in range(20 * (turn - 1), 20 * turn):
            pair.push(round_, round_)
        assert pair.listener.socket.poll(WAIT_S * 1000)
        pair.link._others[0]._dialer.reconnect()
        sums.until_answered(pair, 20 * turn)


@pytest.mark.usefixtures("zeromq_collector")
def test_messages_whose_order_matters_take_one_way(pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(TWO, TWO))
    pair.until(lambda: len(pair.link.rails) == 2 and all(rail.is_open for rail in pair.link.rails))
    pair.holds = True
    for index in range(4):
        for kind in (Kind.SHADOW_BEGIN, Kind.SHADOW_STATE, Kind.SHADOW_STATE):
            pair.link.tell(Header(kind, 0, key=7, index=index), b"states")
        pair.push(index, index)
        pair.push(10 + index, 100 + index)
        pair.link.tell(header_for(0, pair.data, Kind.WITHDRAW, round=10 + index, index=100 + index), b"")
    pair.until(lambda: len(pair.heard) == 4 * 6)
    for index in range(4):
        assert len({rail for rail, header in pair.heard if header.key == 7 and header.index == index}) == 1
        pushed, withdrawn = ((rail, header.kind) for rail, header in pair.heard if header.index == 100 + index)
        assert (pushed[0], pushed[1], withdrawn[1]) == (withdrawn[0], Kind.PUSH, Kind.WITHDRAW)


@pytest.mark.usefixtures("zeromq_collector")
def test_a_later_group_of_ranks_ends_the_connections_of_the_one_before(pairs: list[Pair]) -> None:
    """Also those of network cards over which it has not connected yet."""
    pairs.append(pair := Pair(TWO, TWO))
    pair.until(lambda: all(rail.is_open for rail in pair.link.rails) and len(pair.link.rails) == 2)
    listener, gone = pair.listener, list[Peer]()
    listener._on_gone = gone.append
    first = listener._by_rail[0, 0]
    later = RemotePeer(listener, b"later", 0, (first.opening, first.sealing), (5, 99))
    listener._enter(later)
    assert {peer.rail for peer in gone} == {0, 1}
    assert listener._by_rail == {(0, 0): later}
    earlier = RemotePeer(listener, b"earlier", 0, (first.opening, first.sealing), (4, 100))
    earlier.rail = 1
    listener._enter(earlier)
    assert listener._by_rail == {(0, 0): later}


def test_the_machine_with_more_network_cards_decides() -> None:
    for own, there in itertools.product((0, 1, 2, 3), (1, 2, 3)):
        cards = NetworkCards(tuple(f"a{n}" for n in range(own)), ("",) * own)
        rails = cards.rails_to([f"tcp://b{n}:{9000 + n}" for n in range(there)])
        assert [rail.number for rail in rails] == [*range(max(own, there))]
        assert {rail.there for rail in rails} == {f"tcp://b{n}:{9000 + n}" for n in range(there)}
        assert {rail.own for rail in rails} == (set(cards.hosts) or {""})
        assert [rail.own[1:] for rail in rails] == [rail.there[7:8] for rail in rails] or own != there
        assert cards.rails_to(["tcp://b0:9000"])[0] == rails[0]


@given(
    st.permutations(["10.0.0.1", "10.1.0.1", "fd00::1", "192.168.0.1"]),
    st.permutations(["10.0.0.2", "10.1.0.2", "fd00::2", "172.16.0.2"]),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_cards_of_one_network_are_connected_whatever_the_order(
    own: list[str], there: list[str], most_own: int, most_there: int
) -> None:
    networks = {"10.0.0.1": "10.0.0.0/24", "10.1.0.1": "10.1.0.0/24", "fd00::1": "fd00::/64", "192.168.0.1": ""}
    own, there = own[:most_own], there[:most_there]
    cards = NetworkCards(tuple(own), tuple(networks[host] for host in own))
    rails = cards.rails_to([f"tcp://{joined(host, 9000)}" for host in there])
    assert {rail.own for rail in rails} == set(own)
    assert len({rail.there for rail in rails}) == len(there)
    assert cards.rails_to([rails[0].there])[0] == rails[0]
    taken = rails[0].own  # which may have been the only way from the first address of the other
    for host in own:
        other = f"{host[:-1]}2"
        if host not in (taken, "192.168.0.1") and other in there:
            assert any(rail.own == host and other in rail.there for rail in rails), rails


def test_names_first_letters_and_addresses_name_network_cards() -> None:
    assert machine.rails(ONE) == ()
    assert machine.rails(TWO) == ("127.0.0.1", "127.0.0.2")
    assert machine.rails(Settings(**PLACE, interfaces="lo,127.0.0.2")) == ("127.0.0.1", "127.0.0.2")  # type: ignore[arg-type]
    turned = Settings(**PLACE, interfaces="127.0.0.1,127.0.0.2", node_host="127.0.0.2")  # type: ignore[arg-type]
    assert machine.rails(turned) == ("127.0.0.2", "127.0.0.1")
    assert machine.offered_host(turned) == "127.0.0.2"
    assert machine.offered_host(Settings(interfaces="127.0.0.2,lo")) == "127.0.0.2"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"interfaces": "nosuch0"}, r"BYTEPS_INTERFACES=nosuch0 is no interface of this machine; those here: lo"),
        ({"interfaces": "lo,192.0.2.77"}, r"BYTEPS_INTERFACES=lo,192\.0\.2\.77: 192\.0\.2\.77 is not an address of"),
        ({"interfaces": "127.0.0.2", "interface": "lo"}, r"DMLC_INTERFACE gives this process the address 127\.0\.0\.1"),
        ({"interfaces": "127.0.0.2", "node_host": "127.0.0.3"}, r"DMLC_NODE_HOST gives this process the address"),
        ({"interfaces": "=l"}, r"BYTEPS_INTERFACES=l is no interface of this machine"),
        (
            {"interfaces": "^" + ",".join(sorted({name[0] for name in names()}))},
            r"leaves no interface that has an address; those here: lo",
        ),
        ({"interfaces": "^"}, r"it takes 1 to 8 names of network interfaces"),
        ({"interfaces": "lo,,eth0"}, r"it takes 1 to 8 names of network interfaces"),
        ({"interfaces": ",".join(f"127.0.0.{n}" for n in range(1, 10))}, r"it takes 1 to 8 names"),
    ],
)
def test_what_is_no_network_card_is_refused_by_name(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        machine.check_offered_host(Settings(**{**PLACE, **variables}))  # type: ignore[arg-type]


def test_listeners_have_one_port_at_all_addresses() -> None:
    listeners = [
        DataListener("127.0.0.1", TWO, Traffic(), frozenset(), lambda *message: None, lambda peer: None)
        for _ in range(2)
    ]
    ports = [[address.rpartition(":")[2] for address in listener.addresses] for listener in listeners]
    assert all(first == second for first, second in ports)
    assert ports[0] != ports[1]
    for listener in listeners:
        listener.close()


def test_a_port_that_is_never_free_at_both_addresses_is_an_error_in_the_end() -> None:
    """The second address is the first one, so that its port is taken, whichever was tried."""
    listener = DataListener("127.0.0.1", TWO, Traffic(), frozenset(), lambda *message: None, lambda peer: None)
    with pytest.raises(ConfigurationError, match=r"can't listen at 127\.0\.0\.1: Address already in use"):
        listener._listen(["127.0.0.1", "127.0.0.1"])
    with pytest.raises(OSError, match="Address already in use"):
        StreamListener("127.0.0.1", cast(Any, None), cast(Any, None), cast(Any, None), ["127.0.0.1"])


class Echo:
    """A server that only sends back what measures a link. ``rails``: messages, by rail."""

    def __init__(self, settings: Settings) -> None:
        self.loop = EventLoop()
        self.rails: Counter[int] = Counter()
        self.results: list[float] = []
        self.listener = DataListener(
            "127.0.0.1", settings, Traffic(), READER_KINDS, lambda *message: None, lambda peer: None
        )
        self.listener.attach(self.loop)
        self.listener.open_echo()
        echoed = self.listener._probed

        def count(peer: RemotePeer, header: Header, payload: zmq.Frame) -> None:
            self.rails[peer.rail] += 1
            echoed(peer, header, payload)

        self.listener._probed = count  # type: ignore[method-assign]

    def run(self) -> float:
        end_s = self.loop.time() + WAIT_S
        while not self.results:
            assert self.loop.time() < end_s
            self.loop.run_once(end_s)
        return self.results[0]

    def close(self) -> None:
        self.listener.detach(self.loop)
        self.loop.close()
        self.listener.close()


@pytest.fixture(name="echo")
def echoing() -> Iterator[Echo]:
    echo = Echo(TWO)
    yield echo
    echo.close()


@pytest.mark.usefixtures("zeromq_collector")
@pytest.mark.parametrize("mine", [TWO, ONE])
def test_a_link_is_measured_over_all_network_cards(mine: Settings, echo: Echo) -> None:
    Probe(Runtime(loop=echo.loop), mine, 0, echo.listener.address, echo.results.append)
    assert echo.run() > 0
    assert set(echo.rails) == {0, 1}
    assert 0.5 < echo.rails[0] / echo.rails[1] < 2


@pytest.mark.usefixtures("zeromq_collector")
def test_a_probe_of_a_changed_link_goes_over_all_network_cards(echo: Echo) -> None:
    burst = LinkBurst(echo.loop, TWO, BurstTarget((echo.listener.address,), 100.0, 200.0), None, echo.results.append)
    assert echo.run() > 0
    burst.close()
    assert set(echo.rails) == {0, 1}
