"""What lies where in the folder of a run."""

from pathlib import Path


def model_folder(name: str) -> str:
    """The folder that holds a model's weights and tokenizer: a run keeps them in `model/`."""
    inner = Path(name).expanduser() / "model"
    return str(inner) if (inner / "config.json").is_file() else name
