"""What a connection proves and how its messages are sealed: the pure parts, without a network."""

from __future__ import annotations

import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane import handshake
from byteps_py.dataplane.handshake import CallerHandshake, ListenerHandshake
from byteps_py.dataplane.seal import DamagedError, Protection, Seal, new_digest_check, new_digester, new_seal
from byteps_py.errors import ConfigurationError, ProtocolError
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind

ADDRESS = "tcp://10.0.0.1:4711"
SIGNED = Settings(secret="known to members", job_id="a")
OPEN = Settings(job_id="a")
ENCRYPTED = dataclasses.replace(SIGNED, encrypt=True)
HEADER = Header(Kind.PUSH, 3, key=7, length=100_000).pack()
KEY, DIGEST_KEY = bytes(range(16)), bytes(range(16, 32))


pytestmark = pytest.mark.usefixtures("zeromq_collector")


def opened(seal: Seal, sealed: tuple[bytes, object]) -> tuple[bytes, bytes]:
    header, frame = seal.open(sealed[0], zmq.Frame(bytes(sealed[1])))  # type: ignore[call-overload]
    return header, frame.bytes


def shake(caller: CallerHandshake, keeper: ListenerHandshake, machine: int = 3, address: str = ADDRESS) -> list[Seal]:
    """The seals of both ends: CS out, CS in, listener in, listener out."""
    text, challenge = keeper.challenge(caller.hello, machine, address)
    proof, *mine = caller.answer(text)
    return [*mine, *challenge.accept(proof)]


@pytest.mark.parametrize("protection", Protection)
@pytest.mark.parametrize("size", [0, 1, 16, 17, 100_000])
def test_sealed_messages_are_opened_in_order_and_no_others_are(protection: Protection, size: int) -> None:
    out, back = new_seal(protection, KEY, DIGEST_KEY), new_seal(protection, KEY, DIGEST_KEY)
    payloads = [os.urandom(size) for _ in range(3)]
    messages = [out.seal(HEADER, payload) for payload in payloads]
    for message, payload in zip(messages, payloads, strict=True):
        assert opened(back, message) == (HEADER, payload)
    for damaged in (messages[2], messages[0], (b"", b""), (bytes(HEADER_BYTES), b"x" * 200)):  # a repetition, nonsense
        with pytest.raises(DamagedError):
            opened(back, damaged)
    out.number = back.number
    assert opened(back, out.seal(HEADER, b"on")) == (HEADER, b"on")  # one damaged message does not spoil the next


@pytest.mark.parametrize("is_digested", [False, True])
@pytest.mark.parametrize("protection", Protection)
def test_every_flipped_bit_is_found(protection: Protection, is_digested: bool) -> None:
    payload = os.urandom(64)
    digest = new_digester(protection, DIGEST_KEY)(payload) if is_digested else b""
    sealed, hidden = (bytes(part) for part in new_seal(protection, KEY, DIGEST_KEY).seal(HEADER, payload, digest))
    whole = sealed + hidden
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            opened(
                new_seal(protection, KEY, DIGEST_KEY), (bytes(changed[: len(sealed)]), bytes(changed[len(sealed) :]))
            )


@pytest.mark.parametrize("protection", Protection)
def test_payloads_can_not_be_left_out_or_exchanged(protection: Protection) -> None:
    seal = new_seal(protection, KEY, DIGEST_KEY)
    (one, shown), (two, other), (empty, _) = (seal.seal(HEADER, payload) for payload in (b"a" * 99, b"b" * 99, b""))
    for number, header, payload in ((0, one, b""), (0, one, other), (1, two, shown), (2, empty, shown)):
        back = new_seal(protection, KEY, DIGEST_KEY)
        back.number = number
        with pytest.raises(DamagedError):
            opened(back, (header, payload))


@pytest.mark.parametrize("size", [0, 1, 100_000])
@pytest.mark.parametrize("protection", Protection)
def test_a_payload_for_many_peers_is_read_once(protection: Protection, size: int) -> None:
    """By one digest, which is of no use for another payload, on another connection, or a second time."""
    digest = new_digester(protection, DIGEST_KEY)
    payload, other = os.urandom(size), os.urandom(size + 1)
    ours, theirs = digest(payload), digest(other)
    assert bool(ours) is (protection is not Protection.ENCRYPTED)
    for key in (KEY, KEY[::-1]):
        out, back = (new_seal(protection, key, DIGEST_KEY) for _ in range(2))
        sealed = out.seal(HEADER, payload, ours)
        assert opened(back, sealed) == (HEADER, payload)
        with pytest.raises(DamagedError):
            opened(back, sealed)  # once more
        out.number = back.number
        with pytest.raises(DamagedError):
            opened(back, (out.seal(HEADER, payload, ours)[0], other))
        assert opened(back, out.seal(HEADER, b"on")) == (HEADER, b"on")
        if protection is Protection.SIGNED:
            with pytest.raises(DamagedError):
                opened(back, out.seal(HEADER, payload, theirs))
            with pytest.raises(DamagedError):
                opened(new_seal(protection, key, KEY), sealed)  # of another listener


