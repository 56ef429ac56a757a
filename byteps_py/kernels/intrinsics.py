"""LLVM's own functions on vectors, by name. No state; any thread."""

from __future__ import annotations

from llvmlite import ir


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """LLVM's function ``name`` for the vector type of ``args``."""
    vector = args[0].type
    element = {"float": "f32", "double": "f64"}.get(str(vector.element), str(vector.element))
    full_name = f"llvm.{name}.v{vector.count}{element}"
    function = builder.module.globals.get(full_name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(vector, [vector] * len(args)), full_name)
    return builder.call(function, args)
