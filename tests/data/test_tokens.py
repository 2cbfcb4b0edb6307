"""The token cache holds what the tokenizer says, is reused, and is whole or absent."""

import errno
import json
import pickle

import numpy as np
import pytest
import torch
from transformers import CTRLTokenizer

from equitape.data import tokens
from equitape.data.text import Document
from equitape.data.tokenizers import byte_tokenizer, train_bpe
from equitape.data.tokens import TokenStore, build_tokens, write_tokens

TEXTS = ["hello é", "<|end|> is text here", "a" * 300, "漢字 " * 20]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    for number, text in enumerate(TEXTS):
        (root / f"{number}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([Document("", " ".join(TEXTS))], 300)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_documents_and_their_ends(folder, tmp_path, bpe, kind):
    tokenizer = bpe if kind == "bpe" else byte_tokenizer()
    store = build_tokens(folder, tokenizer, tmp_path / "cache")
    assert len(store) == len(TEXTS)
    for index, text in enumerate(TEXTS):
        ids = tokenizer(text)["input_ids"]
        assert store.document(index).tolist() == [*ids, tokenizer.eos_token_id]
        assert store.document(index, end=False).tolist() == ids
        assert store.num_bytes[index] == len(text.encode())
    assert store.lengths.tolist() == [len(tokenizer(text)["input_ids"]) + 1 for text in TEXTS]
    assert store.num_tokens == store.lengths.sum() == len(store.joined())
    assert store.joined().dtype == torch.long
    assert store.facts.vocab_size == len(tokenizer)
    assert store.tokens.dtype == np.uint16
    assert isinstance(store.tokens, np.memmap)


def test_batches_do_not_change_tokens(folder, tmp_path, bpe, monkeypatch):
    whole = build_tokens(folder, bpe, tmp_path / "one").facts.digest
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 1)
    assert build_tokens(folder, bpe, tmp_path / "two").facts.digest == whole


def test_truncation_and_padding_of_earlier_calls_are_left_out(folder, tmp_path, bpe):
    before = build_tokens(folder, bpe, tmp_path / "one")
    bpe(["a", "a b c d e f g"], truncation=True, max_length=2, padding="max_length")
    after = build_tokens(folder, bpe, tmp_path / "two")
    assert after.facts.digest == before.facts.digest
    assert after.directory.name == before.directory.name


def test_a_tokenizer_without_a_fast_core_works_too(folder, tmp_path):
    class Letters:
        """The least a tokenizer of transformers offers."""

        eos_token_id = pad_token_id = None

        def __len__(self):
            return 70000

        def __call__(self, texts, add_special_tokens, split_special_tokens):
            assert not add_special_tokens
            assert split_special_tokens
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

        def get_vocab(self):
            return {}

        def convert_ids_to_tokens(self, ids):
            return ids

    store = build_tokens(folder, Letters(), tmp_path / "cache")
    assert store.tokens.dtype == np.uint32
    assert "".join(map(chr, store.document(3).tolist())) == TEXTS[3]
    assert store.document(3, end=False).tolist() == store.document(3).tolist()
    assert (store.facts.end_id, store.facts.pad_id) == (None, 0)


def test_the_cache_knows_the_merges_of_a_tokenizer_in_python(folder, tmp_path):
    """Both have one vocabulary and cut abc at another place."""
    names = ["<unk>", "a@@", "b@@", "c@@", "a", "b", "c", "ab@@", "bc"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "0.txt").write_text("abc")
    found = []
    for number, merges in enumerate((("a b", "b c</w>"), ("b c</w>", "a b"))):
        path = tmp_path / f"merges{number}.txt"
        path.write_text("\n".join(["#version", *merges, ""]))
        tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(path))
        store = build_tokens(folder / "0.txt", tokenizer, tmp_path / "cache")
        assert build_tokens(folder / "0.txt", tokenizer, tmp_path / "cache").directory == store.directory
        found.append([names[token] for token in store.document(0)])
    assert found == [["ab@@", "c"], ["a@@", "bc"]]


