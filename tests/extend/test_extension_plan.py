"""Plans of a real model's size, without the model: what a CPU gets, and what a GPU gets."""

from dataclasses import replace

import pytest

from equitape.extend.columns import comparator_settings
from equitape.extend.estimates import Device
from equitape.extend.plan import Text, make_plan
from equitape.extend.settings import ExtendSettings
from equitape.model import EquitapeConfig
from equitape.scale.costs import ModelCosts
from equitape.training.settings import Jumps

CPU = Device(kind="cpu", memory=24 * 2**30, cores=2)
GPU = Device(kind="cuda", memory=140 * 2**30)
MUCH = Text(train=10**8, longest=10**6, joined=10**7)


@pytest.fixture(scope="module")
def smollm2():
    """The sizes of SmolLM2-135M."""
    return EquitapeConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        encoding={"kind": "rope", "theta": 1e5},
    )


def seconds_of(config, plan):
    """(training, measuring two models) on two cores by hand: so many tokens of forward passes, three for a step."""
    costs = ModelCosts(config)

    def forward(length):
        return costs.forward(1, length).total / CPU.rate

    prompts = plan.samples * sum(map(forward, (*plan.lengths, *plan.needle_lengths)))
    longest = max(plan.text_lengths)
    texts = plan.windows * sum(forward(length) * longest / length for length in {*plan.short, *plan.text_lengths})
    return 3 * plan.train.batch_size * forward(plan.row_length), 2 * (prompts + texts)


def test_a_cpu_ends_within_half_an_hour(smollm2):
    """Without a budget: steps that are many enough to learn something, and a small proof."""
    plan = make_plan(smollm2, ExtendSettings(to=16384), MUCH, CPU)
    step, proof = seconds_of(smollm2, plan)
    assert plan.train.steps is not None
    assert plan.train.steps >= 40
    assert plan.train.steps * step + proof < 30 * 60
    assert 16384 in plan.lengths
    assert 16384 in plan.text_lengths
    assert {512, 2048} <= set(plan.short)


def test_minutes_on_a_cpu_make_small_steps(smollm2):
    plan = make_plan(smollm2, ExtendSettings(to=16384, minutes=20), MUCH, CPU)
    step, proof = seconds_of(smollm2, plan)
    assert plan.train.minutes == 20
    assert 20 * 60 / step >= 40
    assert proof < 12 * 60
    asked = ExtendSettings(to=16384, minutes=20, row_length=4096, batch_size=8, samples=2, eval_lengths=(8192, 16384))
    plan = make_plan(smollm2, asked, MUCH, CPU)
    assert (plan.row_length, plan.train.batch_size, plan.samples) == (4096, 8, 2)
    assert plan.lengths == (8192, 16384)


def test_the_policy_follows_the_measurements(smollm2):
    """docs/results/extend-smollm2.md: theta for 8 times the new context, planted facts, about 500 steps."""
    plan = make_plan(smollm2, ExtendSettings(to=65536), MUCH, GPU)
    assert (plan.adapt.method, plan.recall, plan.train.steps) == ("theta+lora", 0.25, 500)
    assert plan.adapt.theta == pytest.approx(1e5 * 64 ** (64 / 62))
    assert plan.adapt.query_growth == 0.05
    shown = {choice.name: choice.value for choice in plan.choices}
    assert shown["query growth"] == "0.05 beyond 8,192 tokens"
    yarn, none = (ExtendSettings(to=65536, **more) for more in ({"method": "yarn+lora"}, {"query_growth": 0.0}))
    assert [make_plan(smollm2, asked, MUCH, GPU).adapt.query_growth for asked in (yarn, none)] == [None, 0]
    grown = EquitapeConfig(**{**smollm2.to_dict(), "query_growth": 0.4, "query_growth_start": 8})
    kept = make_plan(grown, ExtendSettings(to=65536), MUCH, GPU)
    assert kept.adapt.query_growth is None
    assert "The base was trained with 0.4" in str(kept.choices)
    assert comparator_settings("linear", ExtendSettings(to=65536), 0.4).query_growth == 0.4
    few = make_plan(smollm2, ExtendSettings(to=65536, steps=10), MUCH, GPU)
    assert few.adapt.theta == pytest.approx(1e5 * 8 ** (64 / 62))
    asked = make_plan(smollm2, ExtendSettings(to=65536, scaling_factor=16), MUCH, GPU)
    assert asked.adapt.theta == pytest.approx(1e5 * 16 ** (64 / 62))


@pytest.mark.parametrize(("memory", "rows", "measured"), [(45, 8, 38316), (25, 4, 19326)])
def test_memory_is_about_what_an_h200_took(smollm2, memory, rows, measured):
    """MiB at 8 and at 4 rows of 4,096 tokens at a time."""
    settings = ExtendSettings(to=65536, memory=memory)
    plan = make_plan(smollm2, settings, MUCH, GPU)
    assert plan.train.batch_size // plan.train.gradient_accumulation_steps == rows
    reason = next(choice.reason for choice in plan.choices if choice.name == "rows")
    estimate = float(reason.partition("training takes ")[2].split()[0]) * 1024
    assert estimate == pytest.approx(measured, rel=0.06)


