"""Write benchmarks/layer_counts.json: operations, bytes and launches of one attention layer for many encodings.

tests/bench/test_counts.py compares the file with the code. Run this after a change that is meant to change the work of
a layer, and look at the difference:

    python benchmarks/layer_counts.py && git diff benchmarks/layer_counts.json
"""

import json
from pathlib import Path

from equitape.bench.counts import count_layers

FILE = Path(__file__).with_suffix(".json")

if __name__ == "__main__":
    table = count_layers()
    rows = ",\n".join("    " + json.dumps(row) for row in table.pop("layers"))
    FILE.write_text(json.dumps(table)[:-1] + ', "layers": [\n' + rows + "\n]}\n")
    print(f"Written to {FILE}.")