@pytest.mark.parametrize("is_digested", [False, True])
@pytest.mark.parametrize("protection", [Protection.OPEN, Protection.SIGNED])
def test_a_header_apart_covers_the_payload_that_its_receiver_reads(protection: Protection, is_digested: bool) -> None:
    """It has the number of the message that brings it, and messages in between are opened meanwhile."""
    out, back = new_seal(protection, KEY, DIGEST_KEY), new_seal(protection, KEY, DIGEST_KEY)
    payload = os.urandom(1000)
    digest = new_digester(protection, DIGEST_KEY)(payload) if is_digested else b""
    for _ in range(2):
        apart = out.seal_apart(HEADER, payload, digest)
        number = out.number
        assert opened(back, out.seal(HEADER, apart)) == (HEADER, apart)
        assert opened(back, out.seal(HEADER, b"another")) == (HEADER, b"another")
        assert back.open_apart(number, apart, payload) == HEADER
        for wrong in (
            (number + 1, apart, payload),
            (number, apart, payload[:-1]),
            (number, apart, bytes([payload[0] ^ 1]) + payload[1:]),
            (number, bytes([apart[0] ^ 1]) + apart[1:], payload),
            (number, b"", payload),
        ):
            with pytest.raises(DamagedError) as caught:
                back.open_apart(*wrong)
            assert caught.value.number == wrong[0]


def test_what_is_encrypted_has_no_header_apart() -> None:
    with pytest.raises(ProtocolError, match=r"can't be encrypted"):
        new_seal(Protection.ENCRYPTED, KEY, DIGEST_KEY).seal_apart(HEADER, bytes(100))


@pytest.mark.parametrize("protection", [Protection.OPEN, Protection.SIGNED])
def test_several_threads_make_digests_at_once(protection: Protection) -> None:
    digest = new_digester(protection, DIGEST_KEY)

    def make(size: int) -> list[tuple[bytes, bytes]]:
        payload = os.urandom(size)
        return [(payload, digest(payload)) for _ in range(50)]

    with ThreadPoolExecutor(4) as threads:
        made = [each for some in threads.map(make, range(100_000, 100_008)) for each in some]
    out, back = (new_seal(protection, KEY, DIGEST_KEY) for _ in range(2))
    for payload, made_by_one in made:
        assert opened(back, out.seal(HEADER, payload, made_by_one)) == (HEADER, payload)
    assert len({each for _, each in made}) == (8 if protection is Protection.OPEN else len(made))


def test_digests_are_made_with_a_key_of_their_listener_that_only_members_know() -> None:
    payload = b"weights" * 100
    for settings in (SIGNED, OPEN, ENCRYPTED):
        keeper = ListenerHandshake(settings)
        digest = keeper.digest(payload)
        for machine in (3, 4):
            _, down, _, out = shake(CallerHandshake(settings, machine, ADDRESS), keeper, machine)
            assert opened(down, out.seal(HEADER, payload, digest)) == (HEADER, payload)
    keeper = ListenerHandshake(SIGNED)
    guessed = new_digester(Protection.SIGNED, handshake._digest_key(b"guessed", keeper._keys.public))
    for other in (guessed, ListenerHandshake(SIGNED).digest):
        _, down, _, out = shake(CallerHandshake(SIGNED, 3, ADDRESS), keeper)
        with pytest.raises(DamagedError):
            opened(down, out.seal(HEADER, payload, other(payload)))
    assert keeper.digest(payload) != keeper.digest(payload)  # no nonce comes twice


def test_encrypted_payloads_and_signed_headers_can_not_be_read() -> None:
    payload = b"weights " * 100
    for protection, is_readable in ((Protection.OPEN, True), (Protection.SIGNED, True), (Protection.ENCRYPTED, False)):
        sealed, shown = new_seal(protection, KEY, DIGEST_KEY).seal(HEADER, payload)
        assert (b"weights" in bytes(shown)) is is_readable
        assert (HEADER in sealed) is (protection is Protection.OPEN)


def test_both_ends_get_the_same_keys_and_each_connection_its_own() -> None:
    for settings in (SIGNED, ENCRYPTED, OPEN):
        keeper = ListenerHandshake(settings)
        first = shake(CallerHandshake(settings, 3, ADDRESS), keeper)
        second = shake(CallerHandshake(settings, 3, ADDRESS), keeper)
        message = first[0].seal(HEADER, b"payload")
        assert opened(first[2], message) == (HEADER, b"payload")
        assert opened(first[1], first[3].seal(HEADER, b"answer")) == (HEADER, b"answer")
        if settings.secret:
            for other in (first[1], second[2]):  # the other direction, another connection
                with pytest.raises(DamagedError):
                    opened(other, message)


