"""LLVM's part of what is compiled in processes that train (instructions.py). Any thread.

Import loads LLVM: import late.
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


def store_past_caches(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Store at a multiple of ``LINE_BYTES``, bypassing the caches. ``end_of_stores`` must follow."""
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=LINE_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def end_of_stores(builder: ir.IRBuilder) -> None:
    """Stores that bypass the caches are not ordered with what tells the reader; on x86 locked instructions, LLVM's
    fences, need not do it."""
    module = builder.module
    if module.triple.startswith(("x86_64", "i686")):
        builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"), [])
    else:
        builder.fence("seq_cst")


def pause(builder: ir.IRBuilder) -> None:
    """Between two looks at what another processor is about to write."""
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
    """The only function of its module; it takes unsigned 64-bit numbers. Holds no GIL while it runs."""
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
