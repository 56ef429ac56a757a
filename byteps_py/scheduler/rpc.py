"""Settings of gRPC for connections to the scheduler: options, credentials, TCP retransmission, and the meaning of
errors.

Any thread. Only service processes and the command line import this: gRPC does not survive a fork, and trainers fork.
"""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from byteps_py.config.settings import Settings
from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    StallError,
)
from byteps_py.security import auth

TOKEN_KEY = "byteps-token"
#: The declarations of 100 000 tensors fit.
MAX_MESSAGE_BYTES = 32 << 20

_DROPPED = ("handshake read failed", "socket closed", "connection reset", "endpoint closing", "connection idle")

Options = list[tuple[str, int | str]]

_COMMON: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


_TCP_THIN_LINEAR_TIMEOUTS = 16  # of linux/tcp.h; six attempts, then it doubles again
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def token(settings: Settings) -> str:
    """The token that a caller shows to the scheduler; empty without a secret."""
    return auth.token(settings, "control")


def metadata(settings: Settings) -> tuple[tuple[str, str], ...]:
    """The metadata of every call."""
    shown = token(settings)
    return ((TOKEN_KEY, shown),) if shown else ()


def server_options() -> Options:
    """The options of a gRPC server."""
    return [
        *_COMMON,
        ("grpc.so_reuseport", 0),  # a second scheduler on this port must fail, not share its connections
        # A connection that does not speak the protocol is closed within 5 s, and can send little until then.
        ("grpc.server_handshake_timeout_ms", 4_000),
        ("grpc.max_connection_idle_ms", 500),  # gRPC also checks it this often: up to twice that
        ("grpc.max_concurrent_streams", 64),
        # Calls that this process has not looked at yet cost gRPC 13 KB each, also after the caller has reset them.
        ("grpc.server.max_pending_requests", 512),
        ("grpc.server.max_pending_requests_hard_limit", 1024),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(settings: Settings) -> grpc.Channel:
    """A channel to ``settings.scheduler_address``; it connects at the first call. The caller closes it.

    Raises ConfigurationError if there is no address.
    """
    address = settings.scheduler_address
    if not address:
        raise ConfigurationError("the scheduler's address is not set: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")
    # For a scheduler whose machine vanishes without closing its connections. gRPC ends a connection whose packets are
    # not confirmed for this long, and the scheduler takes the end of a connection for that of the member: on a full
    # link, packets of the connection can be lost again and again for seconds.
    keepalive_ms = max(1000, int(settings.patience_s * 500))
    options: Options = [
        *_COMMON,
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 4000),  # the time of an attempt
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if not (key := auth.membership_key(settings)):
        return grpc.insecure_channel(address, options)
    from byteps_py.security import tls

    own = tls.credentials(key)
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate),
        [*options, ("grpc.ssl_target_name_override", tls.SERVER_NAME)],
    )


def add_port(server: grpc.aio.Server, address: str, settings: Settings, began: Callable[[], None]) -> int:
    """Let ``server`` listen on ``address``: with mutual TLS if there is a secret, also a local one. Returns the port.

    Raises RuntimeError. ``began``: called, by any thread, before each handshake.
    """
    if not (key := auth.membership_key(settings)):
        return server.add_insecure_port(address)
    from byteps_py.security import tls

    own = tls.credentials(key)

    def unchanged() -> Any:
        """gRPC asks for new certificates before each handshake; None: keep these."""
        began()

    certificates = grpc.ssl_server_certificate_configuration([(own.private_key, own.certificate)], own.authority)
    return server.add_secure_port(
        address, grpc.dynamic_ssl_server_credentials(certificates, unchanged, require_client_authentication=True)
    )


def reason(details: str) -> str:
    """The useful part of gRPC's error text: its end, which has the system's error."""
    return details.rpartition("last error: ")[2].rpartition("remote host: ")[2].removeprefix("UNKNOWN: ")


