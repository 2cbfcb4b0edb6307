"""Answers by steps of fixed shapes are those of generate, token by token, and nothing in a step needs the host."""

import warnings
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small import evaluated, llama, our_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, GPTJConfig, GPTJForCausalLM
from writing import prompts, write

from cases import DECODED, randomise
from equitape.cuda_graph import CaptureError
from equitape.evaluation import EvaluatedModel
from equitape.tasks import static_decoding as steps
from equitape.tasks.decoding import write_tokens
from equitape.tasks.static_decoding import FEWEST_TOKENS, Answers, Writer, choose_writing, reach, takes_steps

MODELS = {
    "llama": llama,
    **{case: lambda case=case: our_model(case) for case in DECODED},
}
LENGTHS = {"one length": (9, 9, 9), "several": (5, 13, 2, 9), "one prompt": (7,)}


@cache
def small_model(name):
    """Shared by tests that only write with it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    # or generate would take it from there
    model.generation_config.eos_token_id = None
    return model


@cache
def written_freely(name, lengths, count, ends):
    """What nothing ends: rows as long as may be."""
    return write(evaluated(small_model(name)), "generate", prompts(*lengths), count, ends)


def rows_of(*lengths):
    return [torch.tensor(prompt) for prompt in prompts(*lengths)]


@pytest.mark.parametrize("name", MODELS)
def test_steps_write_what_generate_writes(name):
    who = evaluated(MODELS[name]())
    for kind, lengths in LENGTHS.items():
        # to an encoding, a prompt by itself is one of several of one length
        if kind == "one prompt" and name not in ("llama", "tape2"):
            continue
        given = prompts(*lengths)
        expected = write(who, "generate", given, 19)
        assert write(who, "steps", given, 19) == expected
        assert len({tuple(row) for row in expected}) == len(expected)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("place", [0, 1, 2, 5, 9, 10, 18])
def test_what_follows_an_end_is_padding(place, lengths):
    who = evaluated(small_model("tape"))
    given, free = prompts(*lengths), written_freely("tape", lengths, 19, (256,))
    one, all_rows = [free[0][place]], [row[place] for row in free]
    for ends in (one, all_rows):
        expected = write(who, "generate", given, 19, ends)
        assert write(who, "steps", given, 19, ends) == expected
    assert len(expected[0]) <= place + 1
    if len(given) > 1 and place < 18:
        # the first row has ended, others go on
        assert write(who, "steps", given, 19, one)[0][-1] == 257


@pytest.mark.parametrize("ends", [(256,), ()], ids=["with an end token", "without"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("place", [0, 1, 6, 9, 12])
def test_lines_end_answers(place, lengths, ends):
    who = evaluated(small_model("llama"))
    given, free = prompts(*lengths), written_freely("llama", lengths, 16, ends)
    for newlines in ({free[0][place]}, {row[place] for row in free}, {free[0][0], free[0][place]}):
        expected = write(who, "generate", given, 16, ends, newlines)
        assert write(who, "steps", given, 16, ends, newlines) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 11])
def test_answers_of_any_length(count):
    who = evaluated(our_model("alibi"))
    given = prompts(5, 13, 2)
    expected = write(who, "generate", given, count)
    assert write(who, "steps", given, count) == expected
    assert [len(row) for row in expected] == [count] * 3


def test_generate_is_left_what_steps_cannot_do(monkeypatch):
    monkeypatch.setattr(steps, "Writer", None)
    for case, lengths in (("randpe-sampled", (9, 9)), ("rope-dynamic", (9, 9)), ("tape", (1, 1))):
        who = evaluated(our_model(case))
        assert [len(row) for row in write(who, "steps", prompts(*lengths), 9, [])] == [9, 9]
    # by default, all of it on the CPU
    who = evaluated(our_model())
    assert len(write(who, None, prompts(9, 9), 20)) == 2
    assert who.writing is None


def test_prompts_are_not_held_twice(monkeypatch):
    """Layer by layer, the growing cache is let go as the fixed one is made."""
    model = our_model()
    made, held = [], []

    allocate = torch.Tensor.new_zeros

    def watched_allocate(*args, **kwargs):
        held.append([layer.keys is not None for layer in made[0].layers])
        return allocate(*args, **kwargs)

    forward = model.forward

    def watched(*args, **kwargs):
        output = forward(*args, **kwargs)
        if isinstance(output.past_key_values, DynamicCache):
            made.append(output.past_key_values)
        return output

    monkeypatch.setattr(model, "forward", watched)
    monkeypatch.setattr(torch.Tensor, "new_zeros", watched_allocate)
    with torch.no_grad():
        writer = Writer(model, rows_of(9, 9, 9), 20)
    # keys and values of the first layer, then of the second
    assert held == [[True, True], [True, True], [False, True], [False, True]]
    # TAPE widens the values of the first layer
    assert [tuple(layer.values.shape) for layer in writer.cache.layers] == [(3, 2, 64, 16), (3, 2, 64, 8)]
    made.clear()
    with torch.no_grad():
        Writer(model, rows_of(9, 4), 20)
    # one prompt at a time
    assert [cache.layers[0].keys for cache in made] == [None, None]


class NoHost(TorchDispatchMode):
    """Refuses what makes the host wait for values, as a capture does."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.READS):
            raise RuntimeError(f"called a synchronizing operation: {function}")
        return function(*args, **(kwargs or {}))


