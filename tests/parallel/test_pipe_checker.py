"""The checker refuses programs that can't be carried out, and no others."""

from __future__ import annotations

import graphlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from byteps_py.errors import ScheduleError
from byteps_py.parallel.pipe.checker import check
from byteps_py.parallel.pipe.program import Action, ActionKind, Program, backward, forward
from byteps_py.parallel.pipe.schedules import (
    More,
    chimera,
    dapple,
    gems,
    gpipe,
    interleaved,
    make,
    one_forward_one_backward_in_rounds,
    pipedream,
    pipedream_2bw,
)
from byteps_py.parallel.pipe.simulator import Durations, simulate
from byteps_py.tools.schedule_chart import text_chart

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741


def split_backwards(program: Program, delay: int) -> Program:
    """The same program with the gradients of input and weights apart. The latter come ``delay`` backward passes
    later."""

    def split(actions: tuple[Action, ...]) -> Iterator[Action]:
        waiting: list[Action] = []
        for action in actions:
            if action.kind is not B:
                yield action
                continue
            yield action._replace(kind=I)
            waiting.append(action._replace(kind=W))
            if len(waiting) > delay:
                yield waiting.pop(0)
        yield from waiting

    return replace(program, workers=tuple(tuple(split(actions)) for actions in program.workers), warmup=())


RIGHT = {
    "gpipe": gpipe(4, 4),
    "dapple A": dapple(4, 6),
    "dapple B": make("dapple", 3, 6, warmup="B"),
    "interleaved": interleaved(3, 6, chunks=2),
    "interleaved, 6 consecutive": interleaved(3, 6, chunks=2, consecutive=6),
    "chimera": chimera(4, 4),
    "chimera, 4 pipes": chimera(4, 4, pipes=4),
    "chimera, direct": chimera(4, 8),
    "chimera, doubling": chimera(4, 8, more=More.DOUBLING),
    "chimera, halving": chimera(4, 4, more=More.HALVING),
    "gems": gems(4, 3),
    "pipedream": pipedream(4, 5),
    "pipedream-2bw": pipedream_2bw(3, 5),
    "dapple, split": split_backwards(dapple(4, 6), delay=1),
    "chimera, split": split_backwards(chimera(4, 4), delay=2),
    "interleaved, split": split_backwards(interleaved(2, 4, chunks=2), delay=0),
}

# ---- mutations -------------------------------------------------------------------------------------------------

Lists = list[list[Action]]


def drop(lists: Lists, choose: random.Random) -> None:
    actions = choose.choice(lists)
    del actions[choose.randrange(len(actions))]


def double(lists: Lists, choose: random.Random) -> None:
    actions = choose.choice(lists)
    actions.insert(choose.randrange(len(actions) + 1), choose.choice(actions))


def swap(lists: Lists, choose: random.Random) -> None:
    actions = choose.choice(lists)
    left, right = choose.sample(range(len(actions)), 2)
    actions[left], actions[right] = actions[right], actions[left]


def move_to_another_worker(lists: Lists, choose: random.Random) -> None:
    source, target = choose.sample(lists, 2)
    target.insert(choose.randrange(len(target) + 1), source.pop(choose.randrange(len(source))))


def move_in_list(lists: Lists, choose: random.Random) -> None:
    actions = choose.choice(lists)
    action = actions.pop(choose.randrange(len(actions)))
    actions.insert(choose.randrange(len(actions) + 1), action)


MUTATIONS = (drop, double, swap, move_to_another_worker, move_in_list)
#: Mutants of each program and mutation.
SEEDS = range(40)


def mutant(program: Program, mutation: object, seed: int) -> Program:
    lists = [list(actions) for actions in program.workers]
    mutation(lists, random.Random(seed))
    return replace(program, workers=tuple(map(tuple, lists)))


# ---- the oracle ------------------------------------------------------------------------------------------------


