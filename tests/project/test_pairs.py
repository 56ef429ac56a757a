"""docs/reference/pairs.md says which features go together. Here each of its pairs is made, or has a test elsewhere.

A new feature adds its row or column to the page: a cell for each of the others, and its tests below.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch.utils.checkpoint import checkpoint

import byteps_py.torch as bps
from byteps_py.errors import GradientOrderError, UsageError

ROOT = Path(__file__).parents[2]
WORKS, REFUSED, OBSCURE, UNTRIED = "●", "R", "r", "–"
STEPS, SWITCH = 6, 3


def table() -> dict[str, dict[str, str]]:
    page = (ROOT / "docs" / "reference" / "pairs.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("|")]
    (_, *columns), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    wrong = [name for name, *cells in rows if len(cells) != len(columns)]
    assert not wrong, f"docs/reference/pairs.md: these rows lack pairs: {wrong}"
    return {name: dict(zip(columns, cells, strict=True)) for name, *cells in rows}


TABLE = table()

#: The tests of a row, for its pairs that are not made here.
TESTS: dict[str, tuple[str, ...]] = {
    "hosted": (
        "test_hosted.py::test_beside_the_optimizer_on_the_ranks",
        "test_hosted.py::test_process_sets",
        "test_parallel_layouts.py::test_hosted",
        "test_compression.py::test_hosted_optimizers_step_with_the_same_sums",
    ),
    "shadow": (
        "test_torch_restore.py::test_everything_comes_back",
        "test_shadow.py::test_a_job_that_is_killed_goes_on_from_its_last_step",
        "test_shadow_mesh.py::test_all_parts_go_on_from_one_step",
    ),
    "restore+shadow": (
        "test_shadow.py::test_a_job_that_is_killed_goes_on_from_its_last_step",
        "test_shadow_mesh.py::test_all_parts_go_on_from_one_step",
    ),
    "delayed": ("test_hosted.py::test_beside_the_optimizer_on_the_ranks", "test_hosted.py::test_process_sets"),
    "in_backward": (
        "test_hosted_in_backward.py::test_beside_the_optimizer_on_the_ranks",
        "test_hosted_in_backward.py::test_process_sets",
    ),
    "plain": (
        "test_join.py::test_two_epochs_of_uneven_data",
        "test_parameter_owners.py::test_a_model_that_parallelize",
        "test_compression.py::test_like_one_process",
    ),
    "crossbarrier": ("test_torch_cross_barrier_use.py::test_compiled_models_get_the_same_bits",),
    "bpsddp": ("test_torch_ddp.py::test_training_is_exact",),
    "ddp": ("test_backend_matrix.py::test_all_features",),
    "fsdp2": (
        "test_backend_matrix.py::test_all_features",
        "test_fsdp_cache.py::test_beside_plain_fsdp",
        "test_fsdp_compressed.py::test_each_codec_is_like_one_process",
    ),
    "zero": ("test_backend_matrix.py::test_all_features",),
    "shard": ("test_sharding.py::test_beside_one_process",),
    "pp": ("test_pipelines.py::test_beside_one_process", "test_parallel_layouts.py::test_compressed"),
    "chimera": ("test_pipelines.py::test_beside_one_process",),
    "tp": (
        "test_tensor_parallel.py::test_beside_the_plain_layers",
        "test_parallel_layouts.py::test_beside_one_process",
        "test_parallel_layouts.py::test_compressed",
    ),
    "sp": ("test_tensor_parallel.py::test_beside_the_plain_layers",),
    "cp": ("test_context_parallel.py::test_beside_one_process", "test_parallel_layouts.py::test_compressed"),
    "powersgd": (
        "test_powersgd.py::test_like_one_process",
        "test_powersgd.py::test_options",
        "test_powersgd.py::test_process_sets_modules_and_missing_gradients",
        "test_powersgd.py::test_cross_barrier",
        "test_powersgd.py::test_warm_up_and_rules",
        "test_powersgd.py::test_a_gradient_scaler_skips_and_goes_on",
        "test_powersgd.py::test_a_sparse_gradient_of_a_matrix_travels_as_rows",
        "test_powersgd.py::test_frozen_and_tied_parameters_and_channels_last",
        "test_powersgd.py::test_two_optimizers_and_clipping",
        "test_powersgd.py::test_factors_begin_anew_after_a_join",
        "test_powersgd.py::test_factors_and_errors_are_saved_and_loaded",
        "test_powersgd.py::test_a_state_goes_back_to_the_factors_and_errors_of_its_commit",
        "test_elastic_process.py::test_what_ranks_have_not_sent_goes_on",
        "test_parallel_layouts.py::test_compressed",
    ),
    "plain+naive": ("test_parameter_owners.py::test_a_model_that_parallelize_has_cut",),
    "hosted+naive": ("test_parameter_owners.py::test_a_model_that_parallelize_has_cut",),
    "crossbarrier+naive": ("test_parameter_owners.py::test_a_model_that_parallelize_has_cut",),
}


def test_the_page_has_words_for_every_pair() -> None:
    unknown = {(row, column): cell for row, cells in TABLE.items() for column, cell in cells.items()
               if cell not in (WORKS, REFUSED, OBSCURE, UNTRIED)}  # fmt: skip
    assert not unknown
    assert TABLE.keys() == TESTS.keys(), "docs/reference/pairs.md and TESTS have the same rows"


@pytest.mark.parametrize("row", TESTS)
def test_the_tests_of_a_row_exist(row: str) -> None:
    for name in TESTS[row]:
        file, function = name.split("::")
        assert f"\ndef {function}" in next((ROOT / "tests").rglob(file)).read_text(), f"{row}: {name} does not exist"


# ---- what works ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.checkpoints: bool | None = None  # re-entrant, or not

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpoints is None:
            return self.last(torch.tanh(self.middle(x)))
        return self.last(checkpoint(lambda x: torch.tanh(self.middle(x)), x, use_reentrant=self.checkpoints))


#: What is done to a new model, for the columns that are only that.
PREPARE: dict[str, Callable[[Net], object]] = {
    "ckpt": lambda net: setattr(net, "checkpoints", False),
    "ckpt_reentrant": lambda net: setattr(net, "checkpoints", True),
    "tied": lambda net: setattr(net.middle, "weight", net.first.weight),
    "frozen": lambda net: net.middle.requires_grad_(False),
    "thaw": lambda net: net.middle.requires_grad_(False),
}
COLUMNS = ("accum", "clip", "sched", "statedict", "ema", *PREPARE)
WRAP: dict[str, Callable[[Net, int], tuple[Any, Any]]] = {
    "plain": lambda net, passes: (net, distributed(net, passes)),
    "crossbarrier": lambda net, passes: (net, bps.CrossBarrier(net, distributed(net, passes))),
    "bpsddp": lambda net, passes: (bps.DistributedDataParallel(net), adamw(net)),
}
MADE = [(row, column) for row in WRAP for column in COLUMNS if TABLE[row][column] == WORKS]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def distributed(net: nn.Module, passes: int = 1, **how: Any) -> Any:
    return bps.DistributedOptimizer(
        adamw(net), net.named_parameters(), **({"backward_passes_per_step": passes} if passes > 1 else {}), **how
    )


def train(column: str, wrap: Callable[[Net, int], tuple[Any, Any]], ranks: list[int], of: int) -> dict[str, Any]:
    """Six steps on the batches of ``ranks``, of ``of`` ranks; what the model has then."""
    generator = torch.Generator().manual_seed(0)
    net = new_net(column)
    passes = 2 if column == "accum" else 1
    model, optimizer = wrap(net, passes)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if column == "sched" else None
    average = torch.optim.swa_utils.AveragedModel(net) if column == "ema" else None
    for step in range(STEPS):
        if step == SWITCH and column == "thaw":
            net.middle.requires_grad_(True)
        if step == SWITCH and column == "statedict":
            weights, states = net.state_dict(), optimizer.state_dict()
            net = new_net(column)
            net.load_state_dict(weights)
            model, optimizer = wrap(net, passes)
            optimizer.load_state_dict(states)
        optimizer.zero_grad()
        for last in range(passes):
            inputs = torch.randn(of, 4, 6, generator=generator, dtype=torch.float64)
            is_quiet = hasattr(model, "no_sync") and last < passes - 1
            with model.no_sync() if is_quiet else contextlib.nullcontext():
                sum(model(inputs[rank]).square().mean() / len(ranks) for rank in ranks).backward()  # type: ignore[union-attr]
        if column == "clip":
            if isinstance(model, bps.DistributedDataParallel) or not hasattr(optimizer, "synchronize"):
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            else:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        if column == "clip" and hasattr(optimizer, "skip_synchronize"):
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            if hasattr(optimizer, "finish_updates"):
                optimizer.finish_updates()
            average.update_parameters(net)
    return copy.deepcopy((net if average is None else average).state_dict())


def new_net(column: str) -> Net:
    net = Net().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    PREPARE.get(column, lambda net: None)(net)
    return net


@pytest.mark.parametrize(("row", "column"), MADE)
def test_a_pair_that_works(row: str, column: str) -> None:
    expected = train(column, lambda net, passes: (net, adamw(net)), [0, 1], 2)
    for found in ThreadedCluster((1, 1)).run(lambda rank: train(column, WRAP[row], [rank], 2)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=f"{row} {column}: {name}")


# ---- what is refused -------------------------------------------------------------------------------------------


def in_set(**how: Any) -> None:
    def main(rank: int) -> None:
        distributed(nn.Linear(2, 2), process_set=bps.add_process_set([0]), **how)

    ThreadedCluster((1, 1)).run(main)


def sparse_under_cross_barrier() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer = bps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def scaled_and_delayed() -> None:
    model = nn.Linear(2, 2)
    optimizer = distributed(model, hosted=True, delayed_update_after=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)


REFUSES: dict[tuple[str, str], tuple[Callable[[], object], str]] = {
    ("shadow", "process_set"): (
        lambda: in_set(shadow=True),
        "shadow=True does not go together with process_set",
    ),
    ("shadow", "delayed"): (
        lambda: distributed(nn.Linear(2, 2), shadow=True, delayed_update_after=1),
        "delayed_update_after does not go together with shadow=True",
    ),
    ("delayed", "in_backward"): (
        lambda: distributed(nn.Linear(2, 2), hosted=True, delayed_update_after=1, step_in_backward=True),
        "step_in_backward does not go together with delayed_update_after",
    ),
    ("delayed", "scaler"): (scaled_and_delayed, "delayed_update_after does not go together with a GradScaler"),
    ("hosted", "crossbarrier"): (
        lambda: bps.CrossBarrier(model := nn.Linear(2, 2), distributed(model, hosted=True)),
        "CrossBarrier steps on the ranks",
    ),
    ("crossbarrier", "sparse"): (sparse_under_cross_barrier, "sparse"),
    ("bpsddp", "ema"): (lambda: copy.deepcopy(bps.DistributedDataParallel(nn.Linear(2, 2))), "Copy model.module"),
}
_JOIN = "test_join.py::test_a_hosted_optimizer_says_that_it_does_not_go_together_with_join"
_OTHER_STAGES = "test_torch_optimizer_use.py::test_ranks_with_other_parameters_are_told_at_once"
_IN_ONE_ANOTHER = "test_sharded_models_refuse_sparse_gradients_and_backward_passes_in_one_another"
#: Refused pairs of rows and columns with a test of their own.
REFUSED_IN: dict[tuple[str, str], str] = {
    ("hosted", "powersgd"): "test_powersgd.py::test_refused",
    ("shadow", "powersgd"): "test_powersgd.py::test_refused",
    ("plain", "ddp"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("hosted", "ddp"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("hosted", "bpsddp"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("hosted", "shard"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("crossbarrier", "bpsddp"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("shard", "ddp"): "test_parameter_owners.py::test_a_second_wrapper_is_refused_by_name",
    ("shard", "ema"): "test_parameter_owners.py::test_torch_s_wrapper_of_a_sharded_model_is_refused",
    ("plain", "fsdp2"): "test_parameter_owners.py::test_dtensors_are_refused",
    ("hosted", "fsdp2"): "test_parameter_owners.py::test_dtensors_are_refused",
    ("bpsddp", "tp"): "test_parameter_owners.py::test_a_model_that_parallelize_has_cut",
    ("plain+naive", "tp"): "test_parameter_owners.py::test_a_model_that_parallelize_has_cut",
    ("hosted+naive", "tp"): "test_parameter_owners.py::test_a_model_that_parallelize_has_cut",
    ("crossbarrier+naive", "tp"): "test_parameter_owners.py::test_a_model_that_parallelize_has_cut",
    ("hosted", "join"): _JOIN,
    ("shadow", "join"): _JOIN,
    ("delayed", "join"): _JOIN,
    ("in_backward", "join"): _JOIN,
    ("bpsddp", "pp"): "test_pipelines.py::test_beside_one_process",  # its case refused_modules
    ("plain", "pp"): "test_pipelines.py::test_beside_one_process",  # likewise
    ("plain+naive", "pp"): _OTHER_STAGES,
    ("hosted+naive", "pp"): _OTHER_STAGES,
    ("shard", "pp"): "test_pipelines.py::test_beside_one_process",  # its program refuses it
    ("shard", "two"): "test_sharding.py::test_beside_one_process",  # its program refuses it
    ("pp", "syncbn"): "test_pipelines.py::test_beside_one_process",  # its case refused_modules
    ("hosted", "zero"): "test_parameter_owners.py::test_torch_s_zero_optimizer_is_not_hosted",
    ("shadow", "two"): "test_torch_restore.py::test_a_second_optimizer_is_not_shadowed",
    ("fsdp2", "ema"): "test_parameter_owners.py::test_fsdp2_s_own_refusals",
    ("fsdp2", "channels_last"): "test_parameter_owners.py::test_fsdp2_s_own_refusals",
    ("shard", "sparse"): f"test_parameter_owners.py::{_IN_ONE_ANOTHER}",
    ("shard", "ckpt_reentrant"): f"test_parameter_owners.py::{_IN_ONE_ANOTHER}",
}


def test_every_refused_pair_has_a_test() -> None:
    found = {(row, column) for row, cells in TABLE.items() for column, cell in cells.items() if cell == REFUSED}
    known = REFUSES.keys() | REFUSED_IN.keys()
    assert found - known == set(), "these pairs are refused in docs/reference/pairs.md: show it here"
    assert known - found == set(), "docs/reference/pairs.md says something else of these pairs"
    for name in REFUSED_IN.values():
        file, function = name.split("::")
        assert f"\ndef {function}(" in next((ROOT / "tests").rglob(file)).read_text(), name


@pytest.mark.parametrize(("row", "column"), REFUSES)
def test_a_pair_that_is_refused(row: str, column: str) -> None:
    make, text = REFUSES[row, column]
    bps.init()  # a job of one rank
    try:
        with pytest.raises((UsageError, GradientOrderError), match=text):
            make()
    finally:
        bps.shutdown()
