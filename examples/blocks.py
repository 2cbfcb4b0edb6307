"""A bidirectional transformer whose blocks are built from equitape.nn, shared by the other examples."""

import torch
from torch import nn
from torch.nn import functional as F

from equitape.nn import Attention, RotaryAttention, TapeAttention, grid_ids

KINDS = ("none", "learned", "sinusoidal", "rope", "tape")
ROTARY = ("rope", "tape")


def make_attention(kind, width, heads, layer, layers, axes, theta):
    """Attention that sees both directions; learned and sinusoidal positions are added to the embeddings instead."""
    options = {"layer": layer, "num_layers": layers, "causal": False}
    if kind == "tape":
        return TapeAttention(width, heads, theta=theta, num_axes=axes, **options)
    if kind == "rope":
        return RotaryAttention(width, heads, theta=theta, num_axes=axes, **options)
    return Attention(width, heads, "nope", **options)


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, state, ids):
        y, state = self.attention(self.before(x), state, positions=ids, features=lambda y: self.after(x + y))
        x = x + y
        return x + self.feed_forward(self.after(x)), state


class Encoder(nn.Module):
    """Embedded tokens [B, N, C] and their ids [N] or [N, A] -> features [B, N, C]."""

    def __init__(self, kind, width=64, heads=4, layers=4, axes=1, theta=100.0):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(
            Block(width, make_attention(kind, width, heads, layer, layers, axes, theta)) for layer in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x, ids):
        state = None
        for block in self.blocks:
            x, state = block(x, state, ids if self.kind in ROTARY else None)
        return self.norm(x)


def waves(ids, width, theta):
    """Sinusoids of ids [N, A], an equal share of the width for each axis: [N, C]."""
    share = width // ids.shape[-1]
    frequencies = theta ** -(torch.arange(0, share, 2) / share)
    angles = ids[..., None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class PatchClassifier(nn.Module):
    """Classifies a grid of patches [B, rows x columns, P] by the mean of their features.

    grid: the grid of training, which the learned table has; for other grids it is interpolated.
    """

    def __init__(self, kind, patch_size, grid, classes=10, width=64, heads=4, layers=4, theta=100.0):
        super().__init__()
        self.kind, self.theta = kind, theta
        self.embed = nn.Linear(patch_size, width)
        if kind == "learned":
            self.table = nn.Parameter(0.02 * torch.randn(1, width, *grid))
        self.encoder = Encoder(kind, width, heads, layers, axes=2, theta=theta)
        self.head = nn.Linear(width, classes)

    def forward(self, patches, grid, step=1.0):
        """step: distance between neighbouring patches; below 1 for an image of higher resolution."""
        x, ids = self.embed(patches), grid_ids(*grid) * step
        if self.kind == "learned":
            table = F.interpolate(self.table, size=grid, mode="bicubic", align_corners=False)
            x = x + table.flatten(2).transpose(1, 2)
        if self.kind == "sinusoidal":
            x = x + waves(ids, x.shape[-1], self.theta)
        return self.head(self.encoder(x, ids).mean(1))


def cut(images, size):
    """Images [B, height, width] as patches [B, rows x columns, size x size], and the grid."""
    rows, columns = images.shape[1] // size, images.shape[2] // size
    patches = images.unflatten(1, (rows, size)).unflatten(3, (columns, size)).transpose(2, 3)
    return patches.flatten(3).flatten(1, 2), (rows, columns)


def train(model, images, labels, size, epochs, seed, batch=64, rate=2e-3):
    """Minimise the cross-entropy with AdamW and a cosine schedule."""
    patches, grid = cut(images, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(batch):
            loss = F.cross_entropy(model(patches[chosen], grid), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def predict(model, images, size, step=1.0):
    """Logits [B, classes]."""
    patches, grid = cut(images, size)
    return torch.cat([model(part, grid, step) for part in patches.split(250)])


def accuracy(logits, labels):
    """In per cent."""
    return 100 * (logits.argmax(-1) == labels).double().mean().item()
