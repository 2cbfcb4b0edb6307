"""Scores on examples worked by hand, on the one the benchmark publishes, and against an oracle of our own."""

import math
import random
import re
import sys

import pytest

from equitape.tasks import text_metrics as metrics

# from the description of the metric that the authors of SCROLLS publish
PREDICTIONS = ["exact match example", "hello there", "general kenobi"]
REFERENCES = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]


def mean_best(score):
    return sum(metrics.best(score, p, r) for p, r in zip(PREDICTIONS, REFERENCES, strict=True)) / 3


def test_the_published_example():
    assert round(100 * mean_best(metrics.exact_match), 4) == 33.3333
    assert round(100 * mean_best(metrics.unigram_f1), 4) == 72.2222


def test_the_published_example_of_rouge():
    pytest.importorskip("rouge_score")
    found = {name: round(100 * value, 4) for name, value in metrics.rouge(PREDICTIONS, REFERENCES).items()}
    assert found == {"rouge1": 72.2222, "rouge2": 33.3333, "rougeL": 72.2222, "rouge_geometric_mean": 55.8136}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, a dog!", "cat dog"),
        ("An apple a-day", "apple aday"),
        ("theatre and anthem", "theatre and anthem"),
        ("a the an", ""),
        ("It's 3.5%", "its 35"),
    ],
)
def test_normalisation(text, expected):
    assert metrics.normalize(text) == expected


def test_f1_by_hand():
    # 3 words shared of 4 given and 5 wanted: P = 3/4, R = 3/5, F = 2 * .45 / 1.35
    assert metrics.unigram_f1("red green blue green", "green blue red yellow black") == pytest.approx(2 / 3)
    # a word counts as often as both have it
    assert metrics.unigram_f1("yes yes yes", "yes no") == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    # twice in both: P = 2/3, R = 1
    assert metrics.unigram_f1("yes yes no", "yes yes") == pytest.approx(0.8)
    assert metrics.unigram_f1("", "yes") == 0
    assert metrics.unigram_f1("the", "a") == 0
    assert metrics.exact_match("The answer.", "answer") == 1
    assert metrics.exact_match("answers", "answer") == 0


def test_contained_share_by_hand():
    assert metrics.contained_share("it was ABC, and 12345678", ["abc", "1234567", "xyz"]) == pytest.approx(2 / 3)
    assert metrics.contained_share("", ["a"]) == 0


def words(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def f_measure(shared, given, wanted):
    return 2 * shared / (given + wanted) if shared else 0.0


def ngram_f(answer, reference, n):
    grams = [[tuple(w[i : i + n]) for i in range(len(w) - n + 1)] for w in (words(answer), words(reference))]
    shared = sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in set(grams[0]))
    return f_measure(shared, len(grams[0]), len(grams[1]))


def longest_f(answer, reference):
    a, b = words(answer), words(reference)
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    return f_measure(table[-1][-1], len(a), len(b))


def test_rouge_against_its_definition():
    """Best over references for each kind by itself, mean over examples, and only then the geometric mean."""
    pytest.importorskip("rouge_score")
    draw = random.Random(0)
    vocabulary = ["running", "runs", "run", "cat", "cats", "sat", "on", "mat,", "The", "mats.", "12", "a-b"]

    def text():
        return " ".join(draw.choices(vocabulary, k=draw.randint(1, 12)))

    answers = [text() for _ in range(20)]
    references = [[text() for _ in range(draw.randint(1, 3))] for _ in range(20)]
    kinds = {
        "rouge1": lambda a, r: ngram_f(a, r, 1),
        "rouge2": lambda a, r: ngram_f(a, r, 2),
        "rougeL": longest_f,
    }
    expected = {
        name: sum(max(score(a, r) for r in allowed) for a, allowed in zip(answers, references, strict=True)) / 20
        for name, score in kinds.items()
    }
    found = metrics.rouge(answers, references)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name
    assert found["rouge_geometric_mean"] == pytest.approx(math.prod(expected.values()) ** (1 / 3))


def test_rouge_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ValueError, match=r'pip install "equitape\[eval\]".*--rescore'):
        metrics.rouge(["a"], [["a"]])
