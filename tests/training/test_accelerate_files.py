"""The accelerate configurations in the documentation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from equitape.data.tokenizers import byte_tokenizer
from families import make_source
from words import write_text

FILES = Path(__file__).parent.parent.parent / "docs/how-to/accelerate"
PROCESSES = {"ddp": 8, "fsdp2": 8, "context-parallel": 8}


@pytest.mark.parametrize("name", PROCESSES)
def test_accelerate_reads_every_file(name):
    assert {path.stem for path in FILES.glob("*.yaml")} == set(PROCESSES)
    config = load_config_from_file(str(FILES / f"{name}.yaml"))
    assert config.num_processes == PROCESSES[name]
    if name in ("fsdp2", "context-parallel"):
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "context-parallel":
        sizes = config.parallelism_config
        groups = sizes["parallelism_config_dp_shard_size"] * sizes["parallelism_config_cp_size"]
        assert groups == config.num_processes


@pytest.mark.skipif(not os.environ.get("EQUITAPE_LONG_TESTS"), reason="starts three Python processes")
def test_torchrun_launches_adapt_in_two_processes(tmp_path):
    make_source(
        "llama-tied", vocab_size=258, max_position_embeddings=32, eos_token_id=256, pad_token_id=257
    ).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    write_text(tmp_path / "data")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "equitape", "adapt", str(tmp_path / "base"), "--data", str(tmp_path / "data"), "--steps", "4"]
    command += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--batch-size"]
    refused = subprocess.run([*command, "1"], check=False, capture_output=True, text=True)
    assert "cannot be split over 2 processes" in " ".join(refused.stderr.split())
    result = subprocess.run([*command, "2"], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "out" / "adapter.safetensors").exists()
