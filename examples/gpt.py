"""Train a small GPT on real text that every machine has: Python's language reference, which pydoc contains.

python examples/gpt.py
bpslaunch -np 2 --machines 2 --servers 1 python examples/gpt.py --steps 300
bpslaunch -np 2 --machines 2 --servers 1 python examples/gpt.py --steps 300 --every 30
"""

from __future__ import annotations

import argparse
import time
from pydoc_data import topics

import torch
from torch import nn
from torch.nn import functional

import byteps_py as bps

COMPRESSION = {
    "none": bps.Compression.none,
    "fp16": bps.Compression.fp16,
    "bf16": bps.Compression.bf16,
    "int8": bps.Compression.int8,
    "float8": bps.Compression.float8,
    "thc": bps.Compression.thc(),
    "dithering": bps.Compression.dithering(7),
    "onebit": bps.Compression.onebit(error_feedback=True),
    "topk2": bps.Compression.topk(ratio=0.03, error_feedback=True, bits=2),
    "topk": bps.Compression.topk(ratio=0.01, error_feedback=True),
    "randomk": bps.Compression.randomk(ratio=0.01, error_feedback=True),
    "powersgd": bps.Compression.powersgd(rank=4),
}


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps characters to the logits of the next character. The embedding is tied to the head."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.token, self.position):  # a token must not drown in its position
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
        """Generate ``length`` characters after int64[n] ``tokens``."""
        for _ in range(length):
            logits = self(tokens[-self.context :].unsqueeze(0))[0, -1] / 0.8
            following = torch.multinomial(functional.softmax(logits, 0), 1, generator=generator)
            tokens = torch.cat([tokens, following])
        return tokens


def read_text() -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """(the characters, the text to train with as their numbers, the held-out text)"""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    letters = sorted(set(text))
    code = {letter: number for number, letter in enumerate(letters)}
    data = torch.tensor([code[letter] for letter in text])
    held_out = len(data) // 20
    return letters, data[:-held_out], data[-held_out:]


def random_batch(
    source: torch.Tensor, sequences: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), each of ``sequences`` rows."""
    starts = torch.randint(len(source) - context - 1, (sequences,), generator=generator)
    rows = torch.stack([source[start : start + context + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compression", choices=sorted(COMPRESSION), default="none", help="how gradients travel")
    parser.add_argument("--every", type=int, default=0, help="combine models once in so many steps, not gradients")
    parser.add_argument("--fragments", type=int, default=1, help="with --every: parts that are combined in turn")
    parser.add_argument("--delay", type=int, default=0, help="with --every: steps under which a part travels")
    arguments = parser.parse_args()

    bps.init()
    letters, data, held_out = read_text()
    code = {letter: number for number, letter in enumerate(letters)}

    torch.manual_seed(0)
    model = GPT(len(letters), arguments.context, arguments.width, arguments.layers, heads=4)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    compression = COMPRESSION[arguments.compression]
    if arguments.every:
        streaming = bps.local.Streaming(arguments.fragments, arguments.delay)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)  # averages the models
        optimizer = bps.local.DiLoCo(
            model, optimizer, outer, every=arguments.every, streaming=streaming, compression=compression
        )
    else:
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    if bps.rank() == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{len(data):,} characters, {count:,} parameters, {bps.size()} ranks", flush=True)

    def loss_of(source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        inputs, targets = random_batch(source, arguments.batch_size, arguments.context, generator)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    own = torch.Generator().manual_seed(1 + bps.rank())  # each rank reads different parts of the text
    began = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(data, own)
        loss.backward()
        if arguments.every:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            optimizer.synchronize()  # so that the clipped gradient is the averaged one
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        if step % max(1, arguments.steps // 10) == 0:
            mean = bps.push_pull(loss.detach(), average=True, name="loss").item()
            if bps.rank() == 0:
                rate = step * arguments.batch_size * bps.size() * arguments.context / (time.perf_counter() - began)
                print(f"step {step:5d}  loss {mean:.3f}  {rate:,.0f} characters/s", flush=True)

    if arguments.every:
        optimizer.synchronize()
    model.eval()
    with torch.no_grad():
        losses = [loss_of(held_out, own) for _ in range(4)]
    mean = bps.push_pull(torch.stack(losses).mean(), average=True, name="held-out loss").item()
    if bps.rank() == 0:
        print(f"held-out loss {mean:.3f}")
        written = model.write(torch.tensor([code[letter] for letter in "The "]), 200, torch.Generator().manual_seed(0))
        print("".join(letters[number] for number in written.tolist()))
    bps.shutdown()


if __name__ == "__main__":
    main()