def test_the_plan_names_what_is_measured(smollm2):
    plan = make_plan(smollm2, ExtendSettings(to=65536, measure=("passkey",)), MUCH, GPU)
    names = [choice.name for choice in plan.choices]
    assert "passkey at" in names
    assert not {"needles at", "perplexity at"} & set(names)
    everything = make_plan(smollm2, ExtendSettings(to=65536), MUCH, GPU)
    assert {"perplexity at", "passkey at", "needles at"} <= {choice.name for choice in everything.choices}
    quick, long = (each.choices[-1].value for each in (plan, everything))
    assert quick != long


def test_the_plan_says_why_it_measures_less(smollm2):
    """Too little time and too little text are different reasons."""

    def reasons(text=MUCH, **given):
        chosen = make_plan(smollm2, ExtendSettings(**given), text, CPU).choices
        return {choice.name: choice.reason for choice in chosen}

    short = reasons(to=16384, minutes=5, eval_lengths=(8192, 16384, 32768))
    assert "It is small, to suit the minutes" in short["time of the proof"]
    assert "too short" not in short["perplexity at"]
    asked = {"eval_lengths": (16384, 32768), "needle_lengths": (2048,), "text_lengths": (16384, 32768), "samples": 1}
    ample = reasons(replace(MUCH, longest=20000, joined=20000), to=16384, minutes=600, **asked)
    assert "It is small" not in ample["time of the proof"]
    assert "too short for 32,768" in ample["perplexity at"]


def test_jumps_change_only_where_named(smollm2):
    plan = make_plan(smollm2, ExtendSettings(to=65536, jumps={"shape": "uniform"}), MUCH, GPU)
    assert plan.train.jumps == Jumps(rate=2 / 4096, size=15.0, total=15.0, shape="uniform")
    own = comparator_settings("theta+lora@jumps.rate=0.001", ExtendSettings(to=65536, jumps={"shape": "uniform"}))
    assert own.jumps == {"shape": "uniform", "rate": 0.001}
    with pytest.raises(ValueError, match="Did you mean 'shape'"):
        ExtendSettings(to=65536, jumps={"shap": "uniform"})


def test_options_of_tape_reach_the_methods_with_tape(smollm2):
    settings = ExtendSettings(to=65536, method="theta+tape2+lora", tape={"mixer_size": 4})
    assert make_plan(smollm2, settings, MUCH, GPU).adapt.tape["mixer_size"] == 4
    own = comparator_settings("tape2+lora@tape.layers=[0,2],steps=7", settings)
    assert (own.tape, own.steps) == ({"mixer_size": 4, "layers": [0, 2]}, 7)
    plan = make_plan(smollm2, own, MUCH, GPU)
    assert plan.adapt.tape == own.tape
    # methods without TAPE have none
    for name in ("theta+lora", "yarn", "drope"):
        assert comparator_settings(name, settings).tape is None
    few = comparator_settings("theta+lora@lora_targets=[q_proj,k_proj],seed=1", settings)
    assert (few.lora_targets, few.seed) == (("q_proj", "k_proj"), 1)
    with pytest.raises(ValueError, match="does not use tape"):
        make_plan(smollm2, ExtendSettings(to=65536, tape={"mixer_size": 4}), MUCH, GPU)


def blocks_of(config, method="theta+tape2+lora", **given):
    """(layers of TAPE, the plan's line about them)."""
    plan = make_plan(config, ExtendSettings(to=65536, method=method, **given), MUCH, GPU)
    return plan.adapt.tape.get("layers"), {choice.name: choice.value for choice in plan.choices}.get("updates of TAPE")


def test_tape_updates_in_every_fifth_block(smollm2):
    """From the first one, and never in the last, which cannot; in all where that is asked for."""
    fifth = [0, 5, 10, 15, 20, 25]
    for method in ("theta+tape2+lora", "tape", "tape+lora", "yarn+tape+lora"):
        assert blocks_of(smollm2, method) == (fifth, "in 6 of 30 blocks: 0, 5, 10, 15, 20, 25")
    assert blocks_of(smollm2, "theta+lora") == (None, None)
    assert blocks_of(smollm2, tape={"mixer_size": 4})[0] == fifth
    assert blocks_of(smollm2, tape={"layers": "all"}) == ("all", "layers all")
    assert blocks_of(smollm2, tape={"layers": [1, 2]}) == ([1, 2], "layers [1, 2]")

    def with_blocks(count, **more):
        return EquitapeConfig.from_dict({**smollm2.to_dict(), "num_hidden_layers": count, **more})

    found = {count: blocks_of(with_blocks(count))[0] for count in (2, 5, 6, 7, 11, 12)}
    assert found == {2: [0], 5: [0], 6: [0], 7: [0, 5], 11: [0, 5], 12: [0, 5, 10]}
    # as in Gemma 3: blocks with a window have positions of their own
    local = {"sliding_window": 512, "sliding_layers": [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], "local_encoding": "rope"}
    assert blocks_of(with_blocks(13, **local))[0] == [5, 11]
    alone = {"sliding_window": 512, "sliding_layers": [0, 1, 2, 3, 4], "local_encoding": "rope"}
    for config in (with_blocks(1), with_blocks(6, **alone)):
        with pytest.raises(ValueError, match="No block of this base can update TAPE's field"):
            blocks_of(config)
    # trained updates stay where they are
    assert blocks_of(with_blocks(30, encoding={"kind": "tape", "layers": [3, 4]}), "tape+lora")[0] is None


