"""Hosted optimizers: gradients go to the communication services, which make the steps; parameters come back.

optimizer ┬ delivery                      where sums go: to the owners of their elements
          ├ stepper ┬ agreement           what ranks agree on before a step
          │         └ steps ┬ bucket_states ─ states     the states that services keep of each bucket's gradients
          │                 └ sparse_rows, trust_ratios  what ranks do of a step themselves
          ├ delay, in_backward ─ stepper  steps at other times
          ├ replication                   steps that other machines make as well
          └ rules                         which steps there are
restore ─ stored_checkpoint, buffers      a restarted job goes on
"""
