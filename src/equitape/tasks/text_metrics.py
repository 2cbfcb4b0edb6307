"""Scores of answers, from 0 to 1, by the definitions that the benchmarks publish.

- F1 and exact match are SQuAD's, as in SCROLLS: small letters, without punctuation and articles; the best over all
  references.
- ROUGE is that of the package rouge-score without stemming, as in SCROLLS (its published metric has `use_stemmer` off):
  for each of ROUGE-1, -2 and -L the F-measure, the best over all references, each chosen for itself; then the mean over
  examples; and of these three means the geometric mean.
- What an answer contains is RULER's.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """SQuAD's form of an answer."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both are equal after normalisation."""
    return float(normalize(answer) == normalize(reference))


def unigram_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words; 0 if none is shared."""
    given, wanted = normalize(answer).split(), normalize(reference).split()
    shared = sum((Counter(given) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The highest score over all references."""
    return max(score(answer, reference) for reference in references)


def contained_share(answer: str, references: Sequence[str]) -> float:
    """RULER's score: the share of the references that occur in the answer, ignoring case."""
    found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found)


def require_rouge() -> None:
    """Raise ValueError if the package that computes ROUGE is missing."""
    try:
        import rouge_score  # noqa: F401
    except ImportError:
        raise ValueError(
            'ROUGE needs the package rouge-score; install it with pip install "equitape[eval]". Answers can be made '
            "without it, by --no-score, and scored later, by --rescore, where it is installed."
        ) from None


def rouge(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean F-measures of ROUGE-1, -2, -L over examples, and their geometric mean, all from 0 to 1."""
    require_rouge()
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_TYPES), use_stemmer=False)
    best_of: dict[str, list[float]] = {name: [] for name in ROUGE_TYPES}
    for answer, allowed in zip(answers, references, strict=True):
        scores = [scorer.score(reference, answer) for reference in allowed]
        for name in ROUGE_TYPES:
            best_of[name].append(max(score[name].fmeasure for score in scores))
    means = {name: math.fsum(values) / len(values) for name, values in best_of.items()}
    return {**means, "rouge_geometric_mean": math.prod(means.values()) ** (1 / len(means))}
