"""The construction of docs/explanation/theory.md against permutations multiplied one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equitape.tasks import build_task
from equitape.theory import (
    BEGIN,
    COMPONENTS,
    GATHERED_HEAD,
    OWN_HEAD,
    PRODUCT_ROWS,
    SHARPNESS,
    SWAPS,
    WordProblem,
    reflection_vectors,
    solved_weights,
)

CONSTRUCTION = WordProblem()


def draw_words(count, letters, seed=0):
    drawn = torch.randint(0, len(SWAPS), (count, letters), generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.full((count, 1), BEGIN), drawn), dim=1)


def multiply(word):
    """The permutation after every letter, the new one applied first: lists of images of the points 0 to 4."""
    product, products = list(range(5)), []
    for letter in word:
        if letter != BEGIN:
            a, b = SWAPS[letter]
            product[a], product[b] = product[b], product[a]
        products.append(product.copy())
    return products


def check(words, trace):
    """Every prefix of every word: its permutation and whether it is the identity."""
    images = torch.tensor([multiply(word) for word in words.tolist()])
    expected = torch.nn.functional.one_hot(images, 5).mT.double()
    assert torch.allclose(trace.products, expected, atol=1e-11, rtol=0)
    assert torch.equal(trace.is_identity, (images == torch.arange(5)).all(-1).double())


@pytest.mark.parametrize(("count", "letters"), [(1, 0), (10, 1), (300, 2), (300, 12), (100, 60), (12, 200), (3, 512)])
def test_every_prefix_of_random_words(count, letters):
    words = draw_words(count, letters, seed=letters)
    check(words, CONSTRUCTION(words))


@given(st.lists(st.integers(0, 9), max_size=24))
@settings(max_examples=60, deadline=None)
def test_a_word_and_its_way_back_is_the_identity(letters):
    words = torch.tensor([[BEGIN, *letters, *reversed(letters)]])
    trace = CONSTRUCTION(words)
    check(words, trace)
    assert trace.is_identity[0, -1] == 1


def test_long_words_that_return():
    """Random words of 512 letters return seldom; these do so at the very end, and one letter later do not."""
    there = draw_words(4, 256)[:, 1:]
    words = torch.cat((torch.full((4, 1), BEGIN), there, there.flip(1)), dim=1)
    trace = CONSTRUCTION(words)
    check(words, trace)
    assert (trace.is_identity[:, -1] == 1).all()
    assert (trace.is_identity[:, 256] == 0).any()


def test_products_agree_with_the_task():
    """The labels of the task s5, made by another table and another way of multiplying."""
    task = build_task("s5", {"generators": "transpositions", "trained_steps": 40, "tested_steps": 41})
    tokens, labels = task.draw(30, torch.Generator().manual_seed(0))
    letter_of = {}
    for letter, (a, b) in enumerate(SWAPS):
        images = list(range(5))
        images[a], images[b] = b, a
        letter_of[task.elements.index(tuple(images))] = letter
    words = torch.tensor([[BEGIN, *(letter_of[token] for token in row[1:-1])] for row in tokens.tolist()])
    products = CONSTRUCTION(words).products[:, 1:]
    expected = torch.tensor([[task.elements[label] for label in row[2:]] for row in labels.tolist()])
    assert torch.equal(products.argmax(-2), expected)


def test_scores_of_the_last_block_separate_the_identity_by_half_a_point():
    words = draw_words(200, 30)
    score = CONSTRUCTION(words).scores[3][:, GATHERED_HEAD, :, 0]
    place = torch.arange(1, 32)
    for row, word in enumerate(words.tolist()):
        for column, images in enumerate(multiply(word)):
            dot = sum((point + 1) * (image + 1) for point, image in enumerate(images))
            assert dot == 55 if images == list(range(5)) else dot <= 54
            found = score[row, column] * place[column] / SHARPNESS
            assert math.isclose(found, dot - 54.5, abs_tol=1e-9)


def random_turn(seed):
    matrix = torch.randn(COMPONENTS, COMPONENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(matrix).Q


@pytest.mark.parametrize("seed", range(3))
def test_turning_the_start_turns_the_state_and_changes_no_score(seed):
    words, turn = draw_words(5, 120, seed), random_turn(seed)
    plain, turned = CONSTRUCTION(words), CONSTRUCTION(words, turn=turn)
    for before, after in zip(plain.scores, turned.scores, strict=True):
        assert torch.allclose(before, after, atol=1e-12 * max(1.0, before.abs().max().item()), rtol=0)
    for before, after in zip(plain.states, turned.states, strict=True):
        assert torch.allclose(before @ turn, after, atol=1e-11, rtol=0)
        # a state that a turn leaves alone would prove nothing
        assert not torch.allclose(before, after, atol=0.1)
    assert torch.equal(plain.is_identity, turned.is_identity)
    assert torch.allclose(plain.products, turned.products, atol=1e-11, rtol=0)


def test_permuting_tokens_and_mask_permutes_the_outputs():
    words = draw_words(5, 60)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(61, 61).tril()[order][:, order]
    plain, permuted = CONSTRUCTION(words), CONSTRUCTION(words[:, order], mask=mask)
    assert torch.equal(plain.is_identity[:, order], permuted.is_identity)
    assert torch.allclose(plain.products[:, order], permuted.products, atol=1e-11, rtol=0)


def test_the_state_holds_the_transposed_product_over_the_number_of_tokens():
    words = draw_words(3, 20)
    trace = CONSTRUCTION(words)
    matrices = trace.states[3][:, GATHERED_HEAD, :, PRODUCT_ROWS]
    scaled = matrices * torch.arange(1, 22)[:, None, None]
    assert torch.allclose(scaled[..., :5, :5].mT, trace.products, atol=1e-12)
    sixth = torch.nn.functional.one_hot(torch.tensor(5), 6).double()
    assert torch.allclose(scaled[..., 5, :], sixth, atol=1e-12)
    assert torch.allclose(scaled[..., :, 5], sixth, atol=1e-12)


# what the page says about the printed proof


def test_the_printed_mask_fails_for_a_single_letter():
    xi = reflection_vectors()[:1]
    scores = xi @ xi.mT
    printed = torch.linalg.inv(torch.eye(1) + torch.ones(1, 1) * scores)
    assert torch.allclose(printed, torch.tensor([[1 / 3]], dtype=torch.float64))
    assert torch.equal(solved_weights(scores[None, None], torch.ones(1, 1).double())[0, 0], torch.eye(1).double())
    swap = torch.eye(6, dtype=torch.float64)
    swap[[0, 1]] = swap[[1, 0]]
    assert torch.equal(torch.eye(6) - xi.mT @ xi, swap)
    assert not torch.allclose(torch.eye(6) - (printed @ xi).mT @ xi, swap, atol=0.5)


def test_the_printed_mask_is_saved_by_a_change_of_sign():
    """The diagonal of the scores is 2 for every letter, so that M * S - I equals I + (M - I) * S; the mark's row is 0."""
    words = draw_words(1, 40)
    xi = torch.cat((reflection_vectors(), torch.zeros(1, 6)))[words[0]]
    scores, mask, unit = xi @ xi.mT, torch.ones(41, 41).double().tril(), torch.eye(41).double()
    other = torch.linalg.solve(mask * scores - unit, xi)
    assert torch.allclose(other, solved_weights(scores, mask) @ xi, atol=1e-11)


