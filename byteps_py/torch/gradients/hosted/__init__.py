"""Hosted optimizers: gradients go to the communication services, which make the steps; parameters come back.

optimizer ┬ ../optimizer_mixin
          ├ delivery ┬ ../gradient_reducer      sums for the services, which own the states
          │          ├ states                   the states that services keep of a bucket's gradients
          │          └ sparse_rows, trust_ratios
          ├ agreement                           what ranks agree on before a step
          ├ delay                               steps that are made under the next passes
          ├ replication                         steps that other machines make as well
          └ rules                               which steps there are
in_backward_optimizer ─ optimizer, in_backward  steps under the backward pass
restore ─ stored_checkpoint, buffers            a restarted job goes on
"""
