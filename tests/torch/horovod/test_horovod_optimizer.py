"""DistributedOptimizer with Horovod's arguments: op, predivide factor, groups, sparse_as_dense; habits of scripts."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch import nn
from torch_training import Net, assert_same, gradients, loss_of, reference, sgd, state_of, wrap

import byteps_py.torch as bps
from byteps_py.tensors import Op
from byteps_py.torch.gradients.optimizer import which_groups

MACHINES = (2, 1)
RANKS = sum(MACHINES)


def averaged(**options):
    """The gradients of one step, as synchronize() leaves them."""

    def main(rank: int):
        model = Net()
        optimizer = wrap(model, **options)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        return {name: param.grad.clone() for name, param in model.named_parameters()}

    return main


def by_parameter():
    model = Net()
    every = [gradients(model, rank, [0]) for rank in range(RANKS)]
    return dict(zip(dict(model.named_parameters()), zip(*every, strict=True), strict=True))


@pytest.mark.parametrize("op", ["Sum", "Min", "Max", "Product"])
def test_the_operation(op) -> None:
    found = ThreadedCluster(MACHINES).run(averaged(op=getattr(bps, op)))
    expected = {name: contract(parts, MACHINES, Op[op.upper()]) for name, parts in by_parameter().items()}
    assert_same(found, expected)


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.7])
@pytest.mark.parametrize("wire", [None, torch.float16])
def test_an_average_divided_before_and_after(factor, wire) -> None:
    options = {} if wire is None else {"compression": bps.Compression.fp16}
    found = ThreadedCluster(MACHINES).run(averaged(gradient_predivide_factor=factor, **options))
    expected = {}
    for name, parts in by_parameter().items():
        total = contract([(part / factor).to(wire or part.dtype) for part in parts], MACHINES)
        expected[name] = total.to(torch.float32) * (factor / RANKS)
    assert_same(found, expected)


def test_the_factor_changes_nothing_in_a_job_of_one() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(3, 1)
        optimizer = wrap(model, gradient_predivide_factor=3.0)
        model(torch.full((1, 3), 0.1)).sum().backward()
        optimizer.synchronize()
        assert torch.equal(model.weight.grad, torch.full((1, 3), 0.1))

    ThreadedCluster((1,)).run(main)


def rounds_of(**options) -> list[list[str]]:
    """The parameters of each tensor that travelled."""
    cluster = ThreadedCluster((1, 1), fusion_bytes=0)
    seen: list[list[str]] = []

    def main(rank: int):
        model = Net()
        if "pick" in options:
            options["groups"] = None
        groups = options["pick"](model) if "pick" in options else options["groups"]
        optimizer = bps.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=groups)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        if rank == 0:
            seen.extend(list(bucket.names) for bucket in optimizer._stepper.reducer.buckets)
        return state_of(model)

    assert_same(cluster.run(main), reference(sgd, 1, (1, 1)))
    assert len(cluster.rounds) == len(seen)
    return seen


def test_groups_are_what_travels_together() -> None:
    names = [name for name, _ in Net().named_parameters()]
    first_w, first_b, odd, never_w, never_b, last_w, last_b = names
    assert rounds_of(groups=2) == [[never_b, last_w, last_b], [first_w, first_b, odd, never_w]]
    assert rounds_of(groups=100) == [[name] for name in reversed(names)]
    assert rounds_of(pick=lambda m: [[m.first.weight, m.last.bias], [m.odd.weight]]) == [
        [first_w, last_b],
        [last_w],
        [never_b],
        [never_w],
        [odd],
        [first_b],
    ]


def test_a_group_of_two_kinds_is_two_tensors() -> None:
    def main(rank: int):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        params = list(model.parameters())
        optimizer = bps.DistributedOptimizer(sgd(params), model.named_parameters(), groups=[params])
        for param in params:
            param.square().sum().backward()
        optimizer.synchronize()
        assert [len(bucket.params) for bucket in optimizer._stepper.reducer.buckets] == [2, 2]
        return [torch.equal(param.grad, param * 2) for param in params]

    def alike(rank: int):
        torch.manual_seed(3)
        return main(rank)

    cluster = ThreadedCluster((1,), force_distributed=True)
    assert all(all(equal) for equal in cluster.run(alike))


def test_arguments_that_contradict_each_other() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(2, 2)
        w, b = model.weight, model.bias
        wrong = [
            ({"num_groups": 1, "groups": [[w]]}, "num_groups=1 and groups were both given"),
            ({"groups": -1}, "groups should be a non-negative integer or a list of list of torch.nn.Parameter"),
            ({"groups": [w, b]}, "groups should be a non-negative integer or a list of list"),
            ({"groups": [[w, "bias"]]}, r"groups must consist of torch.nn.parameter.Parameter, group 0 has a str"),
            ({"groups": [[w], [b, w]]}, r"A parameter can only appear once in groups: .* shape \[2, 2\], in group 1"),
            ({"groups": [[nn.Parameter(torch.ones(3))]]}, r"shape \[3\], in group 0 of groups, is not one of"),
            ({"gradient_predivide_factor": 2.0, "op": bps.Sum}, "not supported with op != Average.* op is Sum"),
            ({"gradient_predivide_factor": 0.0}, "must be a positive number, got 0.0"),
            ({"op": "sum"}, "op must be one of .*Average.*got 'sum'"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ]
        for options, message in wrong:
            with pytest.raises(ValueError, match=message):
                wrap(model, **options)
        named = [("a", w), ("a", b)]
        with pytest.raises(ValueError, match="Found duplicates: a"):
            bps.DistributedOptimizer(sgd([w, b]), named)
        with pytest.raises(ValueError, match="one or more model parameters were not named"):
            bps.DistributedOptimizer(sgd([w, b]), [("a", w)])
        with pytest.raises(ValueError, match=r"sequence of tuples \(name, parameter\)"):
            bps.DistributedOptimizer(sgd([w, b]), [w, b])

    ThreadedCluster((1,)).run(main)


def test_numbers_of_groups() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(5)]
    params[0].requires_grad_(False)
    a, b, c, d = params[1:]
    assert which_groups(0, None, params) == []
    assert which_groups(3, None, params) == which_groups(0, 3, params) == [[a, b], [c], [d]]
    assert which_groups(0, 9, params) == [[a], [b], [c], [d]]
    assert which_groups(0, [[], [d]], params) == [[d]]


def test_sparse_as_dense() -> None:
    def main(rank: int):
        model = nn.EmbeddingBag(5, 3, mode="sum", sparse=True)
        nn.init.ones_(model.weight)
        optimizer = wrap(model, sparse_as_dense=True)
        for _ in range(2):
            model(torch.tensor([[rank, 4]])).sum().backward()
            optimizer.step()
            assert model.weight.grad.layout is torch.strided
            optimizer.zero_grad()
        return model.weight.detach().clone()

    first, second = ThreadedCluster((1, 1)).run(main)
    assert torch.equal(first, second)
    expected = nn.Parameter(torch.ones(5, 3))
    optimizer = sgd([expected])
    for _ in range(2):
        expected.grad = torch.tensor([0.5, 0.5, 0, 0, 1]).unsqueeze(1).expand(5, 3).clone()
        optimizer.step()
    assert torch.equal(first, expected.detach())


def test_loading_a_state_forgets_the_gradients_on_their_way() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap(model)
        saved_model, saved = state_of(model), optimizer.state_dict()
        loss_of(model, rank, 99).backward()
        optimizer.load_state_dict(saved)
        model.load_state_dict(saved_model)
        optimizer.zero_grad()
        for step in range(3):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, 3, MACHINES))


def test_a_closed_job_leaves_the_optimizer_usable_in_the_next() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap(model)
        saved_model, saved = state_of(model), optimizer.state_dict()
        loss_of(model, rank, 99).backward()
        bps.barrier()
        bps.shutdown()
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        model.load_state_dict(saved_model)
        bps.init()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, 1, MACHINES))


def test_a_step_after_synchronize_that_does_not_say_so() -> None:
    def main(rank: int) -> list[str]:
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=1.0))
        model(torch.full((1, 1), 2.0 * rank)).sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.weight, 0.5)
        optimizer.step()
        assert model.weight.item() == pytest.approx(0.5)
        optimizer.zero_grad()
        return sorted(optimizer._parameter_names.values())

    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)") as found:
        assert ThreadedCluster((1, 1)).run(main) == [["bias", "weight"]] * 2
    assert len(found) == 2  # one of each rank


def test_the_guard_of_zero_grad() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = wrap(model)
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after loss.backward\(\)"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=True)
        assert model.weight.grad is None
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(AssertionError, match="was changed after backward"):
            optimizer.step()

    ThreadedCluster((1, 1)).run(main)


def test_a_process_set_alone() -> None:
    """Two optimizers of two sets; a rank in neither trains by itself."""

    def main(rank: int):
        pair, other = bps.add_process_set([0, 2]), bps.add_process_set([1])
        model = Net()
        optimizer = wrap(model, process_set=pair if rank in (0, 2, 3) else other, op=bps.Sum)
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    def expected(ranks):
        model = Net()
        optimizer = sgd(model.parameters())
        for step in range(2):
            by_rank = [gradients(model, rank, [step]) for rank in ranks]
            for i, param in enumerate(model.parameters()):
                param.grad = contract([grads[i] for grads in by_rank], [1] * len(ranks))
            if ranks == [3]:
                model.never.zero_grad()  # a rank by itself leaves an unused parameter without a gradient
            optimizer.step()
        return state_of(model)

    cluster = ThreadedCluster((2, 2))
    states = cluster.run(main)
    assert_same([states[0], states[2]], expected([0, 2]))
    assert_same([states[3]], expected([3]))
    used = {name for name in states[1] if "never" not in name}
    assert all(torch.equal(states[1][name], expected([1])[name]) for name in used)
    assert {name.split(".")[0] for name, _ in cluster.rounds if "Gradient" in name} == {"set1"}


def test_a_process_set_that_is_not_added() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="has not been registered"):
            wrap(nn.Linear(1, 1), process_set=bps.ProcessSet([0]))
        with pytest.raises(ValueError, match="process_set must be a ProcessSet, got None"):
            wrap(nn.Linear(1, 1), process_set=None)

    ThreadedCluster((1, 1)).run(main)
