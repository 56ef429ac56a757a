"""Context parallelism: each rank has a part of every sequence.

head_tail          which tokens a rank has, how evenly work is spread, and the bytes that are sent
document_mask      which tokens attend to which, and what that means for a rank's tokens
sequences          cutting tensors, positions, and the mean loss over the tokens of all ranks
gathered           attention with keys and values of all ranks gathered
ring               attention with keys and values that travel from rank to rank
local_attention    attention of a rank's queries to the keys that it has

Names are imported when they are first used: masks and balance need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.context.distributed_attention import attention as attention
    from byteps_py.parallel.context.distributed_attention import ring_attention as ring_attention
    from byteps_py.parallel.context.document_mask import DocumentMask as DocumentMask
    from byteps_py.parallel.context.head_tail import ContextBalance as ContextBalance
    from byteps_py.parallel.context.head_tail import balance as balance
    from byteps_py.parallel.context.head_tail import gathered_bytes as gathered_bytes
    from byteps_py.parallel.context.sequences import positions as positions
    from byteps_py.parallel.context.sequences import shard_sequence as shard_sequence
    from byteps_py.parallel.context.sequences import token_mean_loss as token_mean_loss
    from byteps_py.parallel.context.sequences import unshard_sequence as unshard_sequence

import_lazily(__name__)
