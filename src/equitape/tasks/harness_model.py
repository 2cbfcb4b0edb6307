"""A loaded model for lm-evaluation-harness: it counts what the harness cuts and reports each answered request."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .evaluated_model import EvaluatedModel

COUNTED = ("requests", "cut_requests", "cut_tokens")
ROLLING, DOCUMENTS = "loglikelihood_rolling", 8
"""Requests about whole documents, and how many of them are answered together."""
UNUSED = ("get_git_commit_hash", "add_env_info")
"""What the harness collects about the machine for its own result files: git complains outside a repository."""


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Only errors of the harness. Its hints are for authors of tasks and for its own command line."""
    from lm_eval import evaluator
    from lm_eval.models import huggingface

    # the model prints batch sizes where a command prints JSON
    replaced = [*((evaluator, name) for name in UNUSED), (huggingface, "print")]
    kept = [(module, name, vars(module)[name]) for module, name in replaced if name in vars(module)]
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    for module, name in replaced:
        setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        logger.setLevel(level)
        for module, name in replaced:
            delattr(module, name)
        for module, name, function in kept:
            setattr(module, name, function)


def wrap(evaluated: EvaluatedModel, batch_size: int | str, max_length: int | None) -> Any:
    """The harness's class for transformers models, around a loaded model.

    It has `take_counts`, the number of requests, of cut requests and of the tokens they lose since the last call, and
    `on_answer`, called after each request with the share of the work of one call that it is.
    """
    from lm_eval.models.huggingface import HFLM

    class CountingLM(HFLM):
        requests = cut_requests = cut_tokens = 0
        waiting = 1
        on_answer: Callable[[float], None] = staticmethod(lambda share: None)

        def count(self, tokens: int, limit: int) -> None:
            self.requests += 1
            self.cut_requests += tokens > limit
            self.cut_tokens += max(0, tokens - limit)

        def take_counts(self) -> dict[str, int]:
            counts = {name: getattr(self, name) for name in COUNTED}
            self.requests = self.cut_requests = self.cut_tokens = 0
            return {**counts, "max_length": self.max_length}

        def set_cache_hook(self, cache_hook: Any) -> None:
            # the harness calls it with each answer
            store = cache_hook.add_partial

            def add_partial(*answer: Any) -> None:
                store(*answer)
                self.on_answer(1 / self.waiting)

            cache_hook.add_partial = add_partial
            super().set_cache_hook(cache_hook)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            for _, context, continuation in requests:
                # the last token is never an input
                self.count(len(context) + len(continuation) - 1, self.max_length)
            return super()._loglikelihood_tokens(requests, *args, **{**kwargs, "disable_tqdm": True})

        def tok_batch_encode(self, strings: Any, *args: Any, **kwargs: Any) -> Any:
            limit = kwargs.get("left_truncate_len")
            if limit is not None:
                _, mask = super().tok_batch_encode(strings)
                for tokens in mask.sum(1).tolist():
                    self.count(tokens, limit)
            return super().tok_batch_encode(strings, *args, **kwargs)

    def counted(name: str) -> Callable[..., Any]:
        def answer(self: CountingLM, requests: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            self.waiting = len(requests)
            # a call keeps the answers about documents only when all are read
            size = DOCUMENTS if name == ROLLING and batch_size != "auto" else len(requests)
            ask = partial(getattr(super(CountingLM, self), name), *args, **{**kwargs, "disable_tqdm": True})
            return [each for start in range(0, len(requests), size) for each in ask(requests[start : start + size])]

        return answer

    for name in ("loglikelihood", ROLLING, "generate_until"):
        setattr(CountingLM, name, counted(name))
    return CountingLM(
        pretrained=evaluated.model, tokenizer=evaluated.tokenizer, batch_size=batch_size, max_length=max_length
    )
