"""Writes byteps_py/placement/models.json: the parameters of well-known models, built from their architectures.

    python benchmarks/models.py

Names and shapes are those of torchvision's resnet50, resnet101 and vgg16 and of transformers' BertModel (large,
uncased, with pooler) and GPT2LMHeadModel (the head shares wte's memory and is not repeated).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

Row = tuple[str, list[int]]


def resnet(blocks_of_stages: Sequence[int]) -> Iterator[Row]:
    def conv_bn(conv: str, bn: str, out: int, inputs: int, size: int) -> Iterator[Row]:
        yield f"{conv}.weight", [out, inputs, size, size]
        yield f"{bn}.weight", [out]
        yield f"{bn}.bias", [out]

    yield from conv_bn("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate(zip(blocks_of_stages, (64, 128, 256, 512), strict=True), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from conv_bn(f"{name}.conv1", f"{name}.bn1", width, inputs, 1)
            yield from conv_bn(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            yield from conv_bn(f"{name}.conv3", f"{name}.bn3", 4 * width, width, 1)
            if block == 0:
                yield from conv_bn(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, inputs, 1)
            inputs = 4 * width
    yield from linear("fc", 1000, 2048)


def vgg16() -> Iterator[Row]:
    layer, inputs = 0, 3
    for width, convolutions in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(convolutions):
            yield f"features.{layer}.weight", [width, inputs, 3, 3]
            yield f"features.{layer}.bias", [width]
            layer, inputs = layer + 2, width  # each is followed by a ReLU
        layer += 1  # max pooling
    yield from linear("classifier.0", 4096, 512 * 7 * 7)
    yield from linear("classifier.3", 4096, 4096)
    yield from linear("classifier.6", 1000, 4096)


def bert_large() -> Iterator[Row]:
    hidden, intermediate = 1024, 4096
    yield "embeddings.word_embeddings.weight", [30522, hidden]
    yield "embeddings.position_embeddings.weight", [512, hidden]
    yield "embeddings.token_type_embeddings.weight", [2, hidden]
    yield from norm("embeddings.LayerNorm", hidden)
    for i in range(24):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{part}", hidden, hidden)
        yield from linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from linear(f"{layer}.intermediate.dense", intermediate, hidden)
        yield from linear(f"{layer}.output.dense", hidden, intermediate)
        yield from norm(f"{layer}.output.LayerNorm", hidden)
    yield from linear("pooler.dense", hidden, hidden)


def gpt2() -> Iterator[Row]:
    hidden = 768
    yield "transformer.wte.weight", [50257, hidden]
    yield "transformer.wpe.weight", [1024, hidden]
    for i in range(12):
        layer = f"transformer.h.{i}"
        yield from norm(f"{layer}.ln_1", hidden)
        yield from conv1d(f"{layer}.attn.c_attn", hidden, 3 * hidden)
        yield from conv1d(f"{layer}.attn.c_proj", hidden, hidden)
        yield from norm(f"{layer}.ln_2", hidden)
        yield from conv1d(f"{layer}.mlp.c_fc", hidden, 4 * hidden)
        yield from conv1d(f"{layer}.mlp.c_proj", 4 * hidden, hidden)
    yield from norm("transformer.ln_f", hidden)


def linear(name: str, out: int, inputs: int) -> Iterator[Row]:
    yield f"{name}.weight", [out, inputs]
    yield f"{name}.bias", [out]


def conv1d(name: str, inputs: int, out: int) -> Iterator[Row]:
    """GPT-2's linear layer, which keeps its weight the other way round."""
    yield f"{name}.weight", [inputs, out]
    yield f"{name}.bias", [out]


def norm(name: str, width: int) -> Iterator[Row]:
    yield f"{name}.weight", [width]
    yield f"{name}.bias", [width]


MODELS: dict[str, Callable[[], Iterator[Row]]] = {
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "vgg16": vgg16,
    "bert-large": bert_large,
    "gpt2": gpt2,
    "resnet101": partial(resnet, (3, 4, 23, 3)),
}


def text() -> str:
    """The file's content: one parameter per line."""
    models = []
    for name, parameters in MODELS.items():
        rows = ",\n".join(json.dumps(list(row), separators=(",", ":")) for row in parameters())
        models.append(f"{json.dumps(name)}:[\n{rows}\n]")
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    import byteps_py.placement

    Path(byteps_py.placement.__file__).with_name("models.json").write_text(text())
