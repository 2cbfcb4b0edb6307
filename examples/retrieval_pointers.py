"""Where do tokens of a trained retrieval model point? docs/explanation/pointers.md explains the picture.

    equitape train retrieval "encodings=[{kind: tape2, decay_heads: 0.5, jumps: {rate: 0.02, shape: log, size: 8.0}}]"
    python examples/retrieval_pointers.py runs/retrieval/... pointers.png

A token's field z is compared with the phasors of every position: the position whose phasors are most similar is where
the token points. Before the first block that is the token's own position.
"""

import json
import sys
from pathlib import Path

import torch
from pointing import ablations, attentions, fields
from torch import Tensor

from equitape import EquitapeForCausalLM
from equitape.encodings.frequencies import inverse_frequencies
from equitape.encodings.options import Geometry
from equitape.tasks.retrieval import Retrieval, RetrievalOptions


def draw(task: Retrieval, rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows to score [n, T], and where the needle of each query stands [n, Q]."""
    tokens, _, _ = task.draw_test(rows, length, torch.Generator().manual_seed(seed))
    queries = query_places(task, length)
    context = tokens[:, : queries[0] - 1]
    same = context[:, None] == tokens[:, queries, None]
    return tokens, same.long().argmax(-1)


def query_places(task: Retrieval, length: int) -> Tensor:
    """Indices of the keys that are asked for at the end of a row."""
    return torch.arange(length - 2 * task.options.queries, length, 2)


def accuracy(model: EquitapeForCausalLM, task: Retrieval, tokens: Tensor) -> float:
    """Share of queries whose value is the most likely next token."""
    places = query_places(task, tokens.shape[1])
    with torch.no_grad():
        predicted = model(tokens).logits[:, places].argmax(-1)
    return (predicted == tokens[:, places + 1]).float().mean().item()


def pointers(model: EquitapeForCausalLM, tokens: Tensor, places: Tensor) -> Tensor:
    """The position that each of these tokens points to after each block: [blocks, n, G, Q]."""
    geometry: Geometry = model.config.geometry
    options = model.model.encoding.options
    frequencies = inverse_frequencies(geometry.head_dim, options.theta, options.scaling, tokens.device).float()
    angles = torch.arange(tokens.shape[1])[:, None] * frequencies
    waves = torch.polar(torch.ones_like(angles), angles)
    return torch.stack([(each[:, :, places] @ waves.mH).real.argmax(-1) for each in fields(model, tokens)])


def attention_to(model: EquitapeForCausalLM, tokens: Tensor, queries: Tensor, keys: Tensor) -> list[list[float]]:
    """The mean attention that queries [Q] give to one key each [n, Q], by block and head."""
    index = keys[:, None, :, None]
    return [
        each[:, :, queries].gather(-1, index.expand(-1, each.shape[1], -1, -1)).mean((0, 2, 3)).tolist()
        for each in attentions(model, tokens)
    ]


def measure(model: EquitapeForCausalLM, task: Retrieval, rows: int, factor: int) -> dict:
    """All figures of the picture."""
    length = task.options.length
    tokens, needles = draw(task, rows, length)
    long_tokens, long_needles = draw(task, max(rows // factor, 1), factor * length)
    found = {"length": length, "factor": factor, "rows": rows}
    found["accuracy"] = {name: accuracy(changed, task, tokens) for name, changed in ablations(model).items()}
    queries = query_places(task, length)
    found["attention"] = {
        "key": attention_to(model, tokens, queries, needles),
        "value": attention_to(model, tokens, queries, needles + 1),
    }
    for name, rows_of, places in (("short", tokens, needles), ("long", long_tokens, long_needles)):
        pointed = pointers(model, rows_of, query_places(task, rows_of.shape[1]))
        near = (pointed - places[:, None]).abs() <= 1
        found[name] = {
            "share": near.float().mean((1, 3)).tolist(),
            "needles": places.tolist(),
            "pointed": pointed[min(1, len(pointed) - 1)].tolist(),
        }
    return found


def draw_picture(found: dict, path: Path) -> None:
    """Where queries point against where their needles stand, and what each part of the update is worth."""
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=(1, 1, 1.1))
    for axes, name, length in (
        (left, "short", found["length"]),
        (middle, "long", found["factor"] * found["length"]),
    ):
        needles, pointed = torch.tensor(found[name]["needles"]), torch.tensor(found[name]["pointed"])
        axes.plot((0, length), (0, length), color="#b0b0b0", linewidth=1)
        every = needles[:, None].expand_as(pointed)
        axes.scatter(every.flatten(), pointed.flatten(), s=14, alpha=0.35, color="#a80000")
        share = 100 * torch.tensor(found[name]["share"])[1].mean()
        axes.set(title=f"Rows of {length:,} tokens: {share:.0f} % of heads point at the needle", xlim=(0, length))
        axes.set(ylim=(0, length * 1.02), xlabel="position of the needle", ylabel="where the query points, every head")
    names = list(found["accuracy"])
    right.barh(names[::-1], [100 * found["accuracy"][name] for name in names[::-1]], color="#a80000", height=0.6)
    right.set(title="Values found when parts of the update are off", xlabel="per cent", xlim=(0, 100))
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("After two blocks, a query stands where its needle stands")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(run: str, picture: str, rows: str = "32", factor: str = "4") -> None:
    """Measure a run of the recipe `retrieval`, write the figures as JSON and draw them."""
    folder = Path(run)
    model = EquitapeForCausalLM.from_pretrained(folder / "model" if (folder / "model").exists() else folder).eval()
    found = measure(model, Retrieval(RetrievalOptions()), int(rows), int(factor))
    Path(picture).with_suffix(".json").write_text(json.dumps(found) + "\n")
    draw_picture(found, Path(picture))
    for name, share in found["accuracy"].items():
        print(f"{name}: {100 * share:.1f} % of the values found")
    for name, blocks in found["attention"].items():
        for block, heads in enumerate(blocks):
            print(
                f"attention to the {name} in block {block + 1}: {' '.join(f'{share:.2f}' for share in heads)} by head"
            )
    for name in ("short", "long"):
        for block, heads in enumerate(found[name]["share"]):
            print(
                f"{name} rows, after block {block + 1}: {' '.join(f'{100 * share:.0f}' for share in heads)} % by head"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