def works(program: Program, right: Program) -> bool:
    """Whether each worker has the actions of the right program, in an order without a circle."""
    if list(map(Counter, program.workers)) != list(map(Counter, right.workers)):
        return False
    graph: dict[object, set[object]] = {}
    last = len(program.holders[0]) - 1
    for actions in program.workers:
        for before, action in zip((None, *actions), actions, strict=False):
            graph.setdefault(action, set()).update([before] if before else [])
            for part in action.parts:  # an action stands for its results, and these for it
                results = {
                    (kind, action.pipe, action.stage, part) for kind in ((I, W) if action.kind is B else (action.kind,))
                }
                for result in results:
                    graph.setdefault(result, set()).add(action)
                graph[action] |= needs(action, part, last)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def needs(action: Action, part: int, last: int) -> set[object]:
    kind, pipe, stage, _ = action
    if kind is F:
        return {(F, pipe, stage - 1, part)} if stage else set()
    if kind is W:
        return {(I, pipe, stage, part)}
    return {(F, pipe, stage, part)} | ({(I, pipe, stage + 1, part)} if stage < last else set())


def refusal(program: Program) -> str:
    """The checker's message; empty if it accepts the program."""
    try:
        check(program)
    except ScheduleError as error:
        return str(error)
    return ""


def test_the_checker_agrees_with_the_oracle() -> None:
    refused: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for name, program in RIGHT.items():
        for mutation in MUTATIONS:
            for seed in SEEDS:
                changed = mutant(program, mutation, seed)
                case = f"{name}, {mutation.__name__}, seed {seed}"
                if works(changed, program):
                    assert refusal(changed) == "", case
                    accepted[mutation.__name__] += 1
                else:
                    assert "worker" in refusal(changed), case
                    refused[mutation.__name__] += 1
    each = len(RIGHT) * len(SEEDS)
    assert refused["drop"] == refused["double"] == refused["move_to_another_worker"] == each
    assert refused.total() >= 2000
    assert min(accepted["swap"], accepted["move_in_list"]) >= 20  # so the checker is not merely strict
    assert min(refused["swap"], refused["move_in_list"]) >= 200


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(name: str) -> None:
    assert works(RIGHT[name], RIGHT[name])
    check(RIGHT[name])


# ---- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consecutive", [2, 3])
def test_too_few_consecutive_micro_batches_deadlock(consecutive: int) -> None:
    """The message names a worker, its action and what it waits for."""
    with pytest.raises(ScheduleError) as caught:
        check(one_forward_one_backward_in_rounds(4, 8, 2, consecutive))
    assert {
        2: "deadlock: worker 0, action 7 (forward of part 3 at stage 4 of pipe 0) waits for the forward of part 3 at "
        "stage 3 of pipe 0 on worker 3, which never comes; worker 1 waits in action 8 for the forward of part 3 at "
        "stage 4 of pipe 0 on worker 0; ",
        3: "deadlock: worker 0, action 21 (forward of part 7 at stage 4 of pipe 0) waits for the forward of part 7 at "
        "stage 3 of pipe 0 on worker 3, which never comes; worker 1 waits in action 23 ",
    }[consecutive] in str(caught.value)


def two_stages(*workers: list[Action]) -> Program:
    return Program("two stages", tuple(map(tuple, workers)), ((0, 1),), 2)


