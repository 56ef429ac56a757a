"""Train a text model to say what an image shows, as Llama 3 was: the text model is trained on text alone, and frozen;
then an image encoder and layers that attend to its output are trained. The text model is a pipeline, and one flag says
where the encoder runs. The images are scikit-learn's handwritten digits, the texts "zero" to "nine".

bpslaunch -np 2 python examples/multimodal.py --placement replicated
bpslaunch -np 4 python examples/multimodal.py --placement preprocessing --pp 2 --check
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import byteps_py.torch  # noqa: F401  (the backend; not needed if pip has installed byteps_py)
from byteps_py.parallel.multimodal import EncoderPlacement, MultimodalModel, MultimodalPipeline

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "^$" + "".join(sorted(set("".join(NAMES))))  # with a begin and an end
LENGTH = 1 + max(map(len, NAMES))
PADDING = -100
SIDE, PATCH = 8, 2
CLOSE = 1e-4


class Attention(nn.Module):
    """Of ``text`` to itself, causal, or to other tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, text: torch.Tensor, others: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        key, value = self.key_value(text if others is None else others).chunk(2, -1)
        parts = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query(text), key, value))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Self-attention, and a perceptron."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), causal=self.causal)
        return x + self.perceptron(self.norms[1](x))


class CrossAttentionLayer(nn.Module):
    """The text attends to the image tokens."""

    attends_to_images = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, image_tokens: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), image_tokens)
        return x + self.perceptron(self.norms[1](x))


class Embedding(nn.Module):
    """Of letters and of their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.letter(letters) + self.position(torch.arange(letters.shape[1], device=letters.device))


class VisionTransformer(nn.Module):
    """Images [n, 8, 8] -> tokens [n, 16, width], one for each patch."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, width) * 0.1)
        self.layers = nn.Sequential(*(Layer(width, heads, causal=False) for _ in range(layers)), nn.LayerNorm(width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        return self.layers(self.patches(patches) + self.positions)


def text_model(width: int, heads: int, groups: int, ratio: int) -> nn.Sequential:
    """Groups of ``ratio`` self-attention layers and one that attends to the image. Those of Llama 3 have four."""
    layers: list[nn.Module] = [Embedding(width)]
    for _ in range(groups):
        layers += [*(Layer(width, heads, causal=True) for _ in range(ratio)), CrossAttentionLayer(width, heads)]
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, len(LETTERS)))


def freeze(model: nn.Sequential) -> None:
    """All layers but those that attend to images."""
    for layer in model:
        layer.requires_grad_(isinstance(layer, CrossAttentionLayer))


def trained_on_text(model: nn.Sequential, steps: int) -> None:
    """Train the layers that do not attend to images: they learn which letters follow which."""
    alone = nn.Sequential(*(layer for layer in model if not isinstance(layer, CrossAttentionLayer)))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    inputs, targets = letters_of(torch.arange(10))
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING).backward()
        optimizer.step()


def build_model(arguments: argparse.Namespace) -> MultimodalModel:
    """The same on all ranks. Frozen layers compute no gradients of weights, so they cost two thirds."""
    torch.manual_seed(0)
    encoder = VisionTransformer(arguments.width, arguments.encoder_layers, heads=4)
    text = text_model(arguments.width, 4, arguments.groups, arguments.ratio)
    trained_on_text(text, arguments.text_steps)
    freeze(text)
    costs = [2 / 3 if isinstance(layer, Layer) else float(isinstance(layer, CrossAttentionLayer)) for layer in text]
    return MultimodalModel(encoder, text, costs)


