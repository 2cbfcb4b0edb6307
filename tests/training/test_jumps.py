"""Ids that jump ahead while training."""

import numpy as np
import pytest
import torch

from equitape.training.checked import check_recipe
from equitape.training.jumps import Jumps, draw_jumps
from equitape.training.recipe import load_recipe, parse_recipe, resolved
from equitape.training.run import execute, single_run

TOKENS = torch.randint(0, 13, (400, 50), generator=torch.Generator().manual_seed(0))
NUMBERS = range(400)


def test_rate_and_sizes():
    jumps = draw_jumps(Jumps(rate=0.1, size=2.0), 0, 0, NUMBERS, TOKENS)
    assert jumps.shape == TOKENS.shape
    assert jumps.dtype == torch.long
    drawn = jumps[jumps > 0]
    # 20,000 tokens: the standard deviation of the rate is 0.002, that of the mean size 29 / sqrt(2000)
    assert (jumps > 0).double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert drawn.min() >= 1
    assert drawn.max() <= 100
    assert drawn.double().mean().item() == pytest.approx(50.5, abs=3)


def test_log_sizes_are_mostly_small():
    jumps = draw_jumps(Jumps(rate=0.5, size=2.0, shape="log"), 0, 0, NUMBERS, TOKENS)
    drawn = jumps[jumps > 0]
    assert drawn.max() <= 100
    # half of the logarithms lie below log(10)
    assert (drawn < 10).double().mean().item() == pytest.approx(0.5, abs=0.02)


def test_an_example_has_its_jumps_whatever_the_batch():
    settings = Jumps(rate=0.3, stretch=3)
    together = draw_jumps(settings, 5, 0, NUMBERS, TOKENS)
    for number in (0, 7, 399):
        assert torch.equal(draw_jumps(settings, 5, 0, [number], TOKENS[number : number + 1])[0], together[number])
    assert not torch.equal(draw_jumps(settings, 6, 0, NUMBERS, TOKENS), together)


def test_an_example_draws_from_a_generator_of_its_own():
    jumps = draw_jumps(Jumps(rate=0.3, size=1.0, stretch=4), 5, 60, [3, 8, 3], TOKENS[:3])
    for number, found in zip([3, 8, 3], jumps, strict=True):
        random = np.random.Generator(np.random.Philox(key=[5, number]))
        step = random.integers(4)
        falls, sizes = random.random((2, 60))[:, :50]
        expected = np.where(falls < 0.3, np.floor(sizes * 60 + 1), 0)
        expected[1:] += step
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("more", [{}, {"shape": "log"}, {"total": 0.5}, {"after": [10, 12]}, {"restart": [10, 12]}])
def test_jumps_do_not_depend_on_how_a_batch_is_padded(more, tmp_path):
    """Rows of addition have many lengths, and a micro-batch is padded to its longest."""
    losses_of = {}
    for parts in (1, 4):
        given = recipe("rope", jumps={"rate": 0.5, **more}, gradient_accumulation_steps=parts)
        losses_of[parts] = losses(check_recipe(given), "rope", tmp_path / str(parts))
    assert losses_of[4] == pytest.approx(losses_of[1], abs=1e-5)


def test_jumps_only_after_given_tokens():
    jumps = draw_jumps(Jumps(rate=1.0, after=(3, 4)), 0, 0, NUMBERS, TOKENS)
    allowed = torch.zeros_like(TOKENS, dtype=torch.bool)
    allowed[:, 1:] = (TOKENS[:, :-1] == 3) | (TOKENS[:, :-1] == 4)
    assert torch.equal(jumps > 0, allowed)


def test_jumps_restart_at_given_tokens():
    """a b c + a b c d = a b: each number is spread alike, and apart from the one before it by a size of its own."""
    plus, equals, digit = 10, 12, 1
    row = [digit] * 3 + [plus] + [digit] * 4 + [equals] + [digit] * 2
    settings = Jumps(rate=0.5, size=5.0, restart=(plus, equals))
    jumps = draw_jumps(settings, 0, 0, range(200), torch.tensor([row] * 200))
    first, second, third = jumps[:, :3], jumps[:, 4:8], jumps[:, 9:]
    assert torch.equal(first, second[:, :3])
    assert torch.equal(first[:, :2], third)
    assert (first > 0).double().mean().item() == pytest.approx(0.5, abs=0.07)
    assert (jumps[:, [3, 8]] > 0).all()
    assert (jumps[:, 3] != jumps[:, 8]).double().mean() > 0.9


