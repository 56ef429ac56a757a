"""Context parallelism: each rank has a part of every sequence.

head_tail, sequences    which tokens a rank has; cutting tensors, and positions
document_mask, spans    which tokens attend to which, and what that means for a rank's tokens
gathered                attention with keys and values of all ranks gathered
ring                    attention with keys and values that travel from rank to rank
token_loss              the mean over the tokens of all ranks
balance                 how evenly a batch is spread, and the bytes that are sent

Functions that need torch are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import importer
from byteps_py.parallel.context.balance import ContextBalance, balance, gathered_bytes
from byteps_py.parallel.context.document_mask import DocumentMask

if TYPE_CHECKING:
    from byteps_py.parallel.context.gathered import attention
    from byteps_py.parallel.context.ring import ring_attention
    from byteps_py.parallel.context.sequences import positions, shard_sequence, unshard_sequence
    from byteps_py.parallel.context.token_loss import token_mean_loss

_HOMES = {
    "attention": "gathered",
    "positions": "sequences",
    "ring_attention": "ring",
    "shard_sequence": "sequences",
    "token_mean_loss": "token_loss",
    "unshard_sequence": "sequences",
}

__all__ = [
    "ContextBalance",
    "DocumentMask",
    "attention",
    "balance",
    "gathered_bytes",
    "positions",
    "ring_attention",
    "shard_sequence",
    "token_mean_loss",
    "unshard_sequence",
]


__getattr__ = importer(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