def letters_of(digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[n, 6] each: the letters of the digits' names, and those that follow them."""
    texts = [f"^{NAMES[digit]}$" for digit in digits.tolist()]
    inputs, targets = (torch.full((len(texts), LENGTH), fill) for fill in (LETTERS.index("$"), PADDING))
    for row, text in enumerate(texts):
        codes = torch.tensor([LETTERS.index(letter) for letter in text])
        inputs[row, : len(codes) - 1], targets[row, : len(codes) - 1] = codes[:-1], codes[1:]
    return inputs, targets


def read_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,437 images float32[n, 8, 8] from 0 to 1 and their int64[n] digits for training, then 360 for the test."""
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order] / 16
    digits = torch.tensor(data.target, dtype=torch.int64)[order]
    return images[:1437], digits[:1437], images[1437:], digits[1437:]


def letters_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count): names have different numbers of letters."""
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (target != PADDING).sum()


class OneProcess:
    """The same training without a pipeline, to compare with."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model = build_model(arguments)
        self.optimizer = optimizer_of(self.model.parameters(), arguments)

    def step(self, images: torch.Tensor, digits: torch.Tensor) -> float:
        inputs, targets = letters_of(digits)
        self.optimizer.zero_grad()
        total, count = letters_loss(self.model((images, inputs)), targets)
        (total / count).backward()
        self.optimizer.step()
        return (total / count).item()


def optimizer_of(parameters: Any, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained or [nn.Parameter(torch.zeros(()))], lr=arguments.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    placements = [each.value for each in EncoderPlacement]
    parser.add_argument("--placement", choices=placements, default="replicated", help="of the image encoder")
    parser.add_argument("--schedule", default="dapple", help="a name of `bps schedule`")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--pp", type=int, help="workers of a pipeline; default: all ranks")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--text-steps", type=int, default=100, help="of the text model alone, before it is frozen")
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--groups", type=int, default=4, help="layers that attend to images")
    parser.add_argument("--ratio", type=int, default=2, help="self-attention layers before each of these")
    parser.add_argument("--encoder-layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    arguments = parser.parse_args()

    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("byteps", **({} if "RANK" in os.environ else alone))
    workers = arguments.pp or dist.get_world_size()
    copies = dist.get_world_size() // workers
    mesh = init_device_mesh("cpu", (copies, workers), mesh_dim_names=("dp", "pp"))
    images, digits, test_images, test_digits = read_data()
    pipe = MultimodalPipeline(
        build_model(arguments), arguments.schedule, arguments.micro_batches, mesh, placement=arguments.placement
    )
    optimizer = optimizer_of(pipe.parameters(), arguments)
    is_first, copy = dist.get_rank() == 0, mesh.get_local_rank("dp")
    one_process = OneProcess(arguments) if arguments.check and is_first else None

    generator = torch.Generator().manual_seed(1)
    began, difference = time.perf_counter(), 0.0
    for step in range(1, arguments.steps + 1):
        chosen = torch.randint(len(images), (arguments.batch_size,), generator=generator)  # the same on all ranks
        own = chosen.chunk(copies)[copy]
        inputs, targets = letters_of(digits[own])
        optimizer.zero_grad()
        loss = pipe.step((images[own], inputs), targets, letters_loss)
        optimizer.step()
        if one_process is not None:
            difference = max(difference, abs(loss.item() - one_process.step(images[chosen], digits[chosen])))
        if is_first and step % max(1, arguments.steps // 10) == 0:
            rate = step * arguments.batch_size / (time.perf_counter() - began)
            print(f"step {step:5d}  loss {loss.item():.3f}  {rate:,.0f} images/s", flush=True)

    inputs, targets = letters_of(test_digits)
    pipe.eval()
    loss = pipe.evaluate((test_images, inputs), targets, letters_loss)
    outputs = pipe.outputs((test_images, inputs))
    right = torch.zeros(())
    if outputs and copy == 0:
        found = torch.cat([outputs[part] for part in sorted(outputs)]).argmax(-1)
        right = ((found == targets) | (targets == PADDING)).all(1).float().mean()
    dist.all_reduce(right)
    if is_first:
        print(f"held-out loss {loss.item():.3f}, all letters right for {right:.1%} of the images")
    if one_process is not None:
        same = f"equal to {CLOSE:g}" if difference <= CLOSE else f"different by {difference:.2g} at most"
        print(f"the losses of {arguments.steps} steps and those of one process: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
