"""SCROLLS: questions about long documents, answered by generation and scored with SCROLLS' metrics."""

from dataclasses import dataclass
from typing import Any

import torch

from ..data.scrolls import Item, load_examples
from ..data.scrolls_prompts import DATASETS, CutRule, PromptWriter
from ..data.tokens import PieceTokenizer
from ..runs.results import PERCENT, PERPLEXITY, Bars, Metric, Report
from ..settings import Positive, Settings
from . import text_metrics as metrics
from .decoding import write_answers
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, EvaluationTask, Record, Unit, mean
from .perplexity import perplexity

SCORES = tuple(
    Metric(name=name, higher_is_better=True, unit=PERCENT)
    for name in ("score", "f1", "exact_match", "rouge", "rouge1", "rouge2", "rougeL")
)
COUNTS = Metric(name="prompts", higher_is_better=None)
SHORT_WINDOWS = 64
SHORT_KEY = "short"


@dataclass(frozen=True, kw_only=True)
class ScrollsOptions(Settings):
    """Options of SCROLLS."""

    data: str | None = None
    """File, folder or archive of .jsonl files; default: data/scrolls, then the official data set."""
    split: str | None = None
    """valid, test or train; default: the first of them that exists."""
    length: Positive | None = None
    """Maximum tokens of prompt and answer together; default: the model's context."""
    cut: CutRule = "end"
    """What longer documents lose: their "end" (as in SCROLLS), "middle" or "start"."""
    new_tokens: Positive | None = None
    """Maximum tokens per answer; default: chosen for the set."""
    samples: Positive | None = None
    """Questions to ask, spread evenly over all; default: all."""
    short: Positive = 512
    """Window length for perplexity of the same documents at short context."""


class Scrolls(EvaluationTask):
    """Questions about long documents."""

    name = "scrolls"
    idea = "SCROLLS by generation: scrolls:qasper, contract_nli, narrative_qa, quality, qmsum, ..."
    options_class = ScrollsOptions
    options: ScrollsOptions
    headline = "score"
    metrics = (*SCORES, PERPLEXITY, COUNTS)
    parts = tuple(DATASETS)
    part: str
    mixes_lengths = True

    def check_scoring(self) -> None:
        if DATASETS[self.part].metric == "rouge":
            metrics.require_rouge()

    def check_data(self) -> None:
        if not hasattr(self, "examples"):
            self.examples = load_examples(self.part, self.options.data, self.options.split)
            check_names(self.examples.items)

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        options = self.options
        self.check_data()
        self.new_tokens = options.new_tokens or DATASETS[self.part].new_tokens
        self.length = options.length or evaluated.context
        if self.length is None:
            raise ValueError("Task 'scrolls': the model states no context; give length=TOKENS.")
        writer = PromptWriter(self.part, PieceTokenizer(evaluated.tokenizer), options.cut)
        items = spread(self.examples.items, options.samples)
        self.check_room(writer, items)
        units = []
        for item in items:
            prompt = writer.write(item, self.length - self.new_tokens)
            content = {"item": item, "prompt": prompt}
            units.append(Unit(key=item.id, length=len(prompt.tokens) + self.new_tokens, content=content))
        documents = [writer.document(text) for text in dict.fromkeys(item.document for item in items)]
        # full windows if there are any; short documents are read as they are
        long = [tokens for tokens in documents if len(tokens) > options.short]
        judged = long or [tokens for tokens in documents if len(tokens) > 1]
        if judged:
            units.append(Unit(key=SHORT_KEY, length=options.short, rows=SHORT_WINDOWS, content=judged))
        return units

    def check_room(self, writer: PromptWriter, items: list[Item]) -> None:
        """Raise ValueError if the length does not fit every question, an answer and part of its document."""
        needed, longest = max((writer.needed(item) + self.new_tokens, item.id) for item in items)
        assert self.length is not None
        if self.length < needed:
            what = f"length={self.length}" if self.options.length else f"the model's context of {self.length}"
            raise ValueError(
                f"Task 'scrolls': {what} has no room for a document: the question {longest!r} takes "
                f"{needed - self.new_tokens - 1} tokens and an answer up to {self.new_tokens}. Give length={needed} or "
                f"more, or fewer new_tokens."
            )

    def identity(self) -> dict[str, Any]:
        found = self.examples
        return {"data": found.digest, "split": found.split, "source": found.source, "length": self.length}

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        asked = [unit for unit in units if unit.key != SHORT_KEY]
        records: dict[str, Record] = {}
        if asked:
            prompts = [unit.content["prompt"] for unit in asked]
            one_line = not DATASETS[self.part].lines
            answers = write_answers(evaluated, [prompt.tokens for prompt in prompts], self.new_tokens, one_line)
            for unit, prompt, answer in zip(asked, prompts, answers, strict=True):
                records[unit.key] = {
                    "prompt_tokens": len(prompt.tokens),
                    "document_tokens": prompt.document_tokens,
                    "cut_tokens": prompt.cut_tokens,
                    "references": list(unit.content["item"].answers),
                    "answer": answer.text.strip(),
                    "answer_stopped": answer.stopped,
                }
        for unit in units:
            if unit.key == SHORT_KEY:
                evaluated.check_table(unit.length)
                documents = [torch.tensor(tokens) for tokens in unit.content]
                found = perplexity(evaluated.model, documents, unit.length, keep_short=True, max_windows=SHORT_WINDOWS)
                records[unit.key] = {
                    "perplexity": found.perplexity,
                    "windows": found.windows,
                    "whole": len(unit.content[0]) > unit.length,
                }
        advance(sum(unit.cost for unit in units))
        return [records[unit.key] for unit in units]

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        asked = [record for record in records if "answer" in record]
        judged = next((record for record in records if "perplexity" in record), None)
        scores = score_answers(self.part, asked)
        bars = bars_of(self.part, asked, scores)
        cut = [record for record in asked if record["cut_tokens"]]
        examples = facts["examples"]
        notes = [
            f"{len(cut)} of {len(asked)} prompts were longer than {examples['length']} tokens with their answer, and "
            f"lost the {self.options.cut} of their documents: {sum(record['cut_tokens'] for record in cut)} of "
            f"{sum(record['document_tokens'] for record in asked)} document tokens in all."
            if cut
            else f"No prompt was longer than {examples['length']} tokens; nothing was cut."
        ]
        # missing in records of earlier versions
        stopped = sum(record.get("answer_stopped", False) for record in asked)
        if stopped:
            limit = self.options.new_tokens or DATASETS[self.part].new_tokens
            notes.append(f"{stopped} of {len(asked)} answers had not ended after {limit} new_tokens, and stop there.")
        if cut and len(cut) < len(asked):
            whole = score_answers(self.part, [record for record in asked if not record["cut_tokens"]])
            scores["score_uncut"] = whole["score"]
            scores["score_cut"] = score_answers(self.part, cut)["score"]
        scores["prompts"] = len(asked)
        scores["prompts_cut"] = len(cut)
        measured = {f"perplexity_{self.options.short}": judged["perplexity"]} if judged else {}
        if judged:
            notes.append(
                f"Short context is judged by the perplexity of the same documents in {judged['windows']} windows of "
                f"{self.options.short} tokens{'' if judged.get('whole', True) else ' or fewer, as short as they are'}."
            )
        metric = DATASETS[self.part].metric
        return Report(
            protocol=[
                f"{self.part}, split {examples['split']} of {examples['source']}: document, question, "
                f"{DATASETS[self.part].answer!r}; greedy decoding with the cache.",
                {
                    "f1": "Score: unigram F1, the best over references, as SCROLLS.",
                    "exact_match": "Score: exact match after normalisation, as SCROLLS.",
                    "rouge": "Score: geometric mean of ROUGE-1, -2, -L (F-measure, best over references), as SCROLLS.",
                }[metric],
            ],
            metrics=scores,
            short=measured,
            notes=notes,
            bars=bars,
        )