def is_not_up_yet(error: grpc.RpcError) -> bool:
    """True if no scheduler answered: it may still be starting, or have more callers than it can serve."""
    return _is_unseen(error) or (error.code() is grpc.StatusCode.UNAVAILABLE and not is_of_another_cluster(error))


def is_dropped(error: grpc.RpcError) -> bool:
    """True if the other end closed the connection before it had authenticated itself, or ended the call before it
    looked at it. Another attempt may succeed."""
    details = (error.details() or "").lower()
    is_closed = error.code() is grpc.StatusCode.UNAVAILABLE and any(word in details for word in _DROPPED)
    return is_closed or _is_unseen(error)


def _is_unseen(error: grpc.RpcError) -> bool:
    """True if too many calls waited at the other end (``server_options``). A call that this end has cancelled has the
    same code."""
    return error.code() is grpc.StatusCode.CANCELLED


def is_of_another_cluster(error: grpc.RpcError) -> bool:
    """True if the other end showed a certificate made from another secret, or does not speak TLS. An end that only
    closed the connection has shown neither."""
    details = (error.details() or "").upper()
    return any(word in details for word in ("BAD_SIGNATURE", "CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER"))


def absent(address: str, waited_s: float, details: str) -> RendezvousError:
    """The error for a scheduler that can't be reached."""
    return RendezvousError(
        f"no scheduler answers at {address} after {waited_s:g} s: start it (DMLC_ROLE=scheduler bpslaunch), and check "
        f"DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, that BYTEPS_SECRET is set for both or for neither, and that no firewall "
        f"is in between ({reason(details) or 'no answer'})"
    )


def explain(address: str, error: grpc.RpcError, waited_s: float) -> BytePSError:
    """The error of this package for a failed first call to ``address``."""
    code, details = error.code(), error.details() or ""
    if is_of_another_cluster(error):
        return RendezvousError(
            f"the scheduler at {address} and this process could not prove to each other that they belong to one "
            "cluster: set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE everywhere, or nowhere, and the same "
            "BYTEPS_JOB_ID or scheduler address"
        )
    if is_dropped(error):
        return RendezvousError(
            f"the process at {address} closed each connection for {waited_s:g} s before it had shown who it is: the "
            "scheduler has a secret (BYTEPS_SECRET, or its own of bpslaunch -np) and this process has none, or the "
            "scheduler has more callers than it can serve, or another program uses its port"
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return absent(address, waited_s, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return StallError(f"the scheduler at {address} gave no answer within {waited_s:g} s: is it frozen?")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return RendezvousError(f"the scheduler at {address} turned this process away: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"the process at {address} is not a byteps_py scheduler of this version ({details})")
    return CommunicationError(f"the scheduler at {address} failed: {code.name}, {details}")


def lost(address: str, details: str) -> PeerLostError:
    """The error for an established connection that broke and can't be made again."""
    why = reason(details) or "it ended the connection"
    return PeerLostError(f"lost the scheduler at {address}: {why}; see its log")


def retry_steadily(port: int) -> int:
    """Let TCP retransmit at steady intervals on this process's sockets that listen on ``port`` (their connections
    inherit the option) or are connected to it. Returns the number of sockets; 0 where the system does not know the
    option.

    TCP waits twice as long before each retransmission. After a network has lost everything for 0.5 s, the next attempt
    may be another 0.5 s away, and with it the heartbeats that show which members live. On connections with little in
    flight Linux can keep to the first interval instead (TCP_THIN_LINEAR_TIMEOUTS), but gRPC has no option for that, so
    it is set from outside.
    """
    count = 0
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, not connected, or the option is not known
                if not stat.S_ISSOCK(entry.stat().st_mode):
                    continue
                one = socket.socket(fileno=int(entry.name))
                try:
                    if _is_of(one, port):
                        one.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
                        count += 1
                finally:
                    one.detach()  # gRPC closes it
    return count


def _is_of(one: socket.socket, port: int) -> bool:
    if one.family not in _FAMILIES or one.type != socket.SOCK_STREAM:
        return False
    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return int((one.getsockname() if listens else one.getpeername())[1]) == port
