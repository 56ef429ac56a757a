"""Finds fused linear layers (q, k and v in one, gate and up in one) that a plan would cut in the wrong places.

Such a layer has its parts one behind the other. Cut by rows like a plain one, the first rank gets all of the first
part, and all shapes still fit: only numbers are wrong. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.tensor.shard import Blocks
from byteps_py.parallel.tensor.styles import Column, Row

#: Last parts of the names of fused layers, in lower case.
_FUSED = re.compile(
    r"q_?k_?v|(^|_)w?(kv|qk)(_|$)|query_?key|key_?value|c_attn|att_proj|ff_proj|in_proj|w_?pack|glu|fused"
    r"|gate_?(and_?)?up|up_?(and_?)?gate|(^|_)w(12|13|31|21)$|(^|_)(fc|linear)(12|1_?gate)$"
)
#: Names that say nothing: then that of the module around them counts.
_BARE = re.compile(r"linear|proj|dense|layer|base_layer|fc|\d+")

_REMEDY = (
    "cut by rows, the first rank would get all of its first part. Say how it is made: Column(parts=2) for two equal "
    "parts one behind the other (gate and up), Column(parts=(heads, kv_heads, kv_heads)) for q, k and v one behind the "
    "other (GPT-2, Phi-3, Wqkv), Column(parts=1, units=kv_heads) if q, k and v of each key head lie together "
    "(Megatron-LM, GPT-NeoX), or Column(parts=1) if it is not fused"
)


def check_fused(name: str, linear: nn.Linear, linears: Mapping[str, tuple[nn.Linear, Column | Row]]) -> None:
    """Raises UsageError if the layer ``name`` looks fused, but its style does not say how. ``linears``: all layers with
    the styles Column and Row, in the order of the model."""
    _, style = linears[name]
    if style.parts is not None:
        return
    if isinstance(style, Row):
        widths = [_widest(other, column) for other, column in _beside(name, linears, Column).values()]
        if widths and linear.in_features > max(widths):
            raise UsageError(
                f"{name} has {linear.in_features} input features, more than any Column beside it has output features: "
                "if its input is what several of them computed, one behind the other, give their sizes, Row(parts=…); "
                "if not, Row(parts=1)"
            )
        return
    if style.vocabulary or style.gather_output:
        return
    own, around = [*name.lower().split(".")[::-1], "", ""][:2]
    if _FUSED.search(own) or (_BARE.fullmatch(own) and _FUSED.search(around)):
        raise UsageError(f"{name} has the name of a fused layer: {_REMEDY}")
    after = list(linears)[list(linears).index(name) + 1 :]
    rows = _beside(name, {each: linears[each] for each in after}, Row)
    widths = [other.in_features for other, _ in rows.values()]
    if widths and linear.out_features not in widths and linear.out_features > min(widths):
        narrow = min(rows, key=lambda one: rows[one][0].in_features)
        raise UsageError(
            f"{name} has {linear.out_features} output features, but {narrow} takes {min(widths)}; "
            f"it looks like a fused layer: {_REMEDY}"
        )


def _widest(linear: nn.Linear, style: Column | Row) -> int:
    blocks = Blocks.of(linear.out_features, style.units if isinstance(style, Column) else None, style.parts)
    return max(blocks.counts) * blocks.size


def _beside(
    name: str, linears: Mapping[str, tuple[nn.Linear, Column | Row]], kind: type
) -> dict[str, tuple[nn.Linear, Column | Row]]:
    """The layers of this kind in the same module, or else in the module around it or below that."""
    parent = name.rpartition(".")[0]
    for scope, depth in ((parent, 1), (parent.rpartition(".")[0], 2)):
        prefix = f"{scope}." if scope else ""
        found = {
            other: (linear, style)
            for other, (linear, style) in linears.items()
            if isinstance(style, kind)
            and not (isinstance(style, Column) and (style.gather_output or style.vocabulary))
            and other.startswith(prefix)
            and other.removeprefix(prefix).count(".") < depth
        }
        if found or not parent:
            return found
    return {}
