"""Prompts: exact to the token for any tokenizer, things hidden where they were asked for."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import SENTENCES, bpe_tokenizer, tokenizer_with_start

from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import PieceTokenizer
from equitape.tasks.haystack import Filler, Hidden, PromptMaker, TooShortError, hide
from equitape.tasks.needle_kinds import COMMON, KINDS, word_list

TOKENIZERS = {"bytes": byte_tokenizer, "bpe": bpe_tokenizer, "start": tokenizer_with_start}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("\n\n".join(f"Paragraph {number}\nof {SENTENCES * (number % 4 + 1)}" for number in range(30)))
    return str(path)


@pytest.mark.parametrize("source", ["noise", "text"])
def test_prompts_have_exactly_the_tokens_asked_for(tokenizer, source, text):
    maker = PromptMaker(tokenizer, text if source == "text" else source)
    for length in (300, 301, 302, 303, 500, 1111):
        prompt = maker.build(length, "Open.\n", [Hidden(text="A key.\n", depth=0.4)], "What?", Random(length))
        assert len(prompt) == length
        assert all(type(token) is int for token in prompt)


def test_a_mark_in_front_counts_too():
    tokenizer = tokenizer_with_start()
    maker = PromptMaker(tokenizer, "noise")
    assert maker.beginning == [0]
    prompt = maker.build(100, "A man", [], "table", Random(0))
    assert prompt[0] == 0
    assert 0 not in prompt[1:]
    assert PromptMaker(byte_tokenizer(), "noise").beginning == []


def test_a_length_below_the_prompts_own_size_is_refused():
    maker = PromptMaker(byte_tokenizer(), "noise")
    hidden = [Hidden(text="x" * 10, depth=0.5)]
    assert len(maker.build(23, "12345", hidden, "12345678", Random(0))) == 23
    with pytest.raises(TooShortError, match=r"A prompt of 22 tokens cannot be made.*take 23.*23 or more"):
        maker.build(22, "12345", hidden, "12345678", Random(0))


@settings(max_examples=60, deadline=None)
@given(
    borders=st.lists(st.integers(1, 49), unique=True),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_hiding_keeps_everything_and_uses_the_nearest_border(borders, depths):
    tokens, borders = list(range(50)), sorted({0, 50, *borders})
    pieces = [([1000 + number], depth) for number, depth in enumerate(depths)]
    result = hide(tokens, borders, pieces)
    assert [token for token in result if token < 1000] == tokens
    for number, depth in enumerate(depths):
        place = sum(token < 1000 for token in result[: result.index(1000 + number)])
        assert place in borders
        assert abs(place - depth * 50) == min(abs(border - depth * 50) for border in borders)


def test_filler_ends_with_a_line_and_begins_anywhere(text):
    encode = PieceTokenizer(byte_tokenizer())
    for source in ("noise", text):
        filler = Filler(source, encode)
        tokens, borders = filler.draw(777, Random(3))
        assert len(tokens) == 777
        assert borders[0] == 0
        assert borders[-1] == 777
        assert bytes(tokens).endswith(b"\n")
        assert all(bytes(tokens[:border]).endswith(b"\n") for border in borders[1:])
    starts = {bytes(filler.draw(900, Random(seed))[0]) for seed in range(10)}
    assert len(starts) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_needles_of_every_kind(kind, tokenizer):
    maker = PromptMaker(tokenizer, "noise")
    sizes = {"bytes": (2500, 9000), "other": (900, 4096)}
    for length in sizes["bytes" if len(tokenizer) == 258 else "other"]:
        example = KINDS[kind](maker, length, 0.3, Random(1))
        again = KINDS[kind](maker, length, 0.3, Random(1))
        other = KINDS[kind](maker, length, 0.3, Random(2))
        assert len(example.tokens) == length
        assert example == again
        assert example.references != other.references
        assert len(set(example.references)) == len(example.references)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_is_in_the_prompt(kind):
    tokenizer = byte_tokenizer()
    maker = PromptMaker(tokenizer, "noise")
    example = KINDS[kind](maker, 3000, 0.5, Random(5))
    text = tokenizer.decode(example.tokens)
    counts = {"single": 1, "multikey": 1, "multivalue": 4, "multiquery": 4, "variables": 5, "common_words": 10}
    assert len(example.references) == counts[kind]
    assert all(reference in text for reference in example.references)
    needles = {"single": 1, "multikey": 4, "multivalue": 4, "multiquery": 4}
    if kind in needles:
        assert text.count("One of the special magic numbers for ") == needles[kind]
        question = text[text.index("What ") :]
        # every key asked for leads to the numbers expected, and no other does
        keys = [line for line in text.splitlines() if line.startswith("One of")]
        asked = [
            key.split(" is: ")[1].rstrip(".") for key in keys if key.split(" for ")[1].split(" is: ")[0] in question
        ]
        assert sorted(asked) == sorted(example.references)
    if kind == "variables":
        lines = [line for line in text.splitlines() if line.startswith("VAR ")]
        assert [line.split()[1] for line in lines] == example.references
        assert lines[0].split(" = ")[1] in text[text.index("Question") :]
        assert [line.split(" = VAR ")[1] for line in lines[1:]] == example.references[:-1]


def test_a_single_needle_lies_at_its_depth():
    tokenizer = byte_tokenizer()
    maker = PromptMaker(tokenizer, "noise")
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        text = tokenizer.decode(KINDS["single"](maker, 8000, depth, Random(0)).tokens)
        begin, end = text.index("afterwards.\n"), text.index("What is")
        places.append((text.index("One of the special") - begin) / (end - begin))
    assert places == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0], abs=0.03)


@pytest.mark.parametrize("entries", [40, 60, 200, 601, 2000])
def test_common_words_are_the_most_common(entries):
    words, common = word_list(entries, Random(entries))
    assert len(words) == entries
    assert len(common) == COMMON
    counts = {word: words.count(word) for word in set(words)}
    rest = [count for word, count in counts.items() if word not in common]
    assert min(counts[word] for word in common) > max(rest)
    if entries == 2000:
        assert {counts[word] for word in common} == {30}
        assert max(rest) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_needles_refuse_what_is_too_short(kind):
    maker = PromptMaker(byte_tokenizer(), "noise")
    with pytest.raises(TooShortError, match="A prompt of 50 tokens cannot be made") as error:
        KINDS[kind](maker, 50, 0.5, Random(0))
    # what it says would do, does, and so does all that is longer
    for length in range(error.value.needed, error.value.needed + 60, 3):
        assert len(KINDS[kind](maker, length, 0.5, Random(0)).tokens) == length
