"""Tokenizers: bytes, byte-level BPE trained on the data, or one from a folder; all are transformers tokenizers."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..runs.files import new_folder
from ..runs.folders import model_folder
from .text import Document, Sources, describe_sources, entry, read_documents

END, PAD = "<|end|>", "<|pad|>"
NUM_BYTES = 256
TOKENIZER_FILES = re.compile(r"token|vocab|merges|spiece|sentencepiece|tekken|\.(model|spm|bpe)$", re.IGNORECASE)
BPE_CHARACTERS = 100_000_000
"""Maximum text to train a vocabulary on; more changes little and is slow."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is token b, followed by the end-of-document and padding tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _finish(tokenizer)


def train_bpe(documents: Iterable[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: lossless for any text."""
    if vocab_size < NUM_BYTES + 2:
        raise ValueError(
            f"vocab_size is {vocab_size}; BPE needs at least {NUM_BYTES + 2} entries (all bytes, end and padding)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # add end and padding after training, so that learned entries come first
        vocab_size=vocab_size - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return _finish(tokenizer)


def cached_bpe(sources: Sources, vocab_size: int, cache: str | Path | None = None) -> Any:
    """The BPE tokenizer of some sources, cached and retrained when a file changes. cache: as in `build_tokens`."""
    home = entry(cache, "tokenizers", f"bpe {vocab_size} {BPE_CHARACTERS}", describe_sources(sources))
    if not home.is_dir():
        tokenizer = train_bpe(_first_characters(read_documents(sources), BPE_CHARACTERS), vocab_size)
        with new_folder(home) as folder:
            tokenizer.save_pretrained(str(folder))
    return load_tokenizer(home)


def _first_characters(documents: Iterable[Document], limit: int) -> Iterator[Document]:
    for document in documents:
        yield document
        limit -= len(document.text)
        if limit <= 0:
            return


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer "bytes", or the one of this name in a folder, a run or on the Hugging Face Hub."""
    if str(name) == "bytes":
        return byte_tokenizer()
    try:
        return without_cleanup(AutoTokenizer.from_pretrained(model_folder(str(name))))
    except Exception as error:
        # transformers raises various errors for a missing file, none of them helpful
        folder = Path(model_folder(str(name))).expanduser()
        damaged = folder.is_dir() and any(TOKENIZER_FILES.search(file.name) for file in folder.iterdir())
        reason = " ({})".format(str(error).strip().split("\n")[0]) if damaged else ""
        raise ValueError(
            f"There is no tokenizer in {str(name)!r}{reason}; give 'bytes' or a folder written by save_pretrained of a "
            f"tokenizer."
        ) from error


def without_cleanup(tokenizer: Any) -> Any:
    """The tokenizer, no longer asking for a cleanup of spaces that transformers refuses to BPE with a warning."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    if backend is not None and isinstance(backend.model, models.BPE) and not forced:
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether token ids are bytes, so that no tokenizer is needed."""
    if len(tokenizer) != NUM_BYTES + 2:
        return False
    names = tokenizer.convert_ids_to_tokens(list(range(NUM_BYTES)))
    return names == [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]


def _finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        # treat <|end|> inside a text as plain text
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
