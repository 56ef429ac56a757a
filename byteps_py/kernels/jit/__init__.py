"""Code that is compiled when it is needed: reduction kernels by numba, and single functions by LLVM alone.

This package owns the LLVM instructions of every kernel and the compilers that turn them into functions. It must not
know tensors' names, ranks or sockets. ``numba_kernels``, ``llvm`` and the modules that emit instructions load a
compiler when they are imported, so they are imported late; ``background`` and ``streaming`` load none.
"""
