"""Multimodal pipelines on real processes beside the same training in one process. Arguments: the number of
data-parallel copies, and the names of cases. Prints "NAME: right" on each rank."""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from multimodal import LENGTH, LETTERS, SIDE, VisionTransformer, freeze, text_model

from byteps_py.errors import PipelineError, UsageError
from byteps_py.parallel import MicroBatches, checkpoint
from byteps_py.parallel.multimodal import EncoderPlacement, MultimodalModel, MultimodalPipeline

CLOSE = 1e-12
WIDTH = 8
#: Stages of frozen layers alone: one before all layers that attend to images, and one between them.
CUTS = {4: ["2", "3", "5"]}
PLACEMENTS = [each.value for each in EncoderPlacement]
generator = torch.Generator(torch.get_default_device())


def workers() -> int:
    return dist.get_world_size() // COPIES


def mesh() -> Any:
    return init_device_mesh(torch.get_default_device().type, (COPIES, workers()), mesh_dim_names=("dp", "pp"))


def own(batch: torch.Tensor) -> torch.Tensor:
    """The part of this data-parallel copy."""
    return batch.chunk(COPIES)[dist.get_rank() // workers()]


def new_model(
    stages: int, encoder: Callable[[], nn.Module] = lambda: VisionTransformer(WIDTH, 1, 2)
) -> MultimodalModel:
    """Eight layers: embedding, frozen, attending, frozen, frozen, attending, norm, head."""
    torch.manual_seed(0)
    text = text_model(WIDTH, 2, 2, 1)
    text.insert(3, copy.deepcopy(text[3]))
    freeze(text)
    return MultimodalModel(encoder(), text, cuts=CUTS.get(stages))


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(images, text, targets); the last targets do not count."""
    images = torch.rand(count, SIDE, SIDE, generator=generator)
    letters = torch.randint(len(LETTERS), (count, LENGTH + 1), generator=generator)
    targets = letters[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.4] = 0
    return images, letters[:, :-1], targets


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def counted_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = target.flatten()
    loss = nn.functional.cross_entropy(output.flatten(0, 1), flat, reduction="sum", ignore_index=0)
    return loss, (flat != 0).sum()


def backward(
    reference: nn.Module, images: torch.Tensor, text: torch.Tensor, targets: torch.Tensor, loss_fn: Any
) -> float:
    """In one process; returns the loss."""
    loss = loss_fn(reference((images, text)), targets)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.item()


def check_same(pipe: MultimodalPipeline, reference: nn.Module, what: str, close: float = CLOSE) -> None:
    expected = dict(reference.named_parameters())
    has_encoder = pipe.placement is EncoderPlacement.REPLICATED or dist.get_rank() % workers() == 0
    names = [name for name, _ in pipe.named_parameters()]
    assert any(name.startswith("encoder.") for name in names) == has_encoder or pipe.program.name == "chimera", names
    for name, parameter in pipe.named_parameters():
        one, other = parameter.grad, expected[name].grad
        if one is None or other is None:
            assert one is other, f"{what}: {name} has a gradient on one side only"
            assert not parameter.requires_grad, f"{what}: {name} has no gradient"
        else:
            difference = (one - other).abs().max().item()
            assert difference <= close, f"{what}: {name} differs by {difference}"


def zero_gradients(*models: Any) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None


def schedules() -> list[tuple[str, int, dict[str, Any]]]:
    p = workers()
    found: list[tuple[str, int, dict[str, Any]]] = [
        ("dapple", 2 * p, {}),
        ("interleaved", p, {"chunks": 2, "recompute": True}),
    ]
    if p % 2 == 0:
        found.append(("chimera", 2 * p, {"more": "halving"}))
    return found


@case
def equal() -> None:
    """Losses, gradients and their norm, with mean losses and with losses that count, added over two steps."""
    for name, micro_batches, options in schedules():
        for placement in PLACEMENTS:
            stages = workers() * options.get("chunks", 1)
            pipe = MultimodalPipeline(new_model(stages), name, micro_batches, mesh(), placement=placement, **options)
            reference, what = new_model(stages), f"{name}, {placement}"
            for loss_fn in (mean_loss, counted_loss):
                for _ in range(2):
                    images, text, targets = batch(2 * micro_batches * COPIES)
                    loss = pipe.step((own(images), own(text)), own(targets), loss_fn)
                    expected = backward(reference, images, text, targets, loss_fn)
                    assert abs(loss.item() - expected) <= CLOSE, (what, loss.item(), expected)
                check_same(pipe, reference, what)
                norm = pipe.clip_grad_norm_(0.05)
                of_reference = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
                assert abs(norm - of_reference) <= CLOSE, (what, norm, of_reference)
                check_same(pipe, reference, f"{what}, clipped")
                zero_gradients(pipe, reference)
            loss = pipe.eval().evaluate((own(images), own(text)), own(targets), mean_loss)
            assert abs(loss.item() - mean_loss(reference((images, text)), targets)) <= CLOSE, what
            outputs = pipe.outputs((own(images), own(text)))
            if outputs and pipe.program.parts_of_micro_batch == 1:
                whole = torch.cat([outputs[part] for part in range(micro_batches)])
                assert torch.allclose(whole, reference((own(images), own(text))), rtol=0, atol=CLOSE), what


class Raising(nn.Module):
    """An encoder that fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = VisionTransformer(WIDTH, 1, 2)
        self.fails = ""

    def forward(self, images: torch.Tensor) -> Any:
        if self.fails == "forward":
            raise ArithmeticError("this encoder can't go on")
        tokens = self.inner(images)
        if self.fails == "backward":
            tokens.register_hook(self.fail)
        return {"count": tokens[1:], "integers": tokens.long(), "nothing": None}.get(self.fails, tokens)

    def fail(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("this encoder can't go back")


@contextlib.contextmanager
def expecting(kind: type[Exception], *texts: str) -> Iterator[None]:
    said = ""
    try:
        yield
    except kind as error:
        said = str(error)
    assert said, f"nothing was raised; {kind.__name__} expected: {texts}"
    assert all(text in said for text in texts), said


@case
def raises() -> None:
    """Failures end the step on all ranks; gradients stay as they were, and the next step is right."""
    p, m = workers(), workers()
    last = dist.get_world_size() - 1
    for placement in PLACEMENTS:
        model, reference = new_model(p, Raising), new_model(p, Raising)
        pipe = MultimodalPipeline(model, "dapple", m, mesh(), placement=placement)
        images, text, targets = (own(each) for each in batch(2 * m * COPIES))
        pipe.step((images, text), targets, mean_loss)
        before = [None if one.grad is None else one.grad.clone() for one in pipe.parameters()]
        victim = last if placement == "replicated" else last - p + 1  # the first worker of the last copy
        for fails, said in (
            ("forward", "ArithmeticError: this encoder can't go on"),
            ("backward", "ArithmeticError: this encoder can't go back"),
            ("count", " images: its first dimension is to be that of the images"),
            ("integers", "the image encoder returned torch.int64: it returns one floating-point tensor"),
            ("nothing", "the image encoder returned NoneType"),
        ):
            model.encoder.fails = fails if dist.get_rank() == victim else ""  # type: ignore[assignment]
            with expecting(PipelineError, f"rank {victim}: ", said):
                pipe.step((images, text), targets, mean_loss)
            model.encoder.fails = ""  # type: ignore[assignment]
        with expecting(PipelineError, "a tuple of two: (images, text); given: Tensor"):
            pipe.step(images, targets, mean_loss)
        with expecting(PipelineError, "the first dimensions of the images are [", "give one or more tensors"):
            wrong = images[:0] if placement == "first-stage" else (images, images[1:])
            pipe.step((wrong, text), targets, mean_loss)
        with expecting(PipelineError, "inputs: a tensor with a first dimension of 1 can't be cut"):
            pipe.step((images, text[:1]), targets, mean_loss)
        number = (
            f"a first dimension of {2 * m - 1}" if placement == "first-stage" else f"{2 * m - 1} images can't be cut"
        )
        with expecting(PipelineError, number, "give a multiple"):
            pipe.step((images[1:], text), targets, mean_loss)
        with expecting(PipelineError, "the loss function returns one number"):
            pipe.step((images, text), targets, lambda output, target: output)
        after = [one.grad for one in pipe.parameters()]
        for one, other in zip(before, after, strict=True):
            assert (one is None and other is None) or torch.equal(one, other), "a failed step changed a gradient"
        zero_gradients(pipe)
        pipe.step((images, text), targets, mean_loss)
        if COPIES == 1:
            backward(reference, images, text, targets, mean_loss)
            check_same(pipe, reference, f"{placement} after failures")
    if p > 1:
        pipe = MultimodalPipeline(new_model(p), "dapple", 1, mesh(), placement="replicated")
        with expecting(PipelineError, f"1 images can't be cut for {p} workers", "'preprocessing'"):
            pipe.step((images[:1], text[:1]), targets[:1], mean_loss)
        rank = dist.get_rank() % p
        with expecting(
            UsageError, "image tokens differ between workers: torch.float64 (1, 16, 8) on rank", "(2, 16, 8)"
        ):
            pipe.step((images[: 2 * p if rank else p], text[:p]), targets[:p], mean_loss)
        pipe.step((images[:p], text[:p]), targets[:p], mean_loss)


@case
def refused() -> None:
    """Arguments that can't work are an error on all ranks when the pipeline is created."""
    p = workers()
    with expecting(UsageError, "there is no placement 'middle' of an image encoder", "'replicated'"):
        MultimodalPipeline(new_model(p), "dapple", p, mesh(), placement="middle")
    with expecting(UsageError, "Sequential is no MultimodalModel"):
        MultimodalPipeline(nn.Sequential(nn.Linear(2, 2)), "dapple", p, mesh())  # type: ignore[arg-type]
    with expecting(UsageError, "pipedream changes weights within a step"):
        MultimodalPipeline(new_model(p), "pipedream", p, mesh())
    with expecting(UsageError, "zero-bubble is one of torch's"):
        MultimodalPipeline(new_model(2 * p), "zero-bubble", 2 * p, mesh())
    with expecting(
        UsageError, "rank 0 has the placement 'preprocessing' of the image encoder, rank 1 has 'first-stage'"
    ):
        name = PLACEMENTS[dist.get_rank() == 0]
        MultimodalPipeline(new_model(p), "dapple", p, mesh(), placement=name)


@case
def low_precision() -> None:
    """A model in bfloat16: gradients are near those of float64, and the image tokens' are summed in float32."""
    p = workers()
    images, text, targets = batch(2 * p * COPIES)
    exact = new_model(p).bfloat16().double()  # the same weights
    backward(exact, images.bfloat16().double(), text, targets, mean_loss)
    for placement in PLACEMENTS:
        pipe = MultimodalPipeline(new_model(p).bfloat16(), "dapple", p, mesh(), placement=placement)
        pipe.step((own(images).bfloat16(), own(text)), own(targets), mean_loss)
        for name, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                expected = dict(exact.named_parameters())[name].grad
                assert expected is not None
                error = (parameter.grad.double() - expected).norm() / expected.norm().clamp(min=1e-3)
                assert error < 0.1, (placement, name, error)
                assert parameter.grad.dtype is torch.bfloat16


@case
def frozen_encoder() -> None:
    """Nothing is sent back, and the layers that attend to images are trained."""
    p = workers()
    for placement in PLACEMENTS:
        models = [new_model(p), new_model(p)]
        for model in models:
            model.encoder.requires_grad_(False)
        pipe = MultimodalPipeline(models[0], "dapple", p, mesh(), placement=placement)
        images, text, targets = batch(2 * p * COPIES)
        pipe.step((own(images), MicroBatches(own(text).chunk(p))), own(targets), counted_loss)
        backward(models[1], images, text, targets, counted_loss)
        check_same(pipe, models[1], placement)


@case
def checkpoints() -> None:
    """A run goes on with another placement."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path, 0)
    reference, m = new_model(workers()), 2 * workers()
    expected = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-3)
    images, text, targets = batch(2 * m * COPIES)
    for number, placement in enumerate(PLACEMENTS):
        model = new_model(workers())
        with torch.no_grad():
            for parameter in model.parameters() if number else ():
                parameter.zero_()
        pipe = MultimodalPipeline(model, "dapple", m, mesh(), placement=placement)
        trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01, eps=1e-3) if trained else None
        if number:
            checkpoint.load(pipe, f"{path[0]}/{number - 1}", optimizer)
        zero_gradients(pipe, reference)
        pipe.step((own(images), own(text)), own(targets), mean_loss)
        backward(reference, images, text, targets, mean_loss)
        if optimizer is not None:
            optimizer.step()
        expected.step()
        for name, parameter in pipe.named_parameters():
            difference = (parameter - dict(reference.named_parameters())[name]).abs().max()
            assert difference <= CLOSE, (placement, name, difference)
        checkpoint.save(pipe, f"{path[0]}/{number}", optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


def seed() -> None:
    generator.manual_seed(1)


if __name__ == "__main__":
    COPIES = int(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    run(sys.argv[2:], seed)
