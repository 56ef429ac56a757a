"""Hosted optimizers: gradients go to the communication services, which make the steps; parameters come back.

optimizer ┬ delivery                      where sums go: to the owners of their elements
          ├ stepper ┬ agreement           what ranks agree on before a step
          │         └ steps ─ states      the steps; the states that services keep of each bucket's gradients
          ├ timings ─ stepper             steps at other times
          ├ replication                   steps that other machines make as well
          └ rules                         which steps there are
restore                                   a restarted job goes on
"""