FIRST = [forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]
SECOND = [forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1)]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([FIRST, SECOND[:3]], "worker 1: the input gradient of part 1 at stage 1 of pipe 0 is missing"),
        ([FIRST[:2], SECOND[:1]], "worker 0: the input gradient of part 0 at stage 0 of pipe 0 is missing"),
        ([[], SECOND], "worker 0: the forward of part 0 at stage 0 of pipe 0 is missing"),
        ([[], []], "no worker has an action of part 0"),
        (
            [[*FIRST, forward(0, 0)], SECOND],
            "worker 0, action 4 (forward of part 0 at stage 0 of pipe 0): it is there twice, or with another action "
            "that includes it",
        ),
        (
            [FIRST, [*SECOND, Action(W, 0, 1, (0,))]],
            "worker 1, action 4 (weight gradient of part 0 at stage 1 of pipe 0): it is there twice, or with another",
        ),
        (
            [[*FIRST, forward(1, 1)], SECOND],
            "worker 0, action 4 (forward of part 1 at stage 1 of pipe 0): worker 1 holds this stage",
        ),
        ([[forward(2, 0)], []], "worker 0, action 0 (forward of part 0 at stage 2 of pipe 0): there is no such stage"),
        ([[forward(0, 0, pipe=1)], []], "(forward of part 0 at stage 0 of pipe 1): there is no such stage"),
        ([[forward(-1, 0)], []], "there is no such stage"),
        ([[forward(0, 2)], []], "worker 0, action 0 (forward of part 2 at stage 0 of pipe 0): the step has 2 parts"),
        ([[Action(F, 0, 0, ())], []], "at stage 0 of pipe 0): it has no part"),
        (
            [[backward(0, 0), *FIRST[:2], FIRST[3]], SECOND],
            "deadlock: worker 0, action 0 (backward of part 0 at stage 0 of pipe 0) waits for the forward of part 0 at "
            "stage 0 of pipe 0 on worker 0, which never comes; worker 1 waits in action 0 for the forward of part 0 at "
            "stage 0 of pipe 0 on worker 0",
        ),
    ],
)
def test_messages(workers: list[list[Action]], message: str) -> None:
    check(two_stages(FIRST, SECOND))
    with pytest.raises(ScheduleError) as caught:
        check(two_stages(*workers))
    assert message in str(caught.value)


def test_a_part_goes_through_one_pipe() -> None:
    lists = [list(actions) for actions in gems(2, 2).workers]
    lists[0].append(forward(0, 1, pipe=0))
    with pytest.raises(ScheduleError, match=r"worker 0, action 4 .*: part 1 goes through pipe 1, too"):
        check(replace(gems(2, 2), workers=tuple(map(tuple, lists))))


def test_the_simulator_refuses_what_the_checker_refuses() -> None:
    with pytest.raises(ScheduleError, match="is missing"):
        simulate(two_stages(FIRST, SECOND[:3]))


# ---- backward passes in two halves -----------------------------------------------------------------------------


def test_split_backward_passes_shorten_the_pipeline() -> None:
    """The next stage waits for the input's gradient only; weights' gradients fill the bubble (zero bubble, H1)."""
    whole, split = dapple(2, 2), split_backwards(dapple(2, 2), delay=0)
    assert simulate(whole).makespan == 9
    timeline = simulate(split)
    assert timeline.makespan == 8
    assert timeline.busy == [6, 6]
    assert text_chart(timeline).splitlines()[1:] == [
        "worker 0   F0 F1 .. I0 W0 .. I1 W1",
        "worker 1   .. F0 I0 W0 F1 I1 W1 ..",
    ]
    assert split.peak_in_flight() == whole.peak_in_flight()


def test_the_share_of_the_input_gradient() -> None:
    timeline = simulate(split_backwards(gpipe(1, 1), delay=0), Durations(backward=4, input_gradient_share=0.25))
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 2), (2, 5)]


def test_activations_live_until_the_weight_gradient() -> None:
    assert split_backwards(dapple(3, 6), delay=2).peak_in_flight() == [5, 4, 3]


def test_a_weight_gradient_needs_its_input_gradient() -> None:
    order = (forward(0, 0), Action(W, 0, 0, (0,)), Action(I, 0, 0, (0,)))
    message = r"action 1 \(weight gradient .*\) waits for the input gradient of part 0 at stage 0"
    with pytest.raises(ScheduleError, match=message):
        check(Program("mine", (order,), ((0,),), 1))
