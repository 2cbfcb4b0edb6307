"""Answers by a captured step are those of the plain one and of generate, and a capture that fails leaves no trace."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from writing import prompts
from writing import write as write_answers

from cases import build, randomise
from equitape.data.tokenizers import byte_tokenizer
from equitape.evaluation import EvaluatedModel
from equitape.tasks.decoding import write_tokens
from equitape.tasks.static_decoding import FEWEST_TOKENS, PLAIN_STEPS, takes_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # otherwise nothing else would reveal a failed capture
    pytest.mark.filterwarnings("error:.*cannot be captured as a CUDA graph"),
]
SIZES = {
    "vocab_size": 258,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 257,
    "eos_token_id": 256,
}
COUNT = 40
LENGTHS = {"one length": (90, 90, 90), "several": (50, 130, 2, 90), "one prompt": (70,)}


def evaluated(case, dtype=torch.float32, **changes):
    if case == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, **changes))
        randomise(model)
        model = model.to(dtype).eval()
    else:
        model = build(case, dtype=dtype, **SIZES, **changes)
    return EvaluatedModel(model=model.cuda(), tokenizer=byte_tokenizer(), name=case)


def write(who, way, given, count=COUNT, **options):
    return write_answers(who, way, given, count, **options)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", ["rope", "tape", "alibi", "fire", "nope", "learned", "llama"])
def test_captured_steps_write_what_plain_ones_write(case, lengths):
    who = evaluated(case)
    given = prompts(*lengths)
    expected = write(who, "generate", given)
    assert write(who, "steps", given) == expected
    # by default, after the model was asked
    assert write(who, None, given) == expected
    assert who.writing == "graph"
    calls = []
    who.model.register_forward_hook(lambda *args: calls.append(1))
    assert write(who, "graph", given) == expected
    # once to read what is read together, the plain steps, and the capture: all other tokens come from replays
    assert len(calls) == (1 if len(set(lengths)) == 1 else len(lengths)) + PLAIN_STEPS + 1
    assert len({tuple(row) for row in expected}) == len(expected)


@pytest.mark.parametrize("case", ["rope", "tape", "alibi", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case, dtype):
    """With the kernels that serve half precision; the same ones, so the same tokens."""
    who = evaluated(case, dtype)
    assert takes_steps(who)
    for lengths in LENGTHS.values():
        given = prompts(*lengths)
        assert write(who, "graph", given) == write(who, "steps", given)


@pytest.mark.parametrize("case", ["tape", "llama"])
def test_ends_and_lines(case):
    who = evaluated(case)
    who.model.generation_config.eos_token_id = None
    given = prompts(50, 130, 2, 90)
    free = write(who, "generate", given)
    for place in (0, 1, 2, 9, 20):
        ends = [row[place] for row in free]
        for options in (
            {"ends": ends},
            {"ends": ends[:1]},
            {"newlines": set(ends)},
            {"newlines": set(ends), "ends": ()},
        ):
            assert write(who, "graph", given, **options) == write(who, "generate", given, **options)


def test_batches_one_after_another():
    """Of other shapes, with other work between them that takes the memory a graph has left."""
    who = evaluated("tape")
    for lengths in ((90, 90), (20, 33, 7), (200,), (20, 33, 7), (90, 90)):
        given = prompts(*lengths)
        expected = write(who, "generate", given)
        torch.full((1 << 24,), torch.nan, device="cuda")
        assert write(who, "graph", given) == expected


def test_memory_is_given_back():
    who = evaluated("tape")
    given = prompts(*[300] * 16)
    held = []
    for _ in range(4):
        write(who, "graph", given)
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    # the first time, workspaces are made that stay
    for allocated, reserved in held[2:]:
        assert allocated <= held[1][0]
        assert reserved <= held[1][1]


def reads(module, inputs, output):
    """A hook that asks the device for a value."""
    output.logits.sum().item()


def test_a_step_that_waits_for_the_device_is_written_plainly():
    given = prompts(50, 130, 2, 90)
    who = evaluated("tape")
    expected = write(who, "generate", given)
    hook = who.model.register_forward_hook(reads)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="'tape' cannot be captured as a CUDA graph") as message:
        assert write(who, "graph", given) == expected
    assert len([each for each in message if "captured" in str(each.message)]) == 1
    assert who.writing == "generate"
    assert write_tokens(who, given, COUNT, [256]) == expected
    # as if nothing had been: the same stream, memory that can be let go, and captures of others
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.empty_cache()
    hook.remove()
    assert write(who, "graph", given) == expected
    assert who.writing == "graph"


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(("case", "changes"), [("llama", DYNAMIC), ("tape-fourier", {})])
def test_what_needs_the_host_is_written_plainly(case, changes):
    """Scaling that reads the length, and random features that are copied to the device."""
    who = evaluated(case, **changes)
    given = prompts(50, 130)
    expected = write(who, "generate", given)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert write(who, None, given) == expected
    assert who.writing == "generate"


def test_what_is_not_worth_a_capture_or_beyond_a_table():
    who = evaluated("learned")
    given = prompts(90, 90)
    who.model.register_forward_hook(reads)
    assert write(who, "graph", given, FEWEST_TOKENS - 1) == write(who, "generate", given, FEWEST_TOKENS - 1)
    # 512 positions: generate, in which the model checks every one
    who.model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="beyond the learned table"):
        write(who, "graph", prompts(500, 500), ends=())
