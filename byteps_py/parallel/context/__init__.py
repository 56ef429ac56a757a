"""Context parallelism: each rank has a part of every sequence.

head_tail              which tokens a rank has, how evenly work is spread, and the bytes that are sent
document_mask          which tokens attend to which, and what that means for a rank's tokens
sequences              cutting tensors, positions, and the mean loss over the tokens of all ranks
distributed_attention  attention with keys and values of all ranks gathered, or that travel from rank to rank
local_attention        attention of a rank's queries to the keys that it has

Names are imported when they are first used: masks and balance need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.context.distributed_attention import (
        attention as attention,
        ring_attention as ring_attention,
    )
    from byteps_py.parallel.context.document_mask import DocumentMask as DocumentMask
    from byteps_py.parallel.context.head_tail import (
        ContextBalance as ContextBalance,
        balance as balance,
        gathered_bytes as gathered_bytes,
    )
    from byteps_py.parallel.context.sequences import (
        positions as positions,
        shard_sequence as shard_sequence,
        token_mean_loss as token_mean_loss,
        unshard_sequence as unshard_sequence,
    )

import_lazily(__name__)
