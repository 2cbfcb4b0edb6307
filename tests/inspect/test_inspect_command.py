"""equitape inspect and equitape check, as typed."""

import json
import re
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases import build
from command_line import call, invoke
from equitape import EquitapeForCausalLM
from equitape.adapt import adapt, save_adapter
from equitape.data.tokenizers import byte_tokenizer
from equitape.inspect.load import names_missing_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder: the model inside, with a tokenizer of bytes."""
    home = tmp_path_factory.mktemp("run")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 258}
    build("tape", dtype=torch.float32, bos_token_id=None, eos_token_id=256, **sizes).save_pretrained(home / "model")
    byte_tokenizer().save_pretrained(home / "model")
    return home


@pytest.mark.usefixtures("no_drawing")
def test_inspect_writes_page_and_pictures(folder, tmp_path):
    result = invoke(
        "inspect", folder, "--text", "héllo\nworld, this is a text", "--out", tmp_path / "out", "--cells", 8
    )
    text = (tmp_path / "out" / "inspect.html").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "inspect.html",
        "attention.png",
        "state-products.png",
    }
    for part in ("not equivariant", "Down-sampled", "torch", "token 256"):
        assert part in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["labels"][:8] == ["h", "<0xC3>", "<0xA9>", "l", "l", "o", "⏎", "w"]
    numbers = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert len(numbers["by_layer"]["phase displacement, radians"]) == 2
    assert {change["model"] for change in numbers["stability"]["changes"]} == {"rope", "tape", "not equivariant"}
    assert "Written to" in result
    assert "phase displacement" in result


@pytest.mark.usefixtures("no_drawing")
def test_inspect_reads_files_and_cuts_them_openly(folder, tmp_path):
    (tmp_path / "book.txt").write_text("x" * 300)
    result = invoke(
        "inspect", folder, "--text", tmp_path / "book.txt", "--out", tmp_path, "--max-tokens", 20, "--no-stability"
    )
    assert "The text has 300 tokens; only the first 20 were read." in result
    assert "20 of 300" in (tmp_path / "inspect.html").read_text()


@pytest.mark.usefixtures("no_drawing")
def test_an_earlier_inspection_is_kept_unless_told_otherwise(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ("inspect", folder, "--no-stability", "--out", out)
    invoke(*arguments, "--text", "the first text")
    before = (out / "inspect.html").read_bytes()
    with monkeypatch.context() as patch:
        # the refusal comes before the model is loaded
        patch.setattr("equitape.pretrained.loading.load_model", pytest.fail)
        refusal = invoke(*arguments, "--text", "the second text", code=2)
    assert "holds an earlier inspection; choose another folder for --out, or add --overwrite." in refusal
    assert (out / "inspect.html").read_bytes() == before

    pictures = {path.name for path in out.glob("*.png")}
    (out / "mine.png").write_bytes(b"mine")
    build("rope", dtype=torch.float32, vocab_size=258).save_pretrained(tmp_path / "rope")
    invoke("inspect", tmp_path / "rope", "--no-stability", "--out", out, "--ids", "1 2 3 4", "--overwrite")
    assert (out / "inspect.html").read_bytes() != before
    numbers = json.loads((out / "inspect.json").read_text())
    # no picture of the earlier model stays, and no other file is touched
    assert pictures - set(numbers["files"])
    assert {path.name for path in out.iterdir()} == {*numbers["files"], "mine.png"}


@pytest.mark.usefixtures("no_drawing")
def test_inspect_says_when_there_is_no_such_file(folder, tmp_path):
    result = invoke("inspect", folder, "--text", "missing_file.txt", "--out", tmp_path / "out", "--no-stability")
    message = "'missing_file.txt' was read as text, since no such file exists."
    assert message in result
    assert message.replace("'", "&#39;") in (tmp_path / "out" / "inspect.html").read_text()
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["notes"][0] == message


def test_what_reads_like_a_path(tmp_path):
    (tmp_path / "book.txt").write_text("word")
    for given in ("missing_file.txt", "some/folder", str(tmp_path), f"{tmp_path}/boook.txt"):
        assert names_missing_file(given)
    for given in (f"{tmp_path}/book.txt", "word", "see book.txt and more", "a/b \n", "end.", "", "x" * 5000, "a\0b"):
        assert not names_missing_file(given)


@pytest.mark.usefixtures("no_drawing")
def test_inspect_of_texts_that_fill_a_table(tmp_path):
    build("learned", dtype=torch.float32, max_position_embeddings=16).save_pretrained(tmp_path / "model")
    ids = " ".join(map(str, range(16)))
    result = invoke("inspect", tmp_path / "model", "--ids", ids, "--out", tmp_path / "out")
    assert "3 [BOS] in front: Position id 18 is beyond the learned table of 16 rows" in result
    page = (tmp_path / "out" / "inspect.html").read_text()
    assert "3 [BOS] in front: Position id 18 is beyond" in page
    assert "attention, x 0.01" not in page
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["stability"]["changes"] == []


def test_inspect_without_a_tokenizer_names_ids(tmp_path):
    build("rope", dtype=torch.float32).save_pretrained(tmp_path / "model")
    result = invoke("inspect", tmp_path / "model", "--text", "12+30=", "--out", tmp_path / "out", code=2)
    assert "There is no tokenizer in" in result
    assert "give token ids: --ids '3 1 4'." in result
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_drawing")
def test_inspect_takes_ids_and_a_window(folder, tmp_path):
    result = invoke(
        "inspect", folder, "--ids", "3, 1 4 1 5 9 2 6", "--show", "2:6", "--out", tmp_path, "--no-stability"
    )
    assert "tokens 2 to 5 of 8" in result


@pytest.mark.usefixtures("no_drawing")
def test_inspect_compares_with_other_models(folder, tmp_path):
    build("tensor_tape-components", dtype=torch.float32, vocab_size=258).save_pretrained(tmp_path / "other")
    result = invoke(
        "inspect", folder, "--ids", "3 1 4 1 5", "--out", tmp_path, "--also", f"trained={tmp_path / 'other'}"
    )
    assert "trained: ids from 3" in result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "ab", "--ids", "1 2"], "both are given"),
        ([], "neither is given"),
        (["--ids", "1 x 3"], "--ids contains 'x'"),
        (["--ids", "numbers.txt"], "There is no file 'numbers.txt'."),
        (["--ids", "1 999"], "Token 999 is not in the model's vocabulary of 258"),
        (["--ids", "7"], "The text has 1 token;"),
        (["--ids", "1 2 3", "--show", "1-2"], "it must be FIRST:END"),
        (["--ids", "1 2 3", "--show", "1:9"], "the text has 3 tokens"),
        (["--ids", "1 2 3", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["--ids", "1 2 3", "--also", "nothing"], "write key=value, for example --also name=path"),
        (["--ids", "1 2 3", "--base", "x"], "is not an adapter"),
        (["--text", "abc", "--tokenizer", "/nowhere"], "There is no tokenizer in"),
    ],
)
def test_inspect_refuses_in_one_sentence(folder, tmp_path, arguments, message):
    assert message in invoke("inspect", folder, "--out", tmp_path / "out", *arguments, code=2)
    assert not (tmp_path / "out").exists()


def test_inspect_refuses_a_file_for_a_folder_before_it_loads(tmp_path):
    (tmp_path / "file").write_text("kept")
    for out in ("file", "file/within"):
        result = invoke("inspect", tmp_path / "no-model", "--ids", "1 2 3", "--out", tmp_path / out, code=2)
        assert "is a file; choose a directory." in result
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.usefixtures("no_drawing")
def test_inspect_reports_tokens_that_another_model_lacks(folder, tmp_path):
    build("rope", dtype=torch.float32, vocab_size=20).save_pretrained(tmp_path / "other")
    out = tmp_path / "out"
    result = invoke("inspect", folder, "--ids", "3 1 30", "--out", out, "--also", f"other={tmp_path / 'other'}")
    message = "other: Token 256 is not in its vocabulary of 20."
    assert message in result
    assert message in (out / "inspect.html").read_text()
    # a wrong name raises before any work is done
    result = invoke(
        "inspect", folder, "--ids", "3 1 30", "--out", tmp_path / "new", "--also", "other=/nowhere/at/all", code=2
    )
    assert "There is no model at '/nowhere/at/all'" in result


def test_inspect_refuses_ids_that_are_not_numbers(folder, tmp_path):
    model = EquitapeForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    result = invoke("inspect", tmp_path / "broken", "--ids", "3 1 4 1", "--out", tmp_path / "out", code=2)
    assert "The attention of layer 2 has NaN or infinity" in result
    assert not (tmp_path / "out").exists()


def test_files_that_end_too_early_are_refused(folder, pretrained, tmp_path):
    for name, source in (("ours", folder / "model"), ("other", pretrained / "base")):
        shutil.copytree(source, tmp_path / name)
        weights = tmp_path / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
        for command in (["check"], ["inspect", "--ids", "1 2 3", "--out", tmp_path / "out"]):
            assert "Cannot read the model" in invoke(command[0], tmp_path / name, *command[1:], code=2)


def test_check_passes_fails_and_explains(folder, tmp_path):
    assert "all checks passed" in invoke("check", folder)
    found = json.loads(call("check", folder, "--json", "--dtype", "float32").output)
    assert found["passed"] is True
    assert [check["name"] for check in found["checks"]] == [
        "shift",
        "rotation",
        "causality",
        "cache",
        "padding",
        "packing",
    ]

    model = EquitapeForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    assert "FAILED" in invoke("check", tmp_path / "broken", code=1)
    found = json.loads(call("check", tmp_path / "broken", "--json", code=1).output)
    assert found["passed"] is False
    assert found["checks"][0]["error"] is None


def test_check_does_not_fail_what_is_not_promised(tmp_path):
    build("learned", dtype=torch.float32).save_pretrained(tmp_path / "learned")
    assert "not promised" in invoke("check", tmp_path / "learned")


def test_check_of_a_short_table(tmp_path):
    build("learned", dtype=torch.float32, max_position_embeddings=12).save_pretrained(tmp_path / "learned")
    result = invoke("check", tmp_path / "learned")
    assert "The model takes at most 12 tokens, so the checks used 11 instead of 32." in result
    assert "all checks passed" in result


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A small Llama, and an adapter that was trained on top of it."""
    home = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(home / "base")
    model = adapt(home / "base", "tape")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".carry", ".mix_out")):
                parameter.normal_(std=0.3)
    save_adapter(model, home / "adapter")
    return home


