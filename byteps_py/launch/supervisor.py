"""Starts processes, waits for them and for signals, and carries out the policy's decisions.

Waits on descriptors only: one per process, one for signals, one per pipe. Runs in the program's main thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps_py.launch.host_link import MAX_TASK_BYTES, HostReport, LauncherLink
from byteps_py.launch.process_guard import ProcessGuard, die_with, sweep
from byteps_py.launch.process_output import OutputOptions, OutputStream, open_streams, print_message, show
from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.supervision_policy import (
    ENDING_SIGNALS,
    USER_SIGNALS,
    Action,
    Say,
    Start,
    SupervisionPolicy,
    describe,
)
from byteps_py.launch.warm_process import ForkedProcess, WarmProcesses
from byteps_py.system import jobs
from byteps_py.system.jobs import TOKEN_VARIABLE
from byteps_py.wire.launch_protocol import NOTICE_VARIABLE, FailureReport, NoticePipe

_REAP_LIMIT_S = 5.0
_MOST_GUARDS = 10


@dataclass(frozen=True, slots=True)
class Supervision:
    """Options of the supervision of a job. ``grace_s``: seconds from SIGTERM to SIGKILL; ``own_error_s``: seconds that
    ranks have to end with their own error after a rank or a service failed; ``drain_s``: seconds that services have
    once all ranks have ended; ``tag_output``: prefix every line (None: if there is more than one rank); ``folder``: for
    a file per process and stream; ``elastic``, ``is_part``: see SupervisionPolicy; ``has_warm``: a process that has
    imported torch waits on each machine: ranks that are started again are forked from it; ``host``, ``launcher``: of a
    part that ``bpslaunch -H`` has started: the name of this host in prefixes, and the link to that launcher."""

    grace_s: float = 5.0
    own_error_s: float = 15.0
    drain_s: float = 30.0
    tag_output: bool | None = None
    folder: Path | None = None
    elastic: bool = False
    is_part: bool = False
    has_warm: bool = False
    host: str = ""
    launcher: LauncherLink | None = None


class Supervisor:
    """One job's processes. Call ``run`` once; after it, no process that it started exists."""

    def __init__(self, specs: Sequence[ProcessSpec], environ: Mapping[str, str], how: Supervision, token: str) -> None:
        self._specs, self._environ, self._how, self._token = specs, environ, how, token
        are_many = sum(spec.kind is ProcessKind.MAIN for spec in specs) > 1
        self._tags = are_many if how.tag_output is None else how.tag_output
        self._policy = SupervisionPolicy(specs, how.grace_s, how.own_error_s, how.drain_s, how.elastic, how.is_part)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._pidfds: dict[str, int] = {}
        self._inputs: dict[str, int] = {}  # of launchers on other hosts: their standard inputs
        self._told = HostReport()
        self._streams: dict[str, list[OutputStream]] = {}
        self._notice_pipes: dict[str, NoticePipe] = {}
        self._report = FailureReport()
        self._was_signalled = False
        self._guard: ProcessGuard | None = None
        self._guards = 0  # how many guards have died
        self._warm = WarmProcesses(specs) if how.has_warm else None

    def run(self) -> SupervisionPolicy:
        """Start the job, and return when it is over: ``code`` is the exit code, ``retry`` asks to start over.

        Raises OSError if a process can't be started, after it has ended the others.
        """
        self._set_guard()
        try:
            with self._signals():
                if (launcher := self._how.launcher) is not None:
                    self._watch(launcher.descriptor, functools.partial(self._on_launcher, launcher))
                try:
                    for spec in self._specs:
                        self._start(spec)
                    self._loop()
                finally:
                    self._end_everything()
        finally:
            self._selector.close()
            if self._guard is not None:
                self._guard.close()
        if not self._policy.never_began:  # else what ranks report follows from that
            self._show_report()
        return self._policy

    def _set_guard(self) -> None:
        self._guard = ProcessGuard(self._token)
        self._watch(self._guard.pidfd, self._guard_died)

    def _guard_died(self) -> None:
        """The guard has died: start another one, or processes of the ranks would outlive a launcher that is killed."""
        if self._guard is None:
            return
        self._selector.unregister(self._guard.pidfd)
        text = f"the process that ends this job when the launcher is killed {describe(self._guard.close())}"
        self._guards += 1
        if self._guards < _MOST_GUARDS:
            self._set_guard()
            print_message(f"{text}; it is started again")
        else:
            print_message(f"{text} for the {_MOST_GUARDS}th time; it is not started again")
            self._guard = None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into bytes on a socket. A signal that is ignored (nohup) stays ignored."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        taken = [s for s in (*ENDING_SIGNALS, *USER_SIGNALS) if signal.getsignal(s) is not signal.SIG_IGN]
        previous_fd = signal.set_wakeup_fd(writer.fileno())
        previous = {s: signal.signal(s, _noted) for s in taken}
        self._watch(reader.fileno(), lambda: self._on_signals(reader))
        try:
            yield
        finally:
            self._selector.unregister(reader.fileno())
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(previous_fd)
            reader.close()
            writer.close()

    def _start(self, spec: ProcessSpec, again: bool = False) -> None:
        """Start a process, or fork it from a warm one."""
        outputs, streams = open_streams(spec.label, self._output_options(spec), again)
        env = self._environment_of(spec)
        self._streams[spec.name] = streams
        notices = self._notice_pipes[spec.name] = NoticePipe()
        env[NOTICE_VARIABLE] = notices.name
        self._watch(notices.reader, functools.partial(self._on_notices, spec))
        try:
            forked = self._warm.take(spec, env, outputs, notices.writer) if self._warm is not None and again else None
            process = forked or subprocess.Popen(
                spec.argv,
                env=env,
                stdin=None if spec.reads_stdin else self._input_of(spec),
                stdout=outputs[0] if outputs else None,
                stderr=outputs[1] if outputs else None,
                start_new_session=True,
                pass_fds=(notices.writer,),
                preexec_fn=die_with(os.getpid()),
            )
        finally:
            for fd in outputs:
                os.close(fd)
            os.close(notices.writer)
        if process.stdin is not None and spec.task is not None:
            self._inputs[spec.name] = os.dup(process.stdin.fileno())
            process.stdin.close()
            with contextlib.suppress(OSError):  # this user has many large pipes already: then writing may wait for ssh
                fcntl.fcntl(self._inputs[spec.name], fcntl.F_SETPIPE_SZ, MAX_TASK_BYTES)
            self._write_input(spec.name, spec.task)
        self._processes[spec.name] = process
        for stream in streams:
            self._watch(stream.pipe, functools.partial(self._readable, stream))
        self._pidfds[spec.name] = os.pidfd_open(process.pid)
        self._watch(self._pidfds[spec.name], lambda: self._exited(spec.name))

    @staticmethod
    def _input_of(spec: ProcessSpec) -> int:
        return subprocess.DEVNULL if spec.task is None else subprocess.PIPE

    def _write_input(self, name: str, data: bytes) -> None:
        """Say something to the launcher on another host."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._inputs[name], data)

    def _output_options(self, spec: ProcessSpec) -> OutputOptions:
        how = self._how
        if spec.task is not None:  # its lines have prefixes already
            return OutputOptions("", None, functools.partial(self._on_host_line, spec.name))
        label = f"{how.host}/{spec.label}" if how.host else spec.label
        prefix = f"[{label}] " if self._tags else "" if how.host else None
        return OutputOptions(prefix, how.folder)

    def _environment_of(self, spec: ProcessSpec) -> dict[str, str]:
        outer = self._environ.get(TOKEN_VARIABLE, "")
        env = {**self._environ, **spec.env, TOKEN_VARIABLE: f"{outer}:{self._token}" if outer else self._token}
        if self._tags or self._how.folder is not None:
            env.setdefault("PYTHONUNBUFFERED", "1")  # Python buffers its output into a pipe
        return {name: value for name, value in env.items() if value or name not in spec.env}

    def _loop(self) -> None:
        while not self._policy.finished:
            warm_s = None if self._warm is None else self._warm.due_s
            deadlines = [due_s for due_s in (self._policy.deadline, self._report.due_s, warm_s) if due_s is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(timeout):
                key.data()
            self._do(self._policy.ticked(time.monotonic()))
            if (due_s := self._report.due_s) is not None and time.monotonic() >= due_s:
                self._show_report()
            if warm_s is not None and self._warm is not None and time.monotonic() >= warm_s:
                self._warm.start(self._environment_of)

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _readable(self, stream: OutputStream) -> None:
        if not stream.pump():
            self._selector.unregister(stream.pipe)

    def _on_notices(self, spec: ProcessSpec) -> None:
        notices = self._notice_pipes[spec.name]
        for notice in notices.read():
            if self._how.launcher is not None:  # which sees those of all hosts
                self._how.launcher.report(HostReport(f"{self._how.host}/{spec.label}", notice))
            else:
                self._report.add(spec.label, notice, time.monotonic())
            for stream in self._streams[spec.name]:
                stream.keep(notice.text)
        if notices.is_over:
            self._close_notices(spec.name)

    def _on_host_line(self, name: str, line: bytes) -> bool:
        """A line of a launcher on another host; True for a report."""
        report = HostReport.unpack(line)
        if report is None:
            return False
        if report.notice is not None:
            self._report.add(report.label, report.notice, time.monotonic())
        if report.code:
            self._policy.foretold(report.code)
        if report.taken:
            self._policy.took_place(name)
        if report.ended:
            self._do(self._policy.host_ended(name, time.monotonic()))
        return True

    def _on_launcher(self, launcher: LauncherLink) -> None:
        for signum in launcher.signals():
            self._on_signal(signum, is_said=False)  # that launcher says it, once for all hosts
        if launcher.is_over:
            self._selector.unregister(launcher.descriptor)
            print_message("the connection to the launcher of the job has ended, so this part of it ends")
            self._on_signal(signal.SIGHUP)

    def _close_notices(self, name: str) -> None:
        notices = self._notice_pipes.pop(name)
        self._selector.unregister(notices.reader)
        notices.close()

    def _show_report(self) -> None:
        # Of a job that ends well, what followed from the loss of a rank that was started again is over.
        ends_well = self._policy.finished and self._policy.code == 0
        for labels, text in self._report.take(self._was_signalled or ends_well):
            show(text, f"[{labels}] " if labels and self._tags else "")

    def _exited(self, name: str) -> None:
        pidfd = self._pidfds.pop(name)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        status = self._processes.pop(name).wait()
        for stream in self._streams[name]:
            stream.pump()  # its output comes before the launcher's message about its end
        spec = next(spec for spec in self._specs if spec.name == name)
        if name in self._notice_pipes:
            self._on_notices(spec)
        if name in self._notice_pipes:  # a child of it still holds the other end
            self._close_notices(name)
        if name in self._inputs:
            os.close(self._inputs.pop(name))
        self._do(self._policy.exited(name, status, time.monotonic()))
        if self._how.elastic and spec.kind is ProcessKind.MAIN:
            self._show_report()  # the others go on
            self._report.begin_anew()

    def _restart(self, name: str) -> None:
        for stream in self._streams.pop(name):
            with contextlib.suppress(KeyError):  # it was at its end already
                self._selector.unregister(stream.pipe)
            stream.close()
        self._start(next(spec for spec in self._specs if spec.name == name), again=True)

    def _on_signals(self, reader: socket.socket) -> None:
        for signum in reader.recv(64):
            self._on_signal(signum)

    def _on_signal(self, signum: int, is_said: bool = True) -> None:
        if signum in ENDING_SIGNALS:
            self._was_signalled = True
            for stream in itertools.chain(*self._streams.values()):
                stream.expect_interrupt()
        if signum in ENDING_SIGNALS or signum in USER_SIGNALS:
            actions = self._policy.signalled(signum, time.monotonic())
            self._do([action for action in actions if is_said or not isinstance(action, Say)])
        elif signum == signal.SIGKILL:  # from the launcher of the job
            self._do(self._policy.killed(time.monotonic()))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                print_message(action.text)
                continue
            if isinstance(action, Start):
                self._restart(action.name)
                continue
            for name in action.names:
                # A process keeps its id until it is reaped, and is in this table until then.
                process = self._processes[name]
                if name in self._inputs:
                    self._write_input(name, b"%d\n" % action.signum)
                    continue
                if action.signum in USER_SIGNALS:
                    process.send_signal(action.signum)
                else:
                    _signal_group(process.pid, action.signum)

        told = HostReport(code=self._policy.code, ended=self._policy.mains_over)
        if self._how.launcher is not None and told != self._told:
            self._told = told
            self._how.launcher.report(told)

    def _end_everything(self) -> None:
        """Kill the processes that are left, and those that the ranks started. Also called after an exception."""
        if self._warm is not None:
            self._warm.close()
        for process in reversed(self._processes.values()):  # ranks first, see SupervisionPolicy._kill_all
            _signal_group(process.pid, signal.SIGKILL)
        left = sweep(self._token)
        jobs.clear()
        if left:
            print_message(f"these processes could not be killed: {', '.join(map(str, left))}")
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # reported above
                process.wait(_REAP_LIMIT_S)
        for descriptor in (*self._pidfds.values(), *self._inputs.values()):
            os.close(descriptor)
        for spec in self._specs:
            if spec.name in self._notice_pipes:
                self._on_notices(spec)
        for notices in self._notice_pipes.values():
            notices.close()
        for streams in self._streams.values():
            for stream in streams:
                stream.close()


def _signal_group(group: int, signum: int) -> None:
    """Send a signal to a process and those of its group. While the process ends, no reader may be left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def _noted(signum: int, frame: object) -> None:
    """The wakeup descriptor already carries the signal to the loop."""
