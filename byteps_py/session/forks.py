"""Has this process been forked since? A child is a copy of its rank, which alone may communicate. Any thread."""

from __future__ import annotations

import os

count = 0  # in this process's ancestry since this module was loaded; asking the kernel for the pid costs more


def _count() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_count)