def test_the_printed_read_out_is_not_one_for_the_identity():
    """exp(a) / (exp(a) + i - 1) - 1 / i at a = 0.5: above 0 from the second token on, but far from 1, and 0 at the first."""

    def printed(i):
        return min(1.0, max(0.0, math.exp(0.5) / (math.exp(0.5) + i - 1) - 1 / i))

    assert printed(1) == 0
    assert 0 < printed(3) < 0.12
    assert 0 < printed(513) < 0.002


def test_rounds_of_linear_attention_take_the_place_of_the_inverse():
    """k rounds of eta = xi - S eta are right for the first k + 1 letters, and only for those."""
    words = draw_words(20, 12)
    scores = CONSTRUCTION(words).scores[1][:, OWN_HEAD].tril(-1)
    xi = torch.cat((reflection_vectors(), torch.zeros(1, 6)))[words]
    exact = solved_weights(scores, torch.ones(13, 13).double().tril()) @ xi
    eta = xi.clone()
    for rounds in range(12):
        # the mark is a token, too, and its vector is 0
        right = (eta - exact).abs().amax(-1) < 1e-9
        assert right[:, : rounds + 2].all()
        assert rounds > 8 or not right.all()
        eta = xi - scores @ eta
    assert torch.allclose(eta, exact, atol=1e-9)
