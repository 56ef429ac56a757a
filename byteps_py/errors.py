"""All errors that this package raises on purpose.

    BytePSError
    ├── ConfigurationError (ValueError)       a variable or argument is missing, malformed or contradicts another
    │   └── TopologyError                     a description of a machine's inside can't be read
    ├── JournalError                          the scheduler's journal is damaged, or belongs to another job
    ├── CheckpointError (OSError)             a folder of checkpoints can't be written, or read
    ├── UsageError (ValueError)               the calling program misuses the API
    │   ├── NotInitializedError               a call before init() or after shutdown()
    │   ├── UnsupportedError (NotImplementedError)  the operation does not exist for these arguments
    │   ├── GradientOrderError (AssertionError)  backward, synchronize, step, zero_grad out of order
    │   └── ScheduleError                     a pipeline schedule can't be carried out
    ├── PipelineError (RuntimeError)          a stage of a pipeline raised an exception; raised on every rank
    ├── NonFiniteError (FloatingPointError)   a gradient is NaN or infinite; raised on every rank
    │   └── NonFiniteInputError               an input to torch.distributed is; raised on the rank that gave it
    └── CommunicationError (RuntimeError)     the job, not this call, is at fault; Horovod's HorovodInternalError
        ├── MismatchError                     ranks disagree about a tensor
        ├── StallError (TimeoutError)         a deadline passed while waiting for ranks
        ├── JoinedError (also a UsageError)   an operation needs every rank, and some have joined
        ├── RendezvousError                   the processes of the cluster did not find each other
        ├── PeerLostError                     a process of the job died or left
        ├── DismissedError                    this machine was told to leave an elastic job, which goes on without it
        ├── ProtocolError                     a peer sent a message that it must not send
        └── IntegrityError                    a message arrived damaged twice

A message says what happened, to which tensor and ranks, and what to do about it. The last paragraph of a class's
docstring, "Remedy: …", says what helps in general; docs/reference/errors.md is made of them. Pure; any thread.
"""

#: Those that ``byteps_py`` has, too.
__all__ = [
    "BytePSError",
    "CommunicationError",
    "ConfigurationError",
    "GradientOrderError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JoinedError",
    "MismatchError",
    "NonFiniteError",
    "NonFiniteInputError",
    "NotInitializedError",
    "PeerLostError",
    "ProtocolError",
    "RendezvousError",
    "StallError",
    "UnsupportedError",
    "UsageError",
]


class BytePSError(Exception):
    """The base class of all errors of this package.

    Remedy: catch one of its subclasses; this class itself only to tell errors of this package from all others.
    """


class ConfigurationError(BytePSError, ValueError):
    """A variable or an argument is missing, malformed or contradicts another.

    Remedy: correct the variable that the message names. `bps env` lists all of them, with the values that they take.
    """


class TopologyError(ConfigurationError):
    """A topology file, or what a system says of a machine's inside, is damaged, or contradicts itself.

    Remedy: correct the line that the message names. NCCL writes such a file of the machine on which it runs, with
    NCCL_TOPO_DUMP_FILE.
    """


class JournalError(BytePSError):
    """A scheduler can't continue from its journal: it is damaged, or was written by another job or version.

    Remedy: remove the journal that the message names, or give the job another path, and start the job anew.
    """


class CheckpointError(BytePSError, OSError):
    """A checkpoint can't be written, or read: the disk is full, a file is damaged, or the folder can't be used.

    Remedy: make room, or give a folder that all ranks reach; load the older checkpoint that the message names.
    """


class UsageError(BytePSError, ValueError):
    """The calling program misuses the API.

    Remedy: correct the call. The traceback ends at it, and the message names both values that do not go together.
    """


class NotInitializedError(UsageError):
    """An API function was called before ``init()`` or after ``shutdown()``.

    Remedy: call ``bps.init()`` first, once in each process; move the call before ``shutdown()``.
    """


class UnsupportedError(UsageError, NotImplementedError):
    """The operation does not exist for these arguments.

    It is also a RuntimeError (as every NotImplementedError is), which Horovod's users catch here.

    Remedy: use the operation, dtype or device that the message offers instead.
    """


class GradientOrderError(UsageError, AssertionError):
    """Calls of backward, synchronize, step and zero_grad came in an order that would lose a gradient.

    It is also an AssertionError, which Horovod's users catch here.

    Remedy: call ``backward()``, ``step()`` and ``zero_grad()`` in this order; with several backward passes in a step,
    say so in ``backward_passes_per_step``.
    """