def test_jumps_after_tokens_cannot_restart():
    with pytest.raises(ValueError, match="after and restart are both set"):
        Jumps(after=(10,), restart=(12,))


def test_the_jumps_of_a_row_have_a_limit_together():
    free = draw_jumps(Jumps(rate=0.2, size=1.0), 0, 0, NUMBERS, TOKENS)
    limited = draw_jumps(Jumps(rate=0.2, size=1.0, total=3.0), 0, 0, NUMBERS, TOKENS)
    assert (free.sum(1) > 150).any()
    assert torch.equal(limited.cumsum(1), free.cumsum(1).clamp(max=150))


def test_stretch_is_one_step_for_a_row():
    jumps = draw_jumps(Jumps(rate=0.0, stretch=3), 0, 0, NUMBERS, TOKENS)
    assert (jumps[:, 0] == 0).all()
    assert (jumps[:, 1:] == jumps[:, 1:2]).all()
    assert set(jumps[:, 1].tolist()) == {0, 1, 2}


def recipe(*encodings, **train):
    return parse_recipe(
        {
            "task": {"name": "addition", "trained_digits": 2, "tested_digits": 3, "samples": 2},
            "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            "encodings": list(encodings),
            "train": {"steps": 6, "batch_size": 4, "save_steps": 2, **train},
        }
    )


def losses(checked, label, directory):
    return [loss for _, loss in execute(checked, label, 0, directory, resume=directory.exists()).log]


def test_jumps_belong_to_an_encoding_or_to_all(tmp_path):
    jumps = {"rate": 0.5}
    of_one = recipe("rope", {"kind": "rope", "label": "jumping", "jumps": jumps})
    assert [choice.jumps for choice in of_one.choices] == [None, Jumps(rate=0.5)]
    of_all = recipe("rope", {"kind": "rope", "label": "plain", "jumps": None}, jumps=jumps)
    assert [choice.jumps for choice in of_all.choices] == [Jumps(rate=0.5), None]
    for given in (of_one, of_all):
        for choice in given.choices:
            alone = single_run(given, choice.label, 0)
            assert parse_recipe(resolved(alone)).choices[0].jumps == choice.jumps
    found = [losses(check_recipe(of_one), label, tmp_path / label) for label in ("rope", "jumping")]
    assert found[0] != found[1]
    again = losses(check_recipe(of_all), "rope", tmp_path / "all")
    assert again == found[1]


def test_an_interrupted_run_goes_on_with_the_same_jumps(tmp_path, monkeypatch):
    checked = check_recipe(recipe({"kind": "tape", "move": True}, jumps={"rate": 0.5, "stretch": 2}))
    whole = losses(checked, "tape", tmp_path / "whole")
    seen = []

    def stop(self, *args, **kwargs):
        seen.append(1)
        if len(seen) > 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    from equitape.training.trainer import EquitapeTrainer

    step = EquitapeTrainer.training_step
    monkeypatch.setattr(EquitapeTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        losses(checked, "tape", tmp_path / "cut")
    monkeypatch.undo()
    assert losses(checked, "tape", tmp_path / "cut") == whole


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("nope", "does not read position ids"),
        ("cope", "does not read position ids"),
        ("path", "does not read position ids"),
        ("learned", "has a fixed number of positions"),
        ("randpe", "has a fixed number of positions"),
    ],
)
def test_encodings_that_cannot_jump_are_refused(encoding, message):
    with pytest.raises(ValueError, match=message):
        check_recipe(recipe(encoding, jumps={"rate": 0.1}))


def test_wrong_jumps_are_refused():
    for given, message in (({"rate": 2.0}, "rate is 2.0"), ({"size": 0}, "size is 0"), ({"rat": 0.1}, "'rat'")):
        with pytest.raises(ValueError, match=message):
            recipe("rope", jumps=given)


def test_jumps_by_the_command_line():
    assert load_recipe("addition-20", ["train.jumps.rate=0.06", "train.jumps.shape=log"]).train.jumps == Jumps(
        rate=0.06, shape="log"
    )