def check_names(items: list[Item]) -> None:
    """Raise ValueError for two items with the same id: their records would overwrite each other."""
    places: dict[str, str] = {SHORT_KEY: "a name that is taken"}
    for item in items:
        if item.id in places:
            raise ValueError(
                f"Task 'scrolls': two items are called {item.id!r} ({places[item.id]}; {item.place}); give each "
                f"another id, or choose one file with data=PATH if the folder holds a set twice."
            )
        places[item.id] = item.place


def score_answers(dataset: str, records: list[Record]) -> dict[str, float]:
    """The SCROLLS score in percent as "score", with its components."""
    answers = [record["answer"] for record in records]
    references = [record["references"] for record in records]
    metric = DATASETS[dataset].metric
    if metric == "rouge":
        found = {name: 100 * value for name, value in metrics.rouge(answers, references).items()}
        return {"score": found["rouge_geometric_mean"], **found}
    score = {"f1": metrics.unigram_f1, "exact_match": metrics.exact_match}[metric]
    value = 100 * mean(
        metrics.best(score, answer, allowed) for answer, allowed in zip(answers, references, strict=True)
    )
    return {"score": value, metric: value}


def bars_of(dataset: str, records: list[Record], scores: dict[str, float]) -> list[Bars]:
    """The score by document length in bins of powers of two, and the components of ROUGE."""
    bins: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["document_tokens"]):
        bins.setdefault(max(record["document_tokens"], 1).bit_length(), []).append(record)
    rows = {"all": scores["score"]}
    for bits, inside in bins.items():
        rows[f"{2 ** (bits - 1):,} to {2**bits - 1:,}"] = score_answers(dataset, inside)["score"]
    pictures = [
        Bars(
            title=f"{dataset}: score by length of the document",
            row_label="tokens of the document",
            rows=list(rows),
            value_label="score, per cent (number of questions)",
            values=list(rows.values()),
            counts=[len(records), *map(len, bins.values())],
            most=100.0,
        )
    ]
    if DATASETS[dataset].metric == "rouge":
        pictures.append(
            Bars(
                title=f"{dataset}: ROUGE",
                row_label="measure",
                rows=[name.replace("_", " ") for name in scores if name != "score"],
                value_label="F-measure, per cent",
                values=[value for name, value in scores.items() if name != "score"],
                most=100.0,
            )
        )
    return pictures


def spread(items: list[Any], count: int | None) -> list[Any]:
    """At most `count` items, spread evenly over all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]
