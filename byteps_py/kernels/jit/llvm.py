"""Shared by all users of LLVM here: calls of its own functions, stores past the caches, a compiler for one function.

Knows nothing of what is compiled. Any thread. Importing this module loads LLVM, so it is imported late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

from llvmlite import binding, ir

#: Alignment, in bytes, of what goes past the caches.
LINE_BYTES = 64


def new_module(name: str) -> ir.Module:
    """An empty module for this machine."""
    module = ir.Module(name)
    module.triple = binding.get_process_triple()
    return module


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Emit a call of LLVM's function ``name`` for the vector type of ``args``: ``"floor"`` is ``llvm.floor.v8f32``."""
    vector = args[0].type
    element = {"float": "f32", "double": "f64"}.get(str(vector.element), str(vector.element))
    full_name = f"llvm.{name}.v{vector.count}{element}"
    function = builder.module.globals.get(full_name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(vector, [vector] * len(args)), full_name)
    return builder.call(function, args)


def store_past_caches(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Emit a store that bypasses the caches, to a multiple of ``LINE_BYTES``. ``end_of_stores`` must follow."""
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=LINE_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def end_of_stores(builder: ir.IRBuilder) -> None:
    """Emit the fence after stores that bypass the caches.

    Without it, such a store may become visible after the flag that tells the reader about it. On x86 that takes an
    SFENCE: LLVM's own fence may become a locked instruction, which need not order these stores.
    """
    module = builder.module
    if module.triple.startswith(("x86_64", "i686")):
        builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"), [])
    else:
        builder.fence("seq_cst")


def pause(builder: ir.IRBuilder) -> None:
    """Emit the processor's hint for a loop that polls memory until another core writes it."""
    module = builder.module
    name, arguments = "", []
    if module.triple.startswith(("x86_64", "i686")):
        name = "llvm.x86.sse2.pause"
    elif module.triple.startswith("aarch64"):
        name, arguments = "llvm.aarch64.hint", [ir.IntType(32)(1)]
    if name:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(module.globals.get(name) or ir.Function(module, kind, name), arguments)


def compile_function(function: ir.Function) -> Callable[..., None]:
    """Compile ``function``, the only one of its module; each parameter is an unsigned 64-bit integer.

    A call releases the GIL while the function runs.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(function.module)), machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * len(function.args))
    call: Any = prototype(engine.get_function_address(function.name))
    call.engine = engine  # which owns the instructions
    return cast(Callable[..., None], call)
