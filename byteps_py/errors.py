"""Every error this package raises on purpose.

    BytePSError
    ├── ConfigurationError (ValueError)       a variable or argument is missing, malformed or contradicts another
    ├── JournalError                          the scheduler's journal is damaged, or another's
    ├── UsageError (ValueError)               the calling program misuses the API
    │   ├── NotInitializedError               used before init() or after shutdown()
    │   ├── UnsupportedError (NotImplementedError)  the operation does not exist for these arguments
    │   └── GradientOrderError (AssertionError)  backward, synchronize, step, zero_grad out of order
    ├── NonFiniteError (FloatingPointError)   a gradient is NaN or infinite; on every rank
    │   └── NonFiniteInputError               what a rank gives to torch.distributed is; on that rank
    └── CommunicationError (RuntimeError)     the job, not this call, is at fault; Horovod's HorovodInternalError
        ├── MismatchError                     ranks disagree about a tensor
        ├── StallError (TimeoutError)         a deadline passed while waiting for ranks
        ├── JoinedError (also a UsageError)   an operation needs every rank, and some have joined
        ├── RendezvousError                   the cluster did not come together
        ├── PeerLostError                     a process of the job died or left
        ├── DismissedError                    this machine was told to leave an elastic job, which goes on without it
        ├── ProtocolError                     a peer sent something it must not
        └── IntegrityError                    what was sent came damaged, twice

A message says what happened, to which tensor and ranks, and what to do about it.
"""


class BytePSError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(BytePSError, ValueError):
    """A variable or an argument is missing, malformed or contradicts another."""


class JournalError(BytePSError):
    """The scheduler's journal can't be gone on with: it is damaged, another's, or another version's."""


class UsageError(BytePSError, ValueError):
    """The calling program misuses the API."""


class NotInitializedError(UsageError):
    """An API function was called before ``init()`` or after ``shutdown()``."""


class UnsupportedError(UsageError, NotImplementedError):
    """An operation was asked for that does not exist for these arguments.

    Also a RuntimeError: that is what Horovod's users catch here.
    """


class GradientOrderError(UsageError, AssertionError):
    """Calls of backward, synchronize, step and zero_grad came in an order that would lose a gradient.

    Also an AssertionError: that is what Horovod's users catch here.
    """


class NonFiniteError(BytePSError, FloatingPointError):
    """A gradient is NaN or infinite on some rank, and BYTEPS_NONFINITE=raise. Every rank raises it in the same step."""


class NonFiniteInputError(NonFiniteError):
    """A rank gives NaN or infinity to a sum of torch.distributed, and BYTEPS_NONFINITE=raise. Only that rank raises it;
    the others raise its words when it ends."""


class CommunicationError(BytePSError, RuntimeError):
    """A reduction can't be completed, for a reason outside the call that reports it."""


#: Horovod's name for it: what elastic training goes back to its last commit after.
HorovodInternalError = CommunicationError


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """Not a failure: hosts came or are about to go, and the job must be joined again.

    skip_sync: hosts only went, so that the ranks that stay are equal already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync


class MismatchError(CommunicationError):
    """Ranks gave different shapes, dtypes or operations under one name."""


class StallError(CommunicationError, TimeoutError):
    """A deadline passed while waiting for other ranks."""


class JoinedError(UsageError, CommunicationError):
    """An operation needs every rank, and some have joined: they have no more data (``join()``).

    Both: it is the calling program's doing, and reported by the job, where Horovod's users expect HorovodInternalError.
    """


class RendezvousError(CommunicationError):
    """The processes of a cluster did not find each other in time, or contradict each other."""


class PeerLostError(CommunicationError):
    """A process of the job died, froze or left while others still needed it."""


class DismissedError(CommunicationError):
    """This machine was told to leave an elastic job (SIGTERM); the others go on without its ranks."""


class ProtocolError(CommunicationError):
    """A peer sent a message that breaks the protocol."""


class IntegrityError(CommunicationError):
    """A message came damaged, and so did its repetition: the network, or memory, changes what passes through."""


#: What crosses a process border as text comes back as its own type.
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
    """The error that a peer process reported as (type name, message)."""
    return BY_NAME.get(name, CommunicationError)(message)