def test_the_cache_is_reused_until_text_or_tokenizer_change(folder, tmp_path, bpe, monkeypatch):
    cache = tmp_path / "cache"
    first = build_tokens(folder, byte_tokenizer(), cache)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "tokenize", lambda *_: pytest.fail("tokenized again"))
        again = build_tokens(str(folder), byte_tokenizer(), cache)
        assert again.facts == first.facts
        with pytest.raises(pytest.fail.Exception, match=r"tokenized again"):
            build_tokens(folder, bpe, cache)
        with pytest.raises(pytest.fail.Exception, match=r"tokenized again"):
            build_tokens(folder, byte_tokenizer(), cache, max_documents=2)
    (folder / "0.txt").write_text("another text")
    changed = build_tokens(folder, byte_tokenizer(), cache)
    assert changed.facts.digest != first.facts.digest
    assert bytes(changed.document(0, end=False).tolist()) == b"another text"
    assert len(build_tokens(folder, byte_tokenizer(), cache, max_documents=2)) == 2


def test_the_cache_knows_end_mark_and_padding(folder, tmp_path):
    """They are stored with the vocabulary, which is the same for all of these."""
    found = []
    for end, pad in ((256, 257), (257, 257), (65, 257), (256, 65), (None, 257)):
        tokenizer = byte_tokenizer()
        tokenizer.eos_token, tokenizer.pad_token = (
            None if token is None else tokenizer.convert_ids_to_tokens(token) for token in (end, pad)
        )
        assert tokenizer.backend_tokenizer.to_str() == byte_tokenizer().backend_tokenizer.to_str()
        store = build_tokens(folder, tokenizer, tmp_path / "cache")
        assert (store.facts.end_id, store.facts.pad_id) == (end, pad)
        assert store.document(0).tolist() == [*TEXTS[0].encode(), *([] if end is None else [end])]
        found.append(store.directory)
    assert len(set(found)) == 5


def test_digests_depend_on_where_documents_end(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    digests = []
    for number, texts in enumerate((["ab", "c"], ["a", "bc"], ["abc"], ["ab", "c"])):
        write_tokens([Document("", text) for text in texts], tokenizer, tmp_path / str(number))
        store = TokenStore.open(tmp_path / str(number))
        assert store.joined().tolist() == list(b"abc")
        digests.append(store.facts.digest)
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[0]


def test_the_cache_follows_the_environment(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "elsewhere"))
    store = build_tokens(folder, byte_tokenizer())
    assert store.directory.parent == tmp_path / "elsewhere" / "tokens"


@pytest.mark.parametrize("harm", ["cut", "lost", "garbled", "format"])
def test_a_damaged_cache_is_made_again(folder, tmp_path, harm):
    store = build_tokens(folder, byte_tokenizer(), tmp_path / "cache")
    home, expected = store.directory, store.joined().tolist()
    if harm == "cut":
        (home / "tokens.bin").write_bytes((home / "tokens.bin").read_bytes()[:-4])
    elif harm == "lost":
        (home / "starts.npy").unlink()
    elif harm == "garbled":
        (home / "facts.json").write_text("{")
    else:
        (home / "facts.json").write_text((home / "facts.json").read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match=r"is a damaged token cache.*delete it to rebuild it"):
        TokenStore.open(home)
    assert build_tokens(folder, byte_tokenizer(), tmp_path / "cache").joined().tolist() == expected


def test_a_failure_leaves_nothing_behind(tmp_path):
    def documents():
        yield Document("a", "text")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left"):
        write_tokens(documents(), byte_tokenizer(), tmp_path / "cache" / "store")
    assert list((tmp_path / "cache").iterdir()) == []


def test_whoever_comes_second_uses_what_is_there(tmp_path):
    """Two processes may start on one cache; the slower one finds the folder in place when it renames its own."""

    def documents():
        yield Document("a", "text")
        write_tokens([Document("a", "text")], byte_tokenizer(), tmp_path / "store")

    write_tokens(documents(), byte_tokenizer(), tmp_path / "store")
    assert len(TokenStore.open(tmp_path / "store")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_goes_to_other_processes_as_its_address(folder, tmp_path):
    (folder / "long.txt").write_text("x" * 100_000)
    store = build_tokens(folder, byte_tokenizer(), tmp_path / "cache")
    packed = pickle.dumps(store)
    assert len(packed) < 1000
    assert pickle.loads(packed).joined().equal(store.joined())
    in_memory = tokens.store_in_memory([np.arange(3), np.arange(2)], [3, 2], byte_tokenizer())
    assert pickle.loads(pickle.dumps(in_memory)).joined().equal(in_memory.joined())


def test_files_that_are_not_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The data has no text"):
        write_tokens([Document("a", "")], byte_tokenizer(), tmp_path / "store")