class NoNumbers(TorchFunctionMode):
    """Refuses to bring numbers to the device, as a capture does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            raise RuntimeError(f"copied {args[0]!r} from the host")
        return function(*args, **(kwargs or {}))


def as_if_captured(step, monkeypatch):
    with monkeypatch.context() as patch, NoHost(), NoNumbers():
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return step()


# begun with random features, numbers that the host keeps
FOURIER = ("tape-fourier", "tensor_tape-l1r4", "tensor_tape-l4r1")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in FOURIER])
@torch.no_grad()
def test_a_step_needs_nothing_of_the_host(name, monkeypatch):
    model = MODELS[name]()
    writer = Writer(model, rows_of(5, 8, 2), 6)

    def step():
        return writer.step().clone()

    def addresses():
        held = [writer.token, writer.ids, writer.place, writer.mask, writer.count, writer.written]
        held += [part for layer in writer.cache.layers for part in (layer.keys, layer.values, layer.cumulative_length)]
        return [tensor.data_ptr() for tensor in held]

    before = addresses()
    expected = [step() for _ in range(6)]
    # all of it in place: a graph knows only addresses
    assert addresses() == before

    writer = Writer(model, rows_of(5, 8, 2), 6)
    plain = [step() for _ in range(2)]
    rest = [as_if_captured(step, monkeypatch) for _ in range(4)]
    assert torch.equal(torch.stack(plain + rest), torch.stack(expected))


def test_a_step_that_reads_values_is_found_out(monkeypatch):
    """The stand-in refuses what it should: dynamic scaling asks for the largest position, random features are copied."""
    model = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with torch.no_grad():
        writer = Writer(model, rows_of(5, 8), 6)
        with pytest.raises(RuntimeError, match="synchronizing"):
            as_if_captured(writer.step, monkeypatch)
        writer = Writer(our_model("tape-fourier"), rows_of(5, 8), 6)
        with pytest.raises(RuntimeError, match="from the host"):
            as_if_captured(writer.step, monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_asked_and_take_steps(name):
    assert takes_steps(evaluated(MODELS[name]()))


@pytest.mark.parametrize("make", [our_model, llama], ids=["tape", "llama"])
def test_rounding_does_not_make_a_model_say_no(make, monkeypatch):
    who = evaluated(make(dtype=torch.bfloat16))
    assert takes_steps(who)
    monkeypatch.setattr(steps, "Writer", wrong("padding"))
    assert not takes_steps(who)


def wrong(what):
    """A writer that does one thing wrong."""

    class Wrong(Writer):
        def __init__(self, *args):
            super().__init__(*args)
            if what == "position":
                self.ids += 1
            if what == "position of the shorter":
                self.ids[1] += 2
            if what == "mask":
                self.mask.copy_(self.mask.roll(1, -1))
            if what == "padding":
                self.mask[1, ..., 1] = 0.0

        def step(self):
            if what == "key too many":
                self.mask.index_fill_(3, self.place + 1, 0.0)
            logits = super().step()
            if what == "position stays":
                self.ids -= 1
            if what == "key overwritten":
                self.place -= 1
            return logits

    return Wrong


WRONG = ["position", "position of the shorter", "position stays", "mask", "padding", "key too many", "key overwritten"]


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["llama", "tape", "learned"])
def test_a_wrong_step_is_found_out(what, name, monkeypatch):
    """By the question to the model and by the comparison of tokens."""
    who = evaluated(MODELS[name]())
    given = prompts(5, 3)
    expected = write(who, "generate", given, 19)
    monkeypatch.setattr(steps, "Writer", wrong(what))
    assert not takes_steps(who)
    assert write(who, "steps", given, 19) != expected


def test_models_that_say_no():
    # makes its bias of a mask in two dimensions
    bloom = BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4, pad_token_id=257, eos_token_id=256)
    no = {
        "window": evaluated(our_model(sliding_window=7)),
        "sampled": evaluated(our_model("randpe-sampled")),
        "dynamic": evaluated(our_model("rope-dynamic")),
        "bloom": evaluated(BloomForCausalLM(bloom).eval()),
        "another attention": evaluated(llama()),
        "host": evaluated(llama()),
    }
    randomise(no["bloom"].model)
    no["another attention"].model.config._attn_implementation = "flash_attention_2"
    no["host"].model._can_compile_fullgraph = False
    assert [name for name, who in no.items() if takes_steps(who)] == []


@pytest.fixture
def captures(monkeypatch):
    """Captures that only replay in name."""
    made = []

    def capture(step, device):
        made.append(device)
        return step

    monkeypatch.setattr(steps, "capture", capture)
    return made


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_step_is_captured_once_for_a_batch(captures, lengths):
    who = evaluated(our_model())
    given = prompts(*lengths)
    expected = write(who, "generate", given, 19)
    assert write(who, "graph", given, 19) == expected
    assert captures == [torch.device("cpu")]
    write(who, "graph", given, 19)
    assert len(captures) == 2
    # too few tokens, and answers that end before there is anything to gain
    write(who, "graph", given, FEWEST_TOKENS - 1)
    write(who, "graph", given, 19, [row[1] for row in expected])
    assert len(captures) == 2


@pytest.mark.parametrize("newlines", [False, True])
def test_without_a_capture_answers_are_the_same(monkeypatch, newlines):
    def refuse(step, device):
        raise CaptureError("operation not permitted when stream is capturing")

    who = evaluated(our_model(), name="stubborn")
    given = prompts(5, 13, 2, 9)
    free = write(who, "generate", given, 19)
    lines = {row[0] for row in free} | {row[4] for row in free} if newlines else None
    expected = write(who, "generate", given, 19, newlines=lines)
    monkeypatch.setattr(steps, "capture", refuse)
    with pytest.warns(UserWarning, match="'stubborn' cannot be captured as a CUDA graph.*not permitted") as message:
        assert write(who, "graph", given, 19, newlines=lines) == expected
    assert len(message) == 1
    assert who.writing == "generate"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write_tokens(who, given, 19, [256]) == free


def test_too_little_memory_is_for_the_runner_to_know(monkeypatch):
    def fail(step, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(steps, "capture", fail)
    who = evaluated(our_model())
    with pytest.raises(torch.OutOfMemoryError):
        write(who, "graph", prompts(9, 9), 19)
    assert who.writing == "graph"


def test_on_cuda_models_are_asked_once(monkeypatch):
    asked = []

    def ask(who):
        asked.append(who.name)
        return who.name == "willing"

    monkeypatch.setattr(steps, "takes_steps", ask)
    willing, other = evaluated(llama(), name="willing"), evaluated(llama(), name="other")
    assert choose_writing(willing, [9], 20) == "generate"
    monkeypatch.setattr(EvaluatedModel, "device", torch.device("cuda"))
    assert choose_writing(willing, [9], FEWEST_TOKENS - 1) == "generate"
    assert asked == []
    assert [choose_writing(willing, [9], FEWEST_TOKENS) for _ in range(2)] == ["graph", "graph"]
    assert [choose_writing(other, [9], 20) for _ in range(2)] == ["generate", "generate"]
    assert asked == ["willing", "other"]
    assert choose_writing(willing, [9, 1], 20) == "generate"
    willing.uses_cache = False
    assert choose_writing(willing, [9], 20) == "generate"


def test_a_table_of_positions_is_not_left():
    """A captured step checks no positions, and a batch runs some tokens past its end."""
    who = evaluated(our_model("learned"), name="table")
    who.writing = "steps"
    assert reach(who) == 64
    assert choose_writing(who, [20, 44], 20) == "steps"
    assert choose_writing(who, [20, 45], 20) == "generate"
    with pytest.raises(ValueError, match="beyond the learned table"):
        write_tokens(who, prompts(50, 50), 20, [])
    assert reach(evaluated(llama())) == float("inf")


def test_answers_are_padded_and_cut_as_generate_does():
    answers = Answers(torch.zeros(2, 3, dtype=torch.long), 6, [7], 9, None)
    assert answers.add(torch.tensor([[1, 7], [2, 3]]))
    assert not answers.add(torch.tensor([[5, 5, 5], [4, 7, 5]]))
    assert answers.tolist() == [[1, 7, 9, 9], [2, 3, 4, 7]]
    full = Answers(torch.zeros(1, 3, dtype=torch.long), 2, [], 9, None)
    assert not full.add(torch.tensor([[1, 2]]))
    assert full.tolist() == [[1, 2]]


def test_reach_of_tables_that_are_no_embeddings():
    """GPT-J works its waves out for the whole context, and fails beyond it, also where an answer has ended before."""
    config = GPTJConfig(
        vocab_size=258,
        n_positions=64,
        n_embd=32,
        n_layer=1,
        n_head=2,
        rotary_dim=8,
        bos_token_id=None,
        eos_token_id=256,
    )
    who = evaluated(GPTJForCausalLM(config).eval())
    assert reach(who) == 64
    given = prompts(58, 58)
    ends = [row[4] for row in write(who, "generate", given, 5)]
    assert write(who, "steps", given, 16, ends) == write(who, "generate", given, 16, ends)


def test_reach_does_not_count_words():
    model = llama()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    assert reach(evaluated(adapted)) == torch.inf
