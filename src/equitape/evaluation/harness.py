"""The command line of lm-evaluation-harness with equitape's models.

    python -m equitape.evaluation.harness --model equitape --model_args pretrained=FOLDER --tasks NAME

registers equitape's models and passes its arguments to `lm_eval`. `--model hf` then loads folders of equitape models;
`--model equitape` also loads runs, adapters (with base=FOLDER among the arguments) and GGUF files.
`equitape.tasks.harness` is the other direction: tasks of the harness in `equitape eval`.
"""

import sys
from typing import Any

import torch

from ..tasks.evaluated_model import load_evaluated_model
from ..tasks.harness import require_harness

MODEL_NAME = "equitape"


def register_with_harness() -> None:
    """Register `--model equitape` with the harness: everything that equitape loads, including adapters."""
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM

    if MODEL_NAME in model_registry:
        return

    class EquitapeLM(HFLM):
        """A model that equitape loads."""

        def __init__(
            self,
            pretrained: str,
            base: str | None = None,
            tokenizer: str | None = None,
            dtype: str = "auto",
            device: str | None = None,
            **kwargs: Any,
        ):
            # the harness's default is cuda:0; fall back to the CPU without a GPU, as its class for transformers does
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                device = None
            evaluated = load_evaluated_model(pretrained, base=base, tokenizer=tokenizer, dtype=dtype, device=device)
            super().__init__(pretrained=evaluated.model, tokenizer=evaluated.tokenizer, **kwargs)

    register_model(MODEL_NAME)(EquitapeLM)


def main() -> None:
    """Run lm-evaluation-harness with equitape's models registered."""
    try:
        require_harness()
    except ValueError as error:
        sys.exit(str(error))
    from lm_eval.__main__ import cli_evaluate

    register_with_harness()
    cli_evaluate()


if __name__ == "__main__":
    main()
