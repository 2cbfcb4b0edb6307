"""Perplexity by length against full logits, and what it says of documents that are left out."""

import math

import pytest
import torch
from small import evaluated, llama, our_model
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from equitape.evaluation import build_evaluation, evaluate
from equitape.report.evaluation import report_folder
from equitape.tasks.decoding import write_answers
from equitape.tasks.perplexity_by_length import name_sources

pytestmark = pytest.mark.usefixtures("no_drawing")


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, size in {"a": 50, "b": 33, "c": 17, "d": 41}.items():
        (folder / f"{name}.txt").write_text("".join(chr(97 + (size * n * n + n) % 26) for n in range(size)))
    return folder


def full_losses(model, tokens):
    """Nats of every prediction of one window, by all logits at once."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def expected(model, documents, length):
    """Windows that do not overlap; the last one of a document is moved back to be whole, and counts where it is new."""
    losses, places = [], []
    for document in documents:
        tokens = list(document.encode())
        start = reached = 0
        while reached < len(tokens) - 1:
            start = min(reached, len(tokens) - 1 - length)
            found = full_losses(model, tokens[start : start + length + 1])
            losses += found[reached - start :].tolist()
            places += range(reached - start + 1, length + 1)
            reached = start + length
    return losses, places


@pytest.mark.parametrize("make", [our_model, llama], ids=["ours", "llama"])
def test_perplexity_by_length_is_that_of_full_logits(make, texts, tmp_path):
    model = make()
    options = {"data": {"letters": str(texts)}, "lengths": [8, 40], "short": 4}
    report = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")
    # only those that have a window of the longest length, at every length
    documents = [(texts / f"{name}.txt").read_text() for name in ("a", "d")]
    for length in (4, 8, 40):
        losses, _ = expected(model, documents, length)
        assert report["metrics"][f"perplexity_{length}"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
        bits = sum(losses) / len(losses) / math.log(2)
        assert report["metrics"][f"bits_per_byte_{length}"] == pytest.approx(bits, rel=1e-6)
        assert len(losses) == 49 + 40
    assert report["short"] == {"perplexity_4": report["metrics"]["perplexity_4"]}
    # the model is meant for 64 tokens
    assert report["metrics"]["perplexity"] == report["metrics"]["perplexity_40"]
    assert "2 of 4 documents" in report["notes"][0]
    assert "the same 89 tokens at every length" in report["notes"][0]
    assert report["curves"][0]["y_label"] == "perplexity of the same 89 tokens at every length"
    by_length, by_place = report["curves"]
    assert by_length["x"] == [4, 8, 40]
    losses, places = expected(model, documents, 40)
    assert by_place["x"] == list(range(1, 41))
    means = [
        sum(v for v, p in zip(losses, places, strict=True) if p == place) / places.count(place)
        for place in range(1, 41)
    ]
    assert by_place["y"] == pytest.approx(means, rel=1e-5)


def test_strides_windows_and_joining(texts, tmp_path):
    model = our_model()
    base = {"data": str(texts), "lengths": [16], "short": 8}
    who = evaluated(model)

    def run(name, **options):
        return evaluate(who, build_evaluation("perplexity", {**base, **options}), tmp_path / name)

    overlapping = run("stride", stride=4)
    assert "begin every 4 tokens" in overlapping["protocol"][0]
    assert overlapping["metrics"]["perplexity_16"] != run("plain")["metrics"]["perplexity_16"]
    everything = run("all", stride=4, score="all")
    assert "LongLoRA" in everything["protocol"][0]
    few = run("few", windows=1)
    assert "at most 1 piece of 16 tokens" in few["protocol"][0]
    # 17 tokens make one window of 16: all four documents have one
    assert "the same 64 tokens at every length" in few["notes"][0]
    joined = run("joined", join=True)
    assert "1 of 1 documents" in joined["notes"][0]


@pytest.mark.parametrize("stride", [None, 4])
@pytest.mark.parametrize("windows", [1, 2, 3, None])
def test_every_length_scores_the_same_tokens(windows, stride, texts, tmp_path):
    """A model whose loss depends on the predicted token alone has the same perplexity at every length."""
    model = our_model()
    (texts / "a.txt").write_text("".join(chr(97 + place * place % 26) for place in range(157)))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    bias = torch.linspace(-3, 3, 258, dtype=torch.float64)
    model.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits + bias)
    options = {"data": str(texts), "lengths": [8, 24, 48], "short": 5, "windows": windows, "stride": stride}
    report = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")
    values = [report["metrics"][f"perplexity_{length}"] for length in (5, 8, 24, 48)]
    assert values == pytest.approx([values[0]] * 4, rel=1e-9)
    assert "at every length" in report["curves"][0]["y_label"]


def test_pieces_are_scored_with_the_context_before_them(tmp_path, monkeypatch):
    """With a stride, a piece begins with as much context as any other token has."""
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    text = "".join(chr(97 + place * 7 % 26) for place in range(101))
    (tmp_path / "long.txt").write_text(text)
    model = our_model()
    options = {"data": str(tmp_path / "long.txt"), "lengths": [20], "short": 10, "stride": 5, "windows": 2}
    report = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")
    tokens = list(text.encode())
    for length in (10, 20):
        losses = []
        # the first and the last of five pieces
        for start in (*range(0, 20, 5), *range(80, 100, 5)):
            begin = max(0, start + 5 - length)
            losses += full_losses(model, tokens[begin : start + 6])[start - begin :].tolist()
        assert len(losses) == 40
        expected_value = math.exp(sum(losses) / len(losses))
        assert report["metrics"][f"perplexity_{length}"] == pytest.approx(expected_value, rel=1e-6)


def test_intervals_are_over_documents(texts, tmp_path):
    options = {"data": str(texts), "lengths": [16], "short": 8}
    report = evaluate(evaluated(our_model()), build_evaluation("perplexity", options), tmp_path / "out")
    assert set(report["intervals"]) == {"perplexity", "perplexity_8", "perplexity_16"}
    low, high = report["intervals"]["perplexity_16"]
    assert (report["curves"][0]["low"][1], report["curves"][0]["high"][1]) == (low, high)
    assert low < report["metrics"]["perplexity_16"] < high
    single = build_evaluation("perplexity", {**options, "data": str(texts / "a.txt")})
    assert evaluate(evaluated(our_model()), single, tmp_path / "single")["intervals"] == {}


def test_long_documents_are_done_in_small_units(texts, tmp_path, monkeypatch):
    options = {"data": str(texts), "lengths": [16], "short": 8}
    plain = evaluate(evaluated(our_model()), build_evaluation("perplexity", options), tmp_path / "plain")
    monkeypatch.setattr("equitape.tasks.perplexity_by_length.UNIT_TOKENS", 17)
    task = build_evaluation("perplexity", options)
    split = evaluate(evaluated(our_model()), task, tmp_path / "split")
    assert split["examples"]["units"] > plain["examples"]["units"] == 8
    assert split["metrics"] == pytest.approx(plain["metrics"], rel=1e-12)
    assert split["intervals"]["perplexity_8"] == pytest.approx(plain["intervals"]["perplexity_8"], rel=1e-12)
    for left, right in zip(split["curves"], plain["curves"], strict=True):
        assert left["y"] == pytest.approx(right["y"], rel=1e-12)


def test_nan_weights_are_a_result_that_can_be_read_again(texts, tmp_path):
    model = our_model()
    torch.nn.init.constant_(model.get_output_embeddings().weight, math.nan)
    options = {"data": str(texts), "lengths": [16], "short": 8}
    report = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")
    assert report["metrics"]["perplexity_16"] is None
    assert any("NaN or infinite at length 8, 16; check its weights" in note for note in report["notes"])
    again = build_evaluation("perplexity", options)
    assert evaluate(evaluated(model), again, tmp_path / "out", resume=True)["metrics"] == report["metrics"]
    report_folder(tmp_path / "out")


def test_scores_of_nan_weights_are_marked(tmp_path):
    """Answers of such a model are wrong, not missing: 0 % would pass for a result."""
    model = our_model()
    torch.nn.init.constant_(model.get_output_embeddings().weight, math.nan)
    task = build_evaluation("passkey", {"lengths": 400, "short": 400, "samples": 1, "depths": 0.5})
    report = evaluate(evaluated(model), task, tmp_path / "out")
    assert report["metrics"]["exact_match"] == 0
    message = "The weights of the model have NaN or infinity (lm_head.weight), so its scores say nothing."
    assert report["notes"][0] == message
    healthy = evaluate(evaluated(our_model()), task, tmp_path / "healthy")
    assert not any("NaN" in note for note in healthy["notes"])


def test_joined_documents_share_their_bytes(texts, tmp_path):
    """All of them as one window, end tokens included; letters of two bytes make bytes other than letters."""
    (texts / "b.txt").write_text("äöü" * 11)
    documents = [(texts / f"{name}.txt").read_bytes() for name in "abcd"]
    tokens = [token for document in documents for token in (*document, 256)]
    size = 50 + 66 + 17 + 41
    assert len(tokens) == size + 4
    model, length = our_model(), len(tokens) - 1
    options = {"data": str(texts), "lengths": [length], "short": length, "join": True}
    found = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")["metrics"]
    loss = float(full_losses(model, tokens).mean())
    assert found[f"perplexity_{length}"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found[f"bits_per_byte_{length}"] == pytest.approx(loss / math.log(2) * len(tokens) / size, rel=1e-6)


def test_several_texts_keep_their_names(texts, tmp_path):
    options = {"data": {"one": str(texts / "a.txt"), "two": str(texts / "d.txt")}, "lengths": [16], "short": 8}
    report = evaluate(evaluated(our_model()), build_evaluation("perplexity", options), tmp_path / "out")
    assert {"perplexity_one_16", "perplexity_two_8", "bits_per_byte_two_16"} <= set(report["metrics"])
    assert set(report["short"]) == {"perplexity_one_8", "perplexity_two_8"}
    assert len(report["curves"]) == 4


def test_texts_with_the_same_last_name_are_all_scored(texts, tmp_path):
    for folder, name in (("x", "a"), ("y", "d")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.txt").write_text((texts / f"{name}.txt").read_text())
    data = [str(tmp_path / "x/test.txt"), str(tmp_path / "y/test.txt"), str(texts / "a.txt")]
    task = build_evaluation("perplexity", {"data": data, "lengths": [16], "short": 8})
    report = evaluate(evaluated(our_model()), task, tmp_path / "out")
    for name in ("x/test.txt", "y/test.txt", "a.txt"):
        assert f"perplexity_{name}_16" in report["metrics"]
    assert report["metrics"]["perplexity_x/test.txt_16"] == report["metrics"]["perplexity_a.txt_16"]
    assert report["metrics"]["perplexity_y/test.txt_16"] != report["metrics"]["perplexity_a.txt_16"]
    report_folder(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.png"))) == 6


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (("a/test.txt",), ["test.txt"]),
        (("a/texts/",), ["texts"]),
        (("a/b/t.txt", "c/b/t.txt", "c/d/t.txt", "u.txt"), ["a/b/t.txt", "c/b/t.txt", "d/t.txt", "u.txt"]),
        (("t.txt", "a/t.txt", "/a/t.txt"), ["t.txt", "a/t.txt", "/a/t.txt"]),
        (("x.tar.xz/books/test", "y.tar.xz/books/test"), ["x.tar.xz/books/test", "y.tar.xz/books/test"]),
        (("hf:owner/set:a:test", "hf:owner/set:b:test"), ["hf:owner/set:a:test", "hf:owner/set:b:test"]),
    ],
)
def test_names_of_texts_are_as_short_as_they_can_be(given, names):
    assert name_sources(given) == dict(zip(names, given, strict=True))


def test_a_text_named_twice():
    with pytest.raises(ValueError, match=r"the text 'a/t.txt/' is named twice"):
        name_sources(("b.txt", "a/t.txt/", "a//t.txt"))


def test_default_lengths_are_what_text_and_context_allow(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "long.txt").write_text("ab" * 1500)
    task = build_evaluation("perplexity", {"data": str(tmp_path / "long.txt")})
    assert {unit.length for unit in task.prepare(evaluated(our_model(max_position_embeddings=512)))} == {256, 512, 1024}
    assert {unit.length for unit in task.prepare(evaluated(our_model(max_position_embeddings=4096)))} == {
        256,
        512,
        1024,
        2048,
    }


def test_a_length_that_the_model_refuses_is_reported_and_not_fatal(texts, tmp_path):
    """A learned table ends."""
    model = our_model("learned", max_position_embeddings=20)
    options = {"data": str(texts), "lengths": [16, 32], "short": 8, "windows": 1}
    report = evaluate(evaluated(model), build_evaluation("perplexity", options), tmp_path / "out")
    assert "perplexity_16" in report["metrics"]
    # the documents and pieces are still those of the longest length
    assert any("3 of 4 documents, those with more than 32 tokens" in note for note in report["notes"])
    assert any("at most 1 piece of 32 tokens" in sentence for sentence in report["protocol"])
    assert "perplexity_32" not in report["metrics"]
    assert any("2 units failed" in note or "units failed" in note for note in report["notes"])


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_table_of_transformers_is_not_left(name, texts, tmp_path):
    """Its own models read beyond it, which on a GPU is the end of the run."""
    sizes = {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_positions=20, n_embd=32, n_layer=1, n_head=2, **sizes))
    else:
        heads = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2}
        model = OPTForCausalLM(OPTConfig(max_position_embeddings=20, num_hidden_layers=1, **heads, **sizes))
    who = evaluated(model.eval())
    options = {"data": str(texts), "lengths": [20, 21], "short": 8}
    report = evaluate(who, build_evaluation("perplexity", options), tmp_path / "out")
    assert "perplexity_20" in report["metrics"]
    assert "perplexity_21" not in report["metrics"]
    assert any("21 tokens are beyond the model's 20 positions" in note for note in report["notes"])
    assert len(write_answers(who, [[1] * 16], 5)) == 1
    with pytest.raises(ValueError, match="of 21 tokens are beyond the model's 20 positions"):
        write_answers(who, [[1] * 16], 6)


def test_only_tables_of_positions_end():
    assert evaluated(llama()).table is None
    # as many words as positions
    assert evaluated(llama(max_position_embeddings=258)).table is None
    # says so itself
    assert evaluated(our_model("learned")).table is None


@pytest.mark.parametrize(("context", "words"), [(16, "the longest inside"), (4, "the longest; all are beyond")])
def test_where_the_headline_is(context, words, texts, tmp_path):
    options = {"data": str(texts), "lengths": [16, 32], "short": 8}
    who = evaluated(llama(max_position_embeddings=context))
    report = evaluate(who, build_evaluation("perplexity", options), tmp_path / "out")
    place = 16 if context == 16 else 32
    assert f"The headline is at {place} tokens, {words} the model's context of {context}." in report["protocol"]
    assert report["metrics"]["perplexity"] == report["metrics"][f"perplexity_{place}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no text.*data=books.tar.xz/books/test.*data=shipped:valid"),
        ({"data": "nowhere.txt"}, "There is no file or folder 'nowhere.txt'"),
        ({"data": "TEXTS", "lengths": [500]}, "no document of 'texts' has the 501 tokens.*the longest has 50"),
        ({"data": "TEXTS", "stride": 300}, "stride must be from 1 to the shortest length, 256"),
        ({"data": "TEXTS", "score": "knew"}, "score is 'knew'; it must be one of 'new', 'all'. Did you mean 'new'"),
        ({"data": "TEXTS", "windows": 0}, "windows is 0"),
    ],
)
def test_wrong_options(options, message, texts):
    given = {key: str(texts) if value == "TEXTS" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=message):
        build_evaluation("perplexity", given).prepare(evaluated(our_model()))
