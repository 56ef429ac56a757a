"""Serves a process's metrics over HTTP: ``GET /metrics``, on a port of its own.

Owns the listening socket and its threads. A page is made when it is asked for, and nothing is done in between. The
collector reads counters where they may be read, mostly on an event loop, and the page waits for that a limited time.
A fault of a page is logged, or told to the scraper; it never stops the training.

    port      BYTEPS_METRICS_PORT: the scheduler's page
    port + 1  the communication service of a machine
    port + 2  the summation server of a machine
    port + 3  its ranks, in the order of local ranks
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, TypeVar

from byteps_py.config.addresses import is_ipv6, joined
from byteps_py.config.settings import METRICS_PORTS, Settings
from byteps_py.errors import ConfigurationError
from byteps_py.prometheus.metrics import LABELS, METRICS, RANK, SCHEDULER, SERVER, WORKER, MetricSample
from byteps_py.system.log import logger
from byteps_py.system.machine import bindable_host, process_at, resolved

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

T = TypeVar("T")
Collect = Callable[[], Iterable[MetricSample]]
_OFFSETS = {SCHEDULER: 0, WORKER: 1, SERVER: 2, RANK: METRICS_PORTS}
#: A scraper that does not say what it wants in this time, or does not take the answer, is cut off.
REQUEST_TIMEOUT_S = 5.0
#: An event loop that is busy for longer answers no page.
ANSWER_TIMEOUT_S = 3.0
_MOST_REQUESTS = 8  # at a time
_RETRY_S = 0.1


def port_of(settings: Settings, role: str) -> int:
    """The port of this process's page; 0 if it has none.

    >>> port_of(Settings(metrics_port=9400, local_size=4, local_rank=2), "rank")
    9405
    """
    if not settings.metrics_port:
        return 0
    return settings.metrics_port + _OFFSETS[role] + (settings.local_rank if role == RANK else 0)


def on_loop(
    post: Callable[[Callable[[], None]], object], read: Callable[[], T], timeout_s: float = ANSWER_TIMEOUT_S
) -> T:
    """The result of ``read``, which an event loop calls. ``post``: has it called there, from any thread.

    Raises TimeoutError if the loop does not answer within ``timeout_s``.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(read())
        except Exception as error:
            answer.set_exception(error)

    post(call)
    try:
        return answer.result(timeout_s)
    except FutureTimeoutError:
        raise TimeoutError(f"the process was too busy to answer within {timeout_s:g} s") from None


