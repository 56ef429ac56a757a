"""A division of its own for each operator of a model: FlexFlow (Jia et al., Beyond Data and Model Parallelism for Deep
Neural Networks, 2019). Pure: no torch.

    OperatorGraph ─► Strategy: degrees and devices of each operator ─► tasks ─► StepTimeline ─► search

operator_graph   operators, what they compute, read and write; from a file or from a traced module
strategy         the SOAP space: by samples, attributes and parameters, on which devices; memory
timeline         the tasks of a step for a strategy: computing, transfers, sums of gradients; and when each runs:
                 computed whole, or what a change touches
strategy_search  the fastest strategy: MCMC, or all of a small space
"""
