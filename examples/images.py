"""A small vision transformer on handwritten digits: positions on two axes, row and column.

Trained on centred digits of 28 x 28 pixels, tested at other resolutions (more or fewer patches of the digit) and on
larger canvases (the digit anywhere on black).

    python examples/images.py --data digits28 --out images.json
    python examples/images.py --data sklearn --train 1400 --test 397
"""

from pathlib import Path

import torch
from blocks import KINDS, PatchClassifier, accuracy, predict, train
from results import compare, parse, report
from torch.nn import functional as F

PATCH, SIDE = 4, 28
RESOLUTIONS, CANVASES = (20, 36, 44), (40, 56)


def read(data, count):
    """(images [count, 28, 28] from 0 to 1, labels). data: "sklearn", or the folder of the two binary files."""
    if data == "sklearn":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
        return resize(images, SIDE)[:count], labels[:count].long()
    folder = Path(data)
    images, labels = (
        torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8)
        for name in ("images-uint8-28x28.bin", "labels-uint8.bin")
    )
    return images.view(-1, SIDE, SIDE)[:count].float() / 255, labels[:count].long()


def resize(images, side):
    return F.interpolate(images[:, None], size=(side, side), mode="bilinear", antialias=True)[:, 0]


def place(images, side, seed):
    """Each image somewhere on a black canvas."""
    generator = torch.Generator().manual_seed(seed)
    canvas = torch.zeros(len(images), side, side)
    for own, image in zip(canvas, images, strict=True):
        row, column = torch.randint(side - SIDE + 1, (2,), generator=generator).tolist()
        own[row : row + SIDE, column : column + SIDE] = image
    return canvas


def main(arguments=None):
    chosen = parse(__doc__, arguments, KINDS, data=True, train=8000, test=1000, epochs=4, width=64, layers=3)
    images, labels = read(chosen.data, 10_000)
    first, last = slice(0, chosen.train), slice(len(labels) - chosen.test, None)
    tested, answers = images[last], labels[last]

    def run(kind, seed):
        model = PatchClassifier(kind, PATCH**2, (SIDE // PATCH,) * 2, width=chosen.width, layers=chosen.layers)
        train(model, images[first], labels[first], PATCH, chosen.epochs, seed, batch=32)
        row = {f"{SIDE}, trained": accuracy(predict(model, tested, PATCH), answers)}
        for side in RESOLUTIONS:
            logits = predict(model, resize(tested, side), PATCH, step=SIDE / side)
            row[f"{side} pixels"] = accuracy(logits, answers)
        for side in CANVASES:
            row[f"canvas {side}"] = accuracy(predict(model, place(tested, side, seed=0), PATCH), answers)
        return row

    return report(compare(chosen.kinds, chosen.seeds, run), chosen, "python examples/images.py")


if __name__ == "__main__":
    main()
