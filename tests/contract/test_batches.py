"""Padded, packed and separate runs agree in values and in gradients."""

from functools import cache

import pytest
import torch

from cases import CASES, build, draw_tokens, gap

DETERMINISTIC = [case for case in CASES if "sampled" not in case]
LENGTHS = (5, 9, 12)
# FlexAttention's masks take seconds to compile, and the other kinds reach it by the same way as these
PATHS = [
    (case, implementation)
    for case in DETERMINISTIC
    for implementation in ("eager", "sdpa", "flex_attention")
    if implementation != "flex_attention" or case in ("rope", "alibi", "t5", "fire", "tape")
]


def results(model, rows, run):
    """Logits of every sequence, and the gradients of their summed loss (none where FlexAttention runs on the CPU)."""
    model.zero_grad()
    backward = model.config._attn_implementation != "flex_attention"
    with torch.set_grad_enabled(backward):
        logits = run()
    if backward:
        loss_of(logits, rows).backward()
    return [part.detach() for part in logits], gradients(model)


@cache
def separate_rows(case):
    """Of the rows that the tests of padding and packing join."""
    return separate(build(case), rows_of())


def separate(model, rows):
    return results(model, rows, lambda: [model(row[None], use_cache=False).logits[0] for row in rows])


def loss_of(logits, rows):
    return sum(
        torch.nn.functional.cross_entropy(part[:-1], row[1:], reduction="sum")
        for part, row in zip(logits, rows, strict=True)
    )


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, limit=1e-9):
    logits, grads = found
    for part, other in zip(logits, expected[0], strict=True):
        assert gap(part, other) < limit
    assert not grads or grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        assert gap(grad, expected[1][name]) < limit, name


def rows_of(lengths=LENGTHS):
    return [draw_tokens(1, length, seed=length)[0] for length in lengths]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("case", "implementation"), PATHS)
def test_padded_equals_unpadded(case, side, implementation):
    model, rows, expected = build(case), rows_of(), separate_rows(case)
    model.set_attn_implementation(implementation)
    width = max(LENGTHS)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[index, place], mask[index, place] = row, 1

    def padded():
        output = model(tokens, attention_mask=mask, use_cache=False).logits
        assert torch.isfinite(output).all()
        return [output[index][mask[index].bool()] for index in range(len(rows))]

    assert_same(results(model, rows, padded), expected)


@pytest.mark.parametrize(("case", "implementation"), PATHS)
def test_packed_equals_separate(case, implementation):
    model, rows, expected = build(case), rows_of(), separate_rows(case)
    model.set_attn_implementation(implementation)
    packed = torch.cat(rows)[None]
    # numbers of segments carry no order
    segments = torch.cat([torch.full((len(row),), 7 - index) for index, row in enumerate(rows)])[None]

    def in_one_row():
        return list(model(packed, segment_ids=segments).logits[0].split([len(row) for row in rows]))

    assert_same(results(model, rows, in_one_row), expected)


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_packing_is_inferred_from_ids_that_restart(case):
    model = build(case)
    rows = rows_of()
    packed = torch.cat(rows)[None]
    ids = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with torch.no_grad():
        output = model(packed, position_ids=ids).logits[0]
        for part, row in zip(output.split([len(row) for row in rows]), rows, strict=True):
            assert gap(part, model(row[None]).logits[0]) < 1e-9


@pytest.mark.parametrize("case", ["rope", "tape", "alibi", "learned"])
def test_packed_rows_may_be_padded_too(case):
    model = build(case)
    rows = rows_of()
    packed = torch.zeros(2, 20, dtype=torch.long)
    segments, mask = torch.zeros_like(packed), torch.zeros_like(packed)
    packed[0, :14], segments[0, 5:14], mask[0, :14] = torch.cat((rows[0], rows[1])), 1, 1
    packed[1, 8:20], mask[1, 8:20] = rows[2], 1
    with torch.no_grad():
        output = model(packed, segment_ids=segments, attention_mask=mask).logits
        for part, row in ((output[0, :5], rows[0]), (output[0, 5:14], rows[1]), (output[1, 8:], rows[2])):
            assert gap(part, model(row[None]).logits[0]) < 1e-9
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("case", ["rope", "tape", "t5"])
def test_sliding_window_packed_and_padded(case):
    model = build(case, sliding_window=4)
    whole = build(case)
    rows = rows_of()
    expected = [model(row[None], use_cache=False).logits[0] for row in rows]
    assert gap(expected[2], whole(rows[2][None]).logits[0]) > 1e-4
    segments = torch.cat([torch.full((len(row),), index) for index, row in enumerate(rows)])[None]
    packed = model(torch.cat(rows)[None], segment_ids=segments).logits[0].split([len(row) for row in rows])
    for part, other in zip(packed, expected, strict=True):
        assert gap(part, other) < 1e-9


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_logits_of_padding_on_the_right_are_those_of_the_mask(case):
    """As transformers' test_left_padding_compatibility: the last column, padding in all rows but one, with more padding."""
    model = build(case)
    tokens = draw_tokens(6, 6)
    mask = torch.tril(torch.ones_like(tokens))
    more = torch.zeros(6, 8, dtype=torch.long)

    def last(tokens, mask):
        ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return model(tokens, attention_mask=mask, position_ids=ids, use_cache=False).logits[:, -1]

    with torch.no_grad():
        plain, padded = last(tokens, mask), last(torch.cat((more, tokens), 1), torch.cat((more, mask), 1))
    assert gap(plain, padded) < 1e-9


@pytest.mark.parametrize("case", ["rope", "alibi", "tape", "tape2"])
def test_training_drops_the_mask_over_padding_on_the_right(case):
    model = build(case).train()
    rows = rows_of()
    expected = separate(model, rows)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)

    def padded():
        output = model(tokens, attention_mask=mask, use_cache=False).logits
        return [part[: len(row)] for part, row in zip(output, rows, strict=True)]

    assert_same(results(model, rows, padded), expected)


def test_an_exported_model_follows_the_mask_as_the_model_does():
    """Also at padding: an export cannot read the mask, and keeps it."""
    model, tokens = build("tape"), draw_tokens(2, 6)
    inputs = {"input_ids": tokens, "attention_mask": torch.tensor([[1] * 6, [1] * 2 + [0] * 4]), "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(model, (), inputs, strict=False).module()
        assert gap(exported(**inputs).logits, model(**inputs).logits) < 1e-12
