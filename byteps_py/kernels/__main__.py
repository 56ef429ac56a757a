"""``python -m byteps_py.kernels``: compile every kernel into the cache on disk. The build of the images runs this.

The exit status is 1 if compiled kernels can't be cached: every process would then compile its own.
"""

from __future__ import annotations

import sys

from byteps_py.kernels.jit.numba_kernels import kept_in
from byteps_py.kernels.reduction import prepare_all


def main() -> int:
    kernels = prepare_all()
    unkept = [kernel for kernel in kernels if not kept_in(kernel)]
    if unkept:
        print(
            f"{len(unkept)} of {len(kernels)} kernels are compiled, but can't be kept: set NUMBA_CACHE_DIR to a "
            "writable folder",
            file=sys.stderr,
        )
        return 1
    print(f"{len(kernels)} kernels are compiled, and kept in {kept_in(kernels[0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
