"""Averages of gradients over the copies of a part of a model, ``mesh.gradient_group``, that travel compressed.

What a machine keeps for its codecs belongs to this group: ranks of one machine with other parts have their own. One
thread uses it; hooks run on autograd's.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import nn

from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.parameter_owners import announce_averaging, check_unowned
from byteps_py.torch.compression import CompressionArgument, check_low_rank, choice_of, codec_for
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.optimizer import check_hosted_compression
from byteps_py.torch.gradients.hosted.states_mode import asked_for
from byteps_py.torch.operations.handles import kind_in_group

_CALLER = "parallelize_model with compression"


def check_compression(
    model: nn.Module, compression: CompressionArgument, hosted: bool | str = False, shadow: bool = False
) -> None:
    """Raises UsageError for a compression that is none, or that a parameter or a hosted optimizer can't have, and if
    something else averages gradients already; NotInitializedError before init()."""
    named, choice, settings = list(model.named_parameters()), choice_of(compression), contexts.current().settings
    for name, parameter in named:
        chosen = choice.of(name, parameter)
        check_low_rank(chosen, name, parameter, settings)
        codec_for(chosen, parameter.dtype, 0, name, settings)
    if hosted is not False or shadow:
        check_hosted_compression(choice, named, asked_for(hosted or True), shadow)
    check_unowned(named, _CALLER)


class CompressedAverages:
    """Of the gradients of ``module`` over the ranks of ``copies``, which all make it. ``passes``: backward passes of a
    step. Without a pipeline gradients are sent as the last one computes them."""

    def __init__(
        self, module: nn.Module | Pipeline, copies: dist.ProcessGroup, compression: CompressionArgument, passes: int
    ) -> None:
        context, named = contexts.current(), list(module.named_parameters())
        ranks = sorted(dist.get_process_group_ranks(copies))
        group = () if len(ranks) == context.session.size else tuple(ranks)
        prefix = f"{kind_in_group(group, 'Gradient')}."
        options = GradientOptions(choice_of(compression), group=group, prefix=prefix, caller=_CALLER)
        self._reducer = GradientReducer(context, named, options)
        if isinstance(module, Pipeline):  # knows itself when it is done with a gradient
            return
        announce_averaging(self, _CALLER, [parameter for _, parameter in named])
        self._reducer.passes_per_step = passes
        for _, parameter in named:
            if parameter.requires_grad:
                ready = functools.partial(self._reducer.ready, self._reducer.place(parameter))
                parameter.register_post_accumulate_grad_hook(ready)

    def finish(self) -> None:
        """After the last backward pass: put the averages into ``p.grad``. All copies call it."""
        self._reducer.finish()
        self._reducer.skip_step()