class MetricsPage:
    """Serves what ``collect`` returns, called on a thread of the page, until ``close``. ``who``: for messages.

    Raises ConfigurationError without prometheus-client, and OSError if the port can't be used.
    """

    def __init__(self, host: str, port: int, who: str, collect: Collect) -> None:
        self._exposition = _library()
        self._collect = collect
        self._has_warned = False
        self._who = who
        self._server = _HttpServer(host, port, self._handler())
        self._thread = threading.Thread(target=self._server.serve, name="byteps-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening. Requests under way are cut off after their time limit."""
        self._server.stop()
        self._thread.join(REQUEST_TIMEOUT_S)

    def text(self) -> bytes:
        """The page. Raises what ``collect`` raises."""
        registry = self._exposition.CollectorRegistry()
        registry.register(_Collected(self._exposition, list(self._collect())))
        return bytes(self._exposition.generate_latest(registry))

    def _answer(self) -> tuple[int, str, bytes]:
        try:
            return 200, str(self._exposition.CONTENT_TYPE_LATEST), self.text()
        except Exception as error:  # whatever it is: a page must not end what it is about
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics: the page of %s can't be made: %s", self._who, error or type(error).__name__)
            return 503, "text/plain; charset=utf-8", f"{type(error).__name__}: {error}\n".encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = weakref.proxy(self)

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/metrics", "/"):
                    self.send_error(404, "the page is /metrics")
                    return
                status, kind, body = page._answer()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                logger.debug("metrics: %s", format % arguments)

        return Handler


class _HttpServer(HTTPServer):
    """A thread for each request, and at most ``_MOST_REQUESTS``: a stranger can't have more started."""

    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(resolved(host)) else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._is_stopped = False
        super().__init__((host, port), handler)
        _open.add(self)

    def server_bind(self) -> None:
        """As in http.server, but no name is looked up."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self) -> None:
        """Take connections until ``stop``. Unlike serve_forever, it wakes up for nothing else, and ends at once."""
        while not self._is_stopped:
            try:
                request, address = self.socket.accept()
            except OSError:  # stopped, or no descriptors are left
                time.sleep(0.0 if self._is_stopped else _RETRY_S)
                continue
            self.process_request(request, address)

    def stop(self) -> None:
        """End ``serve``. Another thread than its own."""
        self._is_stopped = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        arguments = (request, client_address)
        threading.Thread(target=self._process, args=arguments, name="byteps-metrics-request", daemon=True).start()

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            with contextlib.suppress(OSError):  # the scraper has gone, or takes too long
                self.finish_request(request, client_address)
        finally:
            self.shutdown_request(request)
            self._free.release()


#: Those of this process.
_open: weakref.WeakSet[_HttpServer] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, such as a DataLoader's, may outlive its rank, which is started again and needs the port."""
    for server in list(_open):
        server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Collected:
    """The samples as prometheus-client takes them: a family for each metric that there is."""

    def __init__(self, library: Any, samples: list[MetricSample]) -> None:
        self._library, self._samples = library, samples

    def collect(self) -> Iterator[Family]:
        """The families, in the order of the table."""
        by_name: dict[str, list[MetricSample]] = {}
        for sample in self._samples:
            by_name.setdefault(sample.name, []).append(sample)
        for metric in METRICS:
            if metric.name in by_name:
                kind = "CounterMetricFamily" if metric.kind == "counter" else "GaugeMetricFamily"
                family = getattr(self._library, kind)(metric.name, metric.meaning, labels=[*LABELS, *metric.extra])
                for sample in by_name[metric.name]:
                    family.add_metric([*sample.place, *sample.extra], sample.value)
                yield family


def _library() -> Any:
    """prometheus-client. Raises ConfigurationError if it is not installed."""
    try:
        import prometheus_client
        import prometheus_client.core
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigurationError(
            "BYTEPS_METRICS_PORT needs prometheus-client, which is not installed here: "
            "pip install 'byteps-py[metrics]', or unset BYTEPS_METRICS_PORT"
        ) from None
    from types import SimpleNamespace

    core = prometheus_client.core
    return SimpleNamespace(
        CollectorRegistry=prometheus_client.CollectorRegistry,
        generate_latest=prometheus_client.generate_latest,
        CONTENT_TYPE_LATEST=prometheus_client.CONTENT_TYPE_LATEST,
        CounterMetricFamily=core.CounterMetricFamily,
        GaugeMetricFamily=core.GaugeMetricFamily,
    )


def check(settings: Settings) -> None:
    """Raises ConfigurationError if a page is wanted and prometheus-client is not installed. A service calls it before
    it begins."""
    if settings.metrics_port:
        _library()


def open_page(settings: Settings, role: str, collect: Collect, host: str = "") -> MetricsPage | None:
    """The page of this process; None if BYTEPS_METRICS_PORT asks for none, or if its port can't be used, which is
    logged. ``host``: default: the address that the process offers to others.

    Raises ConfigurationError without prometheus-client.
    """
    port = port_of(settings, role)
    if not port:
        return None
    who = f"rank {settings.local_rank} of this machine" if role == RANK else f"the {role}"
    host = host or bindable_host(settings)
    try:
        page = MetricsPage(host, port, who, collect)
    except OSError as error:
        holder = process_at(host, port) if error.errno == errno.EADDRINUSE else ""
        logger.warning(
            "metrics: port %d of %s can't be used: %s%s. Without it, %s has no page here%s. Set another "
            "BYTEPS_METRICS_PORT, and one for each job of a machine: a job's processes use the %d ports from there on",
            port, host, error.strerror or error, f" ({holder})" if holder else "", who,
            "" if role == SCHEDULER or not settings.scheduler_host else "; the scheduler's page has its figures",
            METRICS_PORTS + settings.local_size,
        )  # fmt: skip
        return None
    logger.info("metrics of %s: http://%s/metrics", who, joined(host, page.port))
    return page


@contextlib.contextmanager
def page_of(settings: Settings, role: str, collect: Collect, host: str = "") -> Iterator[None]:
    """``open_page``, closed at the end of the block."""
    page = open_page(settings, role, collect, host)
    try:
        yield
    finally:
        if page is not None:
            page.close()
