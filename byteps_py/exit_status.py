"""Exit statuses by which a service tells its launcher what to do, beyond 0 (it ended in order) and 1 (it failed)."""

from __future__ import annotations

#: The program finds its configuration unusable, its port included.
UNUSABLE_STATUS = 2
#: A summation service that was taken for dead, and is not: it can be started again (EX_TEMPFAIL).
GIVEN_UP_STATUS = 75
#: A scheduler whose journal can't be kept (EX_CONFIG): the next one could not, either.
NO_JOURNAL_STATUS = 78
