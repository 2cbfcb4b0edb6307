"""Tokenizers write any text and read it back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equitape.data import tokenizers
from equitape.data.text import Document
from equitape.data.tokenizers import byte_tokenizer, cached_bpe, is_byte_tokenizer, load_tokenizer, train_bpe

# every character but lone surrogates, which no UTF-8 text holds
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TRICKY = ["", " ", "  a  b ", "\r\n\t\0", "<|end|>", "<|pad|><0x41>", "é漢字👩‍👩‍👧", "▁a", "don't .", "\u0301"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([Document("x", "the cat sat on the mat, the dog on the log\n" * 50)], 300)


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT)
def test_bytes_are_tokens(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_survives(bpe, text):
    for tokenizer in (byte_tokenizer(), bpe):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_bpe_survives_any_text(bpe, text):
    assert bpe.decode(bpe(text)["input_ids"]) == text


def test_end_and_padding_come_last(bpe):
    tokenizer = byte_tokenizer()
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256, 257)
    assert (bpe.eos_token_id, bpe.pad_token_id) == (len(bpe) - 2, len(bpe) - 1)
    assert len(bpe) <= 300
    assert len(bpe("the cat")["input_ids"]) < 7


def test_saved_and_loaded_they_are_the_same(bpe, tmp_path):
    for number, tokenizer in enumerate((byte_tokenizer(), bpe)):
        folder = tmp_path / str(number)
        tokenizer.save_pretrained(str(folder))
        loaded = load_tokenizer(folder)
        for text in TRICKY:
            assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (
            len(tokenizer),
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
        assert is_byte_tokenizer(loaded) == is_byte_tokenizer(tokenizer)


def test_bytes_differ_from_other_vocabularies(bpe):
    assert is_byte_tokenizer(byte_tokenizer())
    assert is_byte_tokenizer(load_tokenizer("bytes"))
    assert not is_byte_tokenizer(bpe)
    # as large as that of bytes, in another order
    assert not is_byte_tokenizer(train_bpe([Document("x", "a")], 258))


def test_training_twice_gives_the_same_vocabulary():
    documents = [Document(str(n), f"number {n * 7919} and {n * 104729} of many words") for n in range(300)]
    first, second = train_bpe(documents, 400), train_bpe(documents, 400)
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 400


def test_a_vocabulary_is_trained_once(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("round and round " * 40)
    first = cached_bpe(text, 280, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "train_bpe", lambda *_: pytest.fail("trained again"))
        assert cached_bpe(text, 280, tmp_path / "cache").get_vocab() == first.get_vocab()
    text.write_text("other words altogether " * 40)
    assert cached_bpe(text, 280, tmp_path / "cache").get_vocab() != first.get_vocab()


def test_a_vocabulary_is_learnt_from_the_first_text(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("word " * 10)
    monkeypatch.setattr(tokenizers, "BPE_CHARACTERS", 90)
    seen = []
    train = tokenizers.train_bpe
    monkeypatch.setattr(tokenizers, "train_bpe", lambda documents, size: train(seen.extend(documents) or seen, size))
    cached_bpe(sorted(tmp_path.glob("*.txt")), 270, tmp_path / "cache")
    assert len(seen) == 2


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size is 100; BPE needs at least 258 entries"):
        train_bpe([], 100)
    with pytest.raises(ValueError, match=r"There is no tokenizer in .*give 'bytes' or a folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"There is no tokenizer in .*lost"):
        load_tokenizer(tmp_path / "lost")


def test_the_folder_of_a_run_holds_its_tokenizer_inside(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert len(load_tokenizer(tmp_path / "run")) == len(byte_tokenizer())


def test_bpe_does_not_ask_for_a_cleanup_of_spaces(bpe, tmp_path):
    """transformers would warn that it does none."""
    bpe.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "clean_up_tokenization_spaces": True}))
    text = "the cat , the dog ."
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert not tokenizer.clean_up_tokenization_spaces
