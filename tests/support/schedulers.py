"""A scheduler as a process, and members of its cluster as programs use their links."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable

from byteps_py import errors
from byteps_py.config.settings import Settings
from byteps_py.launch.process_plan import free_port
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import client
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire.control_link import ControlEvents
from byteps_py.wire.rank_link import pack_spec
from support import warm

TIMEOUT_S = 60.0

Factory = Callable[..., "Scheduler"]

#: Worker 1, as a process that can be killed; says what comes to it.
CHILD = """
import sys
from byteps_py.system.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import client
from byteps_py.wire.control_link import ControlEvents
from byteps_py.config.settings import Settings
loop = EventLoop()
register = pb.Register(role=1, kind=1, machine_index=1, local_size=1)
def told(message):
    print(message.WhichOneof("body"), flush=True)
client.connect(Settings.from_env(), register, loop, ControlEvents(told, print, pb.Heartbeat))
loop.run()
"""


class Scheduler:
    """A scheduler process on a free loopback port, and the settings to reach it."""

    def __init__(self, **changes: object) -> None:
        self.settings = Settings(
            scheduler_host="127.0.0.1",
            scheduler_port=free_port(),
            log_level="INFO",
            **changes,  # type: ignore[arg-type]
        )
        self.log: list[str] = []
        self._start()

    def _start(self) -> None:
        self.process = warm.Popen(
            [sys.executable, "-m", "byteps_py.scheduler"],
            env=environment(self.settings), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def restart(self) -> None:
        """Kill it, and start another one in its place."""
        self.kill()
        self.log.clear()
        self._start()

    def wait_listening(self) -> Scheduler:
        return self.wait_for("listening on")

    def wait_for(self, words: str) -> Scheduler:
        """Until its log has these words."""
        pipe = self.process.stderr
        assert pipe is not None
        while words not in "".join(self.log):
            assert select.select([pipe], [], [], TIMEOUT_S)[0], "the scheduler says nothing"
            text = os.read(pipe.fileno(), 1 << 16).decode()
            assert text, f"the scheduler ended with {self.process.wait(TIMEOUT_S)}: {self.log}"
            self.log.append(text)
        return self

    def ended(self) -> tuple[int, str]:
        """Wait for its end; exit status and log."""
        rest = self.process.communicate(timeout=TIMEOUT_S)[1]
        return self.process.returncode, "".join(self.log) + rest

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass


def environment(settings: Settings) -> dict[str, str]:
    values = {
        "DMLC_PS_ROOT_URI": settings.scheduler_host,
        "DMLC_PS_ROOT_PORT": str(settings.scheduler_port),
        "DMLC_NUM_WORKER": str(settings.num_workers),
        "DMLC_NUM_SERVER": str(settings.num_servers),
        "BYTEPS_START_TIMEOUT_S": str(settings.start_timeout_s),
        "PS_HEARTBEAT_TIMEOUT": str(settings.heartbeat_timeout_s),
        "PS_HEARTBEAT_INTERVAL": str(settings.heartbeat_interval_s),
        "BYTEPS_LOG_LEVEL": settings.log_level,
        "BYTEPS_SECRET": "" if settings.secret_file else settings.secret,
        "BYTEPS_SECRET_FILE": settings.secret_file,
        "BYTEPS_LOCAL_SECRET": settings.local_secret,
        "BYTEPS_JOB_ID": settings.job_id,
        "BYTEPS_JOURNAL_DIR": settings.journal_dir,
        "BYTEPS_PLACEMENT": settings.placement,
    }
    if settings.heartbeat_timeout_max_s is not None:
        values["BYTEPS_HEARTBEAT_TIMEOUT_MAX_S"] = str(settings.heartbeat_timeout_max_s)
    return {**os.environ, **values}


class Member:
    """One end of a control link with an event loop of its own, and what came to it."""

    def __init__(self, settings: Settings, register: pb.Register) -> None:
        self.summed = 300 if register.role == pb.ROLE_SUMMATION else 0
        self.messages: queue.Queue[pb.SchedulerMessage] = queue.Queue()
        self.lost: queue.Queue[errors.BytePSError] = queue.Queue()
        self.away: queue.Queue[errors.BytePSError] = queue.Queue()
        self.back = threading.Semaphore(0)
        self.beats = threading.Semaphore(0)
        self.callback_threads: set[threading.Thread] = set()
        self.loop = EventLoop()
        self.thread = threading.Thread(target=self.loop.run, name="member-loop")
        self.thread.start()
        events = ControlEvents(self._message, self._lost, self._heartbeat, self.away.put, self._back)
        self.link = client.connect(settings, register, self.loop, events)

    def _message(self, message: pb.SchedulerMessage) -> None:
        self.callback_threads.add(threading.current_thread())
        self.messages.put(message)

    def _lost(self, error: errors.BytePSError) -> None:
        self.callback_threads.add(threading.current_thread())
        self.lost.put(error)

    def _back(self) -> None:
        self.back.release()

    def _heartbeat(self) -> pb.Heartbeat:
        self.callback_threads.add(threading.current_thread())
        self.beats.release()
        return pb.Heartbeat(statistics=pb.Statistics(bytes_summed=self.summed, cpu_s=1.5))

    def leave(self) -> None:
        """Close the link where a service does: in the loop's thread."""
        left = threading.Event()
        self.loop.post(lambda: self.link.close("done"))
        self.loop.post(left.set)
        assert left.wait(TIMEOUT_S)

    def wait(self, body: str) -> pb.SchedulerMessage:
        """The next message of this kind; others before it are dropped."""
        while True:
            message = self.messages.get(timeout=TIMEOUT_S)
            if message.HasField(body):
                return message

    def close(self) -> None:
        self.link.close("the test is over")
        self.loop.stop()
        self.thread.join(TIMEOUT_S)
        self.loop.close()


Attend = Callable[..., Member]


def as_worker(index: int = 0) -> pb.Register:
    return pb.Register(role=pb.ROLE_COMMUNICATION, kind=pb.MACHINE_KIND_GPU, machine_index=index, local_size=1)


def as_server(index: int = -1) -> pb.Register:
    kind = pb.MACHINE_KIND_CPU if index < 0 else pb.MACHINE_KIND_GPU
    return pb.Register(role=pb.ROLE_SUMMATION, kind=kind, machine_index=index, address=f"tcp://127.0.0.1:{100 + index}")


def ballot(rank: int) -> pb.MemberMessage:
    spec = pack_spec(TensorSpec("w", DType.FLOAT32, (2,)))
    one = pb.Ballot(name="w", generation=1, votes=[pb.Vote(ranks=[rank], spec=spec)])
    return pb.MemberMessage(declare=pb.Declare(ballots=[one]))