@pytest.mark.parametrize(
    ("changes", "machine", "address", "group"),
    [
        ({"secret": "guessed by others"}, 3, ADDRESS, 0),
        ({"job_id": "b"}, 3, ADDRESS, 0),
        ({}, 4, ADDRESS, 0),
        ({}, 3, "tcp://10.0.0.2:4711", 0),
        ({}, 3, ADDRESS, 1),
    ],
)
def test_a_proof_is_of_no_use_elsewhere(changes: dict[str, str], machine: int, address: str, group: int) -> None:
    """Another secret, another job, another machine, another listener, another group: both ends see it."""
    caller = CallerHandshake(SIGNED, 3, ADDRESS)
    keeper = ListenerHandshake(dataclasses.replace(SIGNED, **changes))
    text, challenge = keeper.challenge(caller.hello, machine, address, group)
    with pytest.raises(ProtocolError, match=handshake.WRONG):
        caller.answer(text)
    good = CallerHandshake(SIGNED, 3, ADDRESS)
    proof = good.answer(ListenerHandshake(SIGNED).challenge(good.hello, 3, ADDRESS)[0])[0]  # overheard
    with pytest.raises(ProtocolError, match=handshake.WRONG):
        challenge.accept(proof)


def test_an_overheard_handshake_can_not_be_repeated() -> None:
    keeper, caller = ListenerHandshake(SIGNED), CallerHandshake(SIGNED, 3, ADDRESS)
    text, challenge = keeper.challenge(caller.hello, 3, ADDRESS)
    proof = caller.answer(text)[0]
    challenge.accept(proof)
    _, second = keeper.challenge(caller.hello, 3, ADDRESS)  # the same HELLO once more
    with pytest.raises(ProtocolError):
        second.accept(proof)
    with pytest.raises(ProtocolError):
        CallerHandshake(SIGNED, 3, ADDRESS).answer(text)  # the same CHALLENGE, to another's HELLO


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.permutations((OPEN, SIGNED, ENCRYPTED), 2)))
def test_the_protection_can_not_be_lowered(mine: Settings, theirs: Settings) -> None:
    caller = CallerHandshake(mine, 3, ADDRESS)
    with pytest.raises(ProtocolError, match="set BYTEPS_SECRET and BYTEPS_ENCRYPT to the same values everywhere"):
        ListenerHandshake(theirs).challenge(caller.hello, 3, ADDRESS)
    # Whoever changes it on the way makes the proofs wrong.
    keeper = ListenerHandshake(theirs)
    text, _ = keeper.challenge(bytes((keeper.protection,)) + caller.hello[1:], 3, ADDRESS)
    if mine.secret:
        with pytest.raises(ProtocolError, match=handshake.WRONG):
            caller.answer(text)


@pytest.mark.parametrize("length", [0, 1, 32, 34, 200])
def test_a_handshake_of_wrong_lengths_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        ListenerHandshake(SIGNED).challenge(os.urandom(length), 3, ADDRESS)
    with pytest.raises(ProtocolError):
        CallerHandshake(SIGNED, 3, ADDRESS).answer(os.urandom(length))
    caller = CallerHandshake(SIGNED, 3, ADDRESS)
    with pytest.raises(ProtocolError):
        ListenerHandshake(SIGNED).challenge(caller.hello, 3, ADDRESS)[1].accept(os.urandom(length))


def test_a_point_of_low_order_is_no_key() -> None:
    """With one, any process would know the shared key; but no process without the secret gets that far."""
    keeper, caller = ListenerHandshake(SIGNED), CallerHandshake(SIGNED, 3, ADDRESS)
    caller._keys.public = bytes(32)
    text, challenge = keeper.challenge(caller.hello, 3, ADDRESS)
    with pytest.raises(ProtocolError, match="its public key is invalid"):
        challenge.accept(caller.answer(text)[0])


def test_encryption_needs_a_key() -> None:
    with pytest.raises(ConfigurationError, match="BYTEPS_ENCRYPT=1 needs a key: set BYTEPS_SECRET"):
        Settings.from_env({"BYTEPS_ENCRYPT": "1"})


def test_nothing_that_is_printed_shows_a_secret() -> None:
    caller, keeper = CallerHandshake(ENCRYPTED, 3, ADDRESS), ListenerHandshake(ENCRYPTED)
    text, challenge = keeper.challenge(caller.hello, 3, ADDRESS)
    seals = caller.answer(text)[1:]
    things = (ENCRYPTED, ENCRYPTED.describe(), caller, keeper, challenge, challenge._said, keeper._keys, *seals)
    for thing in things:
        assert ENCRYPTED.secret not in f"{thing!r} {thing}"


@pytest.mark.parametrize("protection", [Protection.OPEN, Protection.SIGNED])
def test_only_the_whole_digest_of_a_payload_is_right(protection: Protection) -> None:
    is_right, digest = new_digest_check(protection, KEY), new_digester(protection, KEY)(b"payload")
    assert is_right(digest, b"payload")
    assert not is_right(digest, b"Payload")
    wrong = [digest[:length] for length in range(len(digest))] + [digest + b"\0", bytes(len(digest))]
    assert not any(is_right(each, b"payload") for each in wrong)
