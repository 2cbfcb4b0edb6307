import pytest

RECIPE = """
name: small
task: {name: addition, trained_digits: 1, tested_digits: 2, samples: 2}
model: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2}
encodings: [rope]
train: {steps: 4, batch_size: 4, save_steps: 2, logging_steps: 1}
"""


@pytest.fixture(scope="session")
def small_files(tmp_path_factory):
    """A folder with a model of bytes, a text and a recipe that trains in a moment."""
    # not above: pytest reads this file before tests/conftest.py chooses Triton's interpreter
    import torch

    from cases import build
    from equitape.data.tokenizers import byte_tokenizer

    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 258, "pad_token_id": 257, "eos_token_id": 256, "num_hidden_layers": 2}
    build("tape", dtype=torch.float32, **sizes).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text("All good text is much alike. " * 40)
    (folder / "small.yaml").write_text(RECIPE)
    return folder