class ScheduleError(UsageError):
    """A pipeline schedule can't be carried out: an action is missing or misplaced, or workers wait for each other.

    Remedy: use a schedule of `bps schedule`, or correct the action that the message names in your own.
    """


class PipelineError(BytePSError, RuntimeError):
    """A stage of a pipeline raised an exception. Raised on every rank of the pipeline, which may go on with another
    step.

    Remedy: correct what raised the exception: the message names the rank, and has its text.
    """


class NonFiniteError(BytePSError, FloatingPointError):
    """A gradient is NaN or infinite on some rank, and BYTEPS_NONFINITE is ``raise``.

    Every rank raises this error in the same step.

    Remedy: look at the parameters and ranks that the message names. With loss scaling, set BYTEPS_NONFINITE to
    ``allow`` or ``skip``.
    """


class NonFiniteInputError(NonFiniteError):
    """A rank gave NaN or infinity to a sum of torch.distributed, and BYTEPS_NONFINITE is ``raise``.

    Only that rank raises this error; the others raise an error with its message when that rank ends.

    Remedy: as for NonFiniteError.
    """


class CommunicationError(BytePSError, RuntimeError):
    """A reduction can't be completed, for a reason outside the call that raises this error.

    Remedy: that of its subclass. Elastic training catches it, and goes on from the last commit.
    """


#: Horovod's name. After this error, elastic training returns to its last commit.
HorovodInternalError = CommunicationError


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """Not a failure: hosts have come or are about to leave, and the ranks must form a new group.

    ``skip_sync`` is True if hosts only left. Then the remaining ranks have equal states already.

    Remedy: none is needed inside of ``elastic.run``, which catches it.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync


class MismatchError(CommunicationError):
    """Ranks gave different shapes, dtypes, operations or numbers under one name.

    Remedy: make all ranks call the same: the message says which ranks gave what. Give calls names where their order
    differs between ranks.
    """


class StallError(CommunicationError, TimeoutError):
    """A deadline passed while waiting for other ranks.

    Remedy: see what the ranks that the message names do instead: their Python stacks are in the log. Where they are
    right to take so long, raise BYTEPS_STALL_LIMIT_S.
    """


class JoinedError(UsageError, CommunicationError):
    """An operation needs every rank, and some have joined: they have no more data (``join()``).

    It is both a UsageError, since the calling program caused it, and a CommunicationError, since Horovod's users expect
    HorovodInternalError.

    Remedy: make such operations before a rank calls ``join()``, or after all ranks have.
    """


class RendezvousError(CommunicationError):
    """The processes of a cluster did not find each other in time, or have contradictory settings.

    Remedy: start the processes that the message misses, with the scheduler's address and the same secret; where
    machines start slowly, raise BYTEPS_START_TIMEOUT_S.
    """


class PeerLostError(CommunicationError):
    """A process of the job died, froze or left while others still needed it.

    Remedy: look at that process's own error, which the launcher prints last, or at its machine's kernel log if it was
    killed. With ``shadow=True`` the restarted job goes on from its last step.
    """


class DismissedError(CommunicationError):
    """This machine was told to leave an elastic job (SIGTERM); the others go on without its ranks.

    Remedy: none is needed: it is how the machine leaves.
    """


class ProtocolError(CommunicationError):
    """A peer sent a message that breaks the protocol.

    Remedy: run the same version of byteps_py on all machines. With the same version it is a bug: report it.
    """


class IntegrityError(CommunicationError):
    """A message arrived damaged, and so did its repetition: the network or memory alters data.

    Remedy: check the memory and the network cards of the two machines that the message names.
    """


#: Errors that keep their type when they cross a process boundary as text.
BY_NAME: dict[str, type[BytePSError]] = {
    cls.__name__: cls
    for cls in (
        ConfigurationError,
        UsageError,
        CommunicationError,
        MismatchError,
        StallError,
        JoinedError,
        RendezvousError,
        PeerLostError,
        DismissedError,
        ProtocolError,
        IntegrityError,
    )
}


def from_name(name: str, message: str) -> BytePSError:
    """The error that another process reported as (type name, message); a CommunicationError if the name is unknown."""
    return BY_NAME.get(name, CommunicationError)(message)
