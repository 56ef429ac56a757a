"""Pipelines: a model in stages on several ranks (``bps.parallel.Pipeline``). In the order in which one reads:

program, schedules, checker, simulator    the actions of each worker in a step, as data, and their duration (pure)
schedule_search                           the shortest order for stages of different speed (pure)
split, skips, trees                       a model in stages, and the values that stages exchange
pipeline_plan, groups                     the plan on which all ranks agree, and torch's own schedules; ranks and their
                                          process groups
stage_runner, buffers                     forward and backward passes of a stage
transfers, program_runner, step_data      carries out a worker's list
weight_versions                           PipeDream and PipeDream-2BW, which change weights within a step
pipeline                                  the class
"""
