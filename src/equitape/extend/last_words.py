"""A task for lm-evaluation-harness from the held-out text: the last word of a passage, which occurs earlier in it.

It is made like LAMBADA, from text that neither needs a network nor was trained on. Short passages show damage.
"""

import json
from pathlib import Path
from typing import Any

from ..data.tokens import TokenStore
from ..runs.files import make_directory, write_text

NAME = "last_words"
FEWEST_WORDS, PASSAGE_TOKENS, LETTERS = 30, 256, 4
"""Words before the asked one; tokens from which a passage is cut; letters of the asked word at least."""
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{word}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
metadata: {{version: 1}}
"""


def find_passages(store: TokenStore, tokenizer: Any, count: int) -> list[dict[str, str]]:
    """Up to `count` passages, evenly spaced in the text, each with the word that follows."""
    places = [
        (index, start)
        for index, length in enumerate(store.lengths.tolist())
        for start in range(0, length - PASSAGE_TOKENS, PASSAGE_TOKENS)
    ]
    chosen = places[:: max(len(places) // count, 1)]
    pieces = (store.document(index, end=False)[start : start + PASSAGE_TOKENS] for index, start in chosen)
    found = (cut(tokenizer.decode(piece, skip_special_tokens=True)) for piece in pieces)
    return [each for each in found if each is not None][:count]


def cut(text: str) -> dict[str, str] | None:
    """The text up to the first word that occurred before, and that word; None where there is none."""
    # the first and the last word may be parts of words
    words = text.split()[1:-1]
    for place in range(FEWEST_WORDS, len(words)):
        word = words[place]
        if word.isalpha() and len(word) >= LETTERS and word in words[:place]:
            return {"text": " ".join(words[:place]), "word": word}
    return None


def write_task(passages: list[dict[str, str]], folder: Path) -> Path:
    """Write the task and its data; returns the folder for the harness."""
    make_directory(folder)
    data = folder.absolute() / f"{NAME}.jsonl"
    write_text(data, "".join(json.dumps(each) + "\n" for each in passages))
    write_text(folder / f"{NAME}.yaml", TASK.format(name=NAME, data=json.dumps(str(data))))
    return folder