def test_comparators_update_tape_in_every_fifth_block_unless_they_say_otherwise(smollm2):
    def blocks(name, **given):
        settings = comparator_settings(name, ExtendSettings(to=65536, **given))
        return make_plan(smollm2, settings, MUCH, GPU).adapt.tape.get("layers")

    assert blocks("theta+tape2+lora") == blocks("tape-plain") == [0, 5, 10, 15, 20, 25]
    assert blocks("theta+tape2+lora@tape.layers=all") == "all"
    assert blocks("tape+lora", method="theta+tape2+lora", tape={"layers": "all"}) == "all"
    assert blocks("tape+lora@tape.layers=[2]", method="theta+tape2+lora", tape={"layers": "all"}) == [2]


def test_steps_on_a_cpu_are_taken_as_given(smollm2):
    plan = make_plan(smollm2, ExtendSettings(to=16384, steps=3), MUCH, CPU)
    assert (plan.row_length, plan.train.batch_size, plan.train.steps) == (4096, 8, 3)


def test_a_gpu_measures_everything(smollm2):
    plan = make_plan(smollm2, ExtendSettings(to=65536, minutes=10), MUCH, GPU)
    assert plan.lengths == plan.needle_lengths == plan.text_lengths == (8192, 16384, 32768, 65536, 131072)
    assert (plan.row_length, plan.train.batch_size, plan.short) == (4096, 8, (512, 1024, 2048))


@pytest.mark.parametrize(("row_length", "whole"), [(4096, True), (65536, False)])
def test_ends_of_documents_are_left_out_where_they_are_a_tenth_at_most(smollm2, row_length, whole):
    """Documents of 100,000 tokens: rows of 4,096 hold 98 % of them, one of 65,536 holds 66 %."""
    text = Text(train=10**6, longest=10**6, joined=10**6, documents=(100_000,) * 10)
    settings = ExtendSettings(to=131072, row_length=row_length, batch_size=1)
    plan = make_plan(smollm2, settings, text, GPU)
    assert plan.whole_rows is whole
    assert any(choice.name == "ends of documents" for choice in plan.choices) is whole
    # folders of extensions that were made before rows could be whole stay as they are
    assert ("whole_rows" in plan.identity()) is whole
    asked = make_plan(smollm2, ExtendSettings(to=131072, whole_rows=not whole), text, GPU)
    assert asked.whole_rows is not whole


def test_every_value_of_lora_counts(smollm2):
    """Also one that turns LoRA off."""
    plan = make_plan(smollm2, ExtendSettings(to=16384, lora_alpha=0.0, lora_rank=4), MUCH, CPU)
    assert (plan.adapt.lora_alpha, plan.adapt.lora_rank) == (0, 4)
    assert make_plan(smollm2, ExtendSettings(to=16384), MUCH, CPU).adapt.lora_alpha == 16


def test_a_method_that_scales_positions_takes_no_other_scaling(smollm2):
    with pytest.raises(ValueError, match=r"The method yarn\+lora scales positions by yarn; drop the scaling 'linear'"):
        make_plan(smollm2, ExtendSettings(to=16384, method="yarn+lora", scaling="linear"), MUCH, CPU)
    plan = make_plan(smollm2, ExtendSettings(to=16384, method="yarn+lora", scaling="yarn"), MUCH, CPU)
    assert plan.adapt.scaling == "yarn"


@pytest.mark.parametrize("to", [8192 + 1, 16384])
def test_rows_as_long_as_the_new_context_need_no_jumps(smollm2, to):
    plan = make_plan(smollm2, ExtendSettings(to=to, row_length=to), MUCH, CPU)
    reasons = {choice.name: choice.reason for choice in plan.choices}
    assert plan.train.jumps is None
    assert reasons["jumps"] == "The rows are as long as the new context."
    assert reasons["rows"].startswith(
        "You asked for rows longer than the base's context. By the estimate training takes"
    )
    asked = make_plan(smollm2, ExtendSettings(to=to, row_length=to, jumps={"rate": 0.1}), MUCH, CPU)
    assert asked.train.jumps == Jumps(rate=0.1, shape="log")


@pytest.mark.parametrize(
    ("budget", "shown"),
    [({"steps": 1}, "1 step"), ({"minutes": 1.5}, "1.5 minutes"), ({"tokens": 2**21}, "2,097,152 tokens")],
)
def test_the_budget_is_readable(smollm2, budget, shown):
    plan = make_plan(smollm2, ExtendSettings(to=16384, **budget), MUCH, CPU)
    assert {choice.name: choice.value for choice in plan.choices}["budget"] == shown
