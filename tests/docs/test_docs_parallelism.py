"""The blocks of docs/howto/parallelism.md run, on four ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT

#: For each block, what its page leaves to the reader.
BEFORE = [
    """
import os
import torch
from torch import nn
os.chdir(FOLDER)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(2, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.w2(self.w1(x).relu())

torch.manual_seed(0)
model, loss_function = nn.Sequential(Layer(), Layer()), nn.functional.mse_loss
batches = [(torch.randn(8, 2), torch.randn(8, 2))] * 2
""",
    """
assert float(training.evaluate(*batches[0])) < float(loss)
""",
    """
import torch
model = torch.nn.Linear(2, 2)
""",
    """
import torch
from torch import nn
from torch.nn import functional

heads, kv_heads, vocabulary, width = 4, 2, 300, 16
group = mesh.group("cp")

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, n, bias=False) for n in (width, 8, 8, width))
    def forward(self, x):
        q, k, v = (one(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(), FeedForward()
    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocabulary, width), nn.Sequential(Block(), Block())
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
    def forward(self, ids):
        return self.output(self.norm(self.layers(self.embedding(ids))))

torch.manual_seed(0)
model, plain = Llama(), Llama()
ids, targets = torch.randint(vocabulary, (2, 2, 8))
plain.load_state_dict(model.state_dict())
""",
    """
assert abs(loss - functional.cross_entropy(plain(ids).flatten(0, 1), targets.flatten())) < 1e-5
from torch.nn.functional import cross_entropy
tokens = next_tokens = ids
q, k, v = (torch.randn(2, n, 8, 4) for n in (heads, kv_heads, kv_heads))
logits = torch.randn(2, 8, vocabulary, requires_grad=True)
""",
    """
optimizer = torch.optim.AdamW(model.parameters())
assert abs(loss - cross_entropy(logits.flatten(0, 1), targets.flatten())) < 1e-5
""",
    "",
    """
model = nn.Sequential(FeedForward())
batches = [[torch.randn(2, width) for _ in range(4)] for _ in range(2)]
loss_of = lambda model, x: model(x).square().mean()
recorder = None
""",
]


@pytest.mark.timeout(180)
def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "parallelism.md").read_text(), re.DOTALL)
    assert len(blocks) == len(BEFORE)
    text = "\n".join(part for pair in zip(BEFORE, blocks, strict=True) for part in pair)
    program = tmp_path / "page.py"
    program.write_text(
        text.replace("FOLDER", repr(str(tmp_path))) + "\nprint('all right')\ndist.destroy_process_group()\n"
    )
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "4", sys.executable, str(program)]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert job.text.count("all right") == 4, job.text
    assert (tmp_path / "checkpoint" / "1000" / ".metadata").exists()
