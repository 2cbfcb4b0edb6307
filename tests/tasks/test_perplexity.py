"""Perplexity against full logits and a slow loop, for our models and others, in little memory."""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cases import VOCAB, build, draw_tokens
from equitape.tasks import perplexity as module
from equitape.tasks.perplexity import cut_windows, perplexity, spread_over_documents, unwrap

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# whether decoder and head are all there is to the logits
OTHERS = {
    "Llama": (GROUPED, True),
    "GPT2": (
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        True,
    ),
    "Gemma2": ({**GROUPED, "head_dim": 8, "final_logit_softcapping": 2.0}, False),
    "Granite": ({**GROUPED, "logits_scaling": 3.0}, False),
    "Mamba": (
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
        False,
    ),
}


def build_other(name):
    options, _ = OTHERS[name]
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def draw_documents(*lengths):
    return [draw_tokens(1, length, seed=length)[0] for length in lengths]


@torch.no_grad()
def slow_losses(model, tokens, length, stride):
    """Every token of a document with the context the rule "new" promises it, one forward for each."""
    losses = []
    last_start = len(tokens) - 1 - length
    for target in range(1, len(tokens)):
        # the first window that reaches this target; the last window ends with the document
        start = min(max(0, -(-(target - length) // stride)) * stride, last_start)
        logits = model(input_ids=tokens[None, start:target], use_cache=False).logits[0, -1]
        losses.append(float(cross_entropy(logits, tokens[target])))
    return losses


@pytest.mark.parametrize("stride", [1, 3, 5, 8])
def test_every_token_by_its_own_forward(stride):
    model = build("tape")
    documents = draw_documents(9, 30, 23)
    expected = [loss for document in documents for loss in slow_losses(model, document, 8, stride)]
    result = perplexity(model, documents, 8, stride, batch_tokens=24)
    assert result.tokens == len(expected) == 8 + 29 + 22
    assert result.loss == pytest.approx(sum(expected) / len(expected), abs=1e-10)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert (result.documents, result.skipped_documents) == (3, 0)


@pytest.mark.parametrize("stride", [2, 8])
def test_longloras_rule_counts_all_predictions_of_all_windows(stride):
    model = build("rope")
    (document,) = draw_documents(30)
    places = torch.zeros(8, dtype=torch.float64)
    windows = 0
    for start in range(0, 30 - 8, stride):
        rows = document[start : start + 9]
        logits = model(input_ids=rows[None, :-1]).logits[0]
        places += cross_entropy(logits, rows[1:], reduction="none").detach()
        windows += 1
    result = perplexity(model, [document], 8, stride, score="all")
    assert (result.windows, result.tokens) == (windows, 8 * windows)
    assert result.position_losses == pytest.approx(places / windows, abs=1e-10)
    assert result.loss == pytest.approx(float(places.sum()) / windows / 8, abs=1e-10)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_windows_count_every_token_once_with_the_promised_context(num_tokens, length, stride):
    stride = min(stride, length)
    windows = cut_windows(0, num_tokens, length, stride)
    if num_tokens <= length:
        assert windows == []
        short = cut_windows(0, num_tokens, length, stride, keep_short=True)
        assert [(w.start, w.size, w.first) for w in short] == ([(0, num_tokens - 1, 0)] if num_tokens > 1 else [])
        return
    counted = []
    for window in windows:
        assert window.start + window.size < num_tokens
        for place in range(window.first, window.size):
            counted.append(window.start + place + 1)
            assert window.start == 0 or place + 1 > length - stride
    assert counted == list(range(1, num_tokens))


@pytest.mark.parametrize("name", OTHERS)
def test_any_causal_model(name, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)
    model = build_other(name)
    ways = []
    for way in ("_losses_by_head", "_losses_by_cache"):
        function = getattr(module, way)
        monkeypatch.setattr(module, way, lambda *inputs, f=function, w=way: ways.append(w) or f(*inputs))
    documents = draw_documents(40, 25)
    total = 0.0
    for document in documents:
        for start in range(0, len(document) - 12, 12):
            rows = document[start : start + 13]
            logits = model(input_ids=rows[None, :-1], use_cache=False).logits[0].detach()
            total += float(cross_entropy(logits.double(), rows[1:], reduction="sum"))
    result = perplexity(model, [document[: len(document) // 12 * 12 + 1] for document in documents], 12)
    # Mamba's own recurrence differs a little from its scan over a whole sequence
    assert result.loss == pytest.approx(total / 60, abs=1e-5 if name == "Mamba" else 1e-6)
    assert set(ways) == {"_losses_by_head" if OTHERS[name][1] else "_losses_by_cache"}


def test_a_cap_on_logits_is_not_overlooked():
    """The guard that makes the test above mean something: without its cap this model gives another loss."""
    model = build_other("Gemma2")
    documents = draw_documents(30)
    capped = perplexity(model, documents, 8).loss
    model.config.final_logit_softcapping = None
    assert abs(perplexity(model, documents, 8).loss - capped) > 0.1


def test_models_inside_wrappers():
    model = build("tape")
    documents = draw_documents(30)
    plain = perplexity(model, documents, 8).loss
    assert perplexity(torch.compile(model), documents, 8).loss == plain
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    assert perplexity(wrapped, documents, 8).loss == pytest.approx(plain, abs=1e-10)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted = perplexity(wrapped, documents, 8).loss
    rows = documents[0][:25].unfold(0, 9, 8)
    logits = wrapped(input_ids=rows[:, :-1]).logits
    expected = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert perplexity(wrapped, [documents[0][:25]], 8).loss == pytest.approx(expected, abs=1e-10)
    assert abs(adapted - plain) > 1e-3
    assert unwrap(wrapped) is model


def test_a_learnt_prompt_is_refused():
    wrapped = get_peft_model(build_other("Llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="with a learnt prompt is not supported"):
        perplexity(wrapped, draw_documents(30), 8)


class LargestTensor(TorchDispatchMode):
    """Watches every operation for the largest tensor it makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return output


@pytest.mark.parametrize("name", ["equitape", "Llama", "Gemma2"])
def test_no_tensor_grows_with_length_times_vocabulary_or_length_squared(name, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 32)
    torch.manual_seed(0)
    if name == "equitape":
        model = build("rope", vocab_size=2000, max_position_embeddings=2048, dtype=torch.float32)
    else:
        options = {**OTHERS[name][0], "vocab_size": 2000, "max_position_embeddings": 2048}
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).eval()
    largest = {}
    for length in (512, 1024):
        with LargestTensor() as watch:
            perplexity(model, draw_documents(length + 1), length)
        largest[length] = watch.numel
    # hidden states; the logits of a chunk; and, where a model goes through its cache, a chunk against all keys, 4 heads
    assert largest[1024] <= max(1024 * 64, 32 * 2000, 4 * 32 * 1024)
    assert largest[1024] < min(1024 * 2000, 1024 * 1024) / 4
    assert largest[1024] <= 2 * largest[512]


def test_loss_by_place():
    model = build("rope")
    documents = draw_documents(33, 17)
    result = perplexity(model, documents, 8)
    places = torch.zeros(8, dtype=torch.float64)
    for document in documents:
        for rows in document.unfold(0, 9, 8):
            places += cross_entropy(model(input_ids=rows[None, :-1]).logits[0], rows[1:], reduction="none").detach()
    assert result.position_losses == pytest.approx(places / 6, abs=1e-10)
    assert result.position_counts.tolist() == [6] * 8
    reads, losses = result.position_curve(4)
    assert reads == [1.5, 3.5, 5.5, 7.5]
    assert losses == pytest.approx((places / 6).view(4, 2).mean(1).tolist())
    assert sum(losses) / 4 == pytest.approx(result.loss)
    # with a stride of 2 later windows count their last two places alone
    strided = perplexity(model, documents[:1], 8, 2)
    assert strided.position_counts.tolist() == [1] * 6 + [13] * 2
    assert strided.position_curve()[0] == [float(place) for place in range(1, 9)]
    # where nothing counts, the curve says nothing
    first = perplexity(model, [documents[0][:5]], 8, keep_short=True)
    assert first.position_curve()[0] == [1.0, 2.0, 3.0, 4.0]


def test_bits_per_byte():
    model = build("rope")
    documents = draw_documents(33, 17, 5)
    result = perplexity(model, documents, 8, document_bytes=[100, 70, 9])
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) * 50 / 170)
    assert perplexity(model, documents, 8).bits_per_byte is None
    assert (result.documents, result.skipped_documents) == (2, 1)


def test_short_documents_are_kept_on_request():
    model = build("rope")
    documents = draw_documents(6, 20, 4, 1)
    expected = 0.0
    for document in (documents[0], documents[2]):
        logits = model(input_ids=document[None, :-1]).logits[0]
        expected += cross_entropy(logits, document[1:], reduction="sum").item()
    long = perplexity(model, documents[1:2], 10)
    result = perplexity(model, documents, 10, keep_short=True)
    assert result.tokens == 5 + 3 + 19
    assert result.loss == pytest.approx((expected + long.loss * 19) / 27, abs=1e-10)


def test_fewer_windows_are_spread_over_all():
    model = build("rope")
    documents = draw_documents(41, 42)
    steps = []
    result = perplexity(model, documents, 10, max_windows=3, batch_tokens=10, progress=lambda *done: steps.append(done))
    assert (result.windows, result.documents) == (3, 2)
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert perplexity(model, documents, 10, max_windows=99).windows == 9


def test_pieces_spread_over_documents_are_the_same_tokens_at_every_length():
    model = build("rope")
    documents = draw_documents(9, 41, 62)
    sizes = [len(document) for document in documents]
    pieces = spread_over_documents(sizes, 20, 3)
    assert pieces == [[], [(0, 20)], [(0, 20), (40, 60)]]
    assert [perplexity(model, documents, length, spans=pieces).tokens for length in (5, 10, 20)] == [60, 60, 60]
    everything = spread_over_documents(sizes, 20, None)
    assert everything == spread_over_documents(sizes, 20, 99) == [[], [(0, 40)], [(0, 61)]]
    assert perplexity(model, documents, 5, spans=everything).tokens == 101


def test_batches_and_modes_change_nothing():
    model = build("tape", {"layers": [0, 1]})
    documents = draw_documents(64)
    one, many = perplexity(model, documents, 8, batch_tokens=1), perplexity(model, documents, 8)
    assert one.loss == pytest.approx(many.loss, abs=1e-12)
    model.train()
    perplexity(model, documents, 8)
    assert model.training
    model.eval()
    perplexity(model, documents, 8)
    assert not model.training


def test_half_precision_sums_in_float32():
    """The loss of a bfloat16 model is that of its bfloat16 logits, taken in float32."""
    model = build("rope", dtype=torch.bfloat16)
    document = draw_tokens(1, 33)[0]
    logits = model(input_ids=document[None, :-1]).logits[0].float()
    expected = cross_entropy(logits, document[1:]).item()
    assert perplexity(model, [document], 32).loss == pytest.approx(expected, rel=1e-6)


def test_an_overflow_is_infinite():
    model = build("rope")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    result = perplexity(model, draw_documents(30), 8)
    assert result.loss > 700
    assert result.perplexity == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length of 1 or more; it is 0"),
        ({"length": 8, "stride": 9}, "stride must be from 1 to the length, 8.*it is 9"),
        ({"length": 8, "stride": 0}, "it is 0"),
        ({"length": 8, "score": "nwe"}, "score is 'nwe'; .*Did you mean 'new'"),
        ({"length": 30}, "No document has the 31 tokens that a window of 30 needs .the longest has 30."),
        ({"length": 8, "document_bytes": [1, 2]}, "document_bytes has 2 entries for 1 documents"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(build("rope"), draw_documents(30), **options)


def test_a_foreign_vocabulary_is_refused():
    with pytest.raises(ValueError, match=f"Token 5000 is beyond the model's vocabulary of {VOCAB}; use the tokenizer"):
        perplexity(build("rope"), [torch.tensor([1, 5000, 2])], 2)