@pytest.mark.usefixtures("no_drawing")
def test_pretrained_models_and_adapters(pretrained, tmp_path):
    assert "declares nothing about shifts" in invoke("check", pretrained / "base")
    result = call("check", pretrained / "adapter", "--base", pretrained / "base", "--json")
    found = json.loads(result.output)
    assert (found["encoding"], found["notes"]) == ("tape", [])
    assert [check["verdict"] for check in found["checks"]] == ["pass"] * 6
    for model, kind in ((["base"], "rope"), (["adapter", "--base", pretrained / "base"], "tape")):
        out = tmp_path / kind
        result = call(
            "inspect", pretrained / model[0], *model[1:], "--ids", "3 1 4 1 5", "--out", out, "--no-stability"
        )
        assert f"encoding {kind}" in (out / "inspect.html").read_text()
    assert "give the model it was trained on with --base" in invoke("check", pretrained / "adapter", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "There is no model at '/nowhere/at/all'"),
        (["nothing-here"], "There is no model at 'nothing-here'"),
        (["{folder}", "--dtype", "bfloat16"], "it must be float64 or float32"),
        (["{folder}", "--tokens", "3"], "8"),
        (["{empty}"], "has no config.json"),
    ],
)
def test_check_refuses_in_one_sentence(folder, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    filled = [part.format(folder=folder, empty=tmp_path / "empty") for part in arguments]
    assert message in invoke("check", *filled, code=2)
