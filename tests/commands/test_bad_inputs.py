"""Bad inputs end in one sentence that names what is wrong: no traceback, and nothing is written."""

import gzip
import hashlib
import io
import json
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cases import build
from command_line import call, in_one_line
from equitape import adapt
from equitape.data.tokenizers import byte_tokenizer

DEEP = "[" * 200_000
SIZES = {"vocab_size": 258, "pad_token_id": 257, "bos_token_id": None, "eos_token_id": 256}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Good files: models of two classes, an adapter, a text."""
    folder = tmp_path_factory.mktemp("home")
    build("tape", dtype=torch.float32, num_hidden_layers=2, **SIZES).save_pretrained(folder / "tape")
    byte_tokenizer().save_pretrained(folder / "tape")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, **SIZES)).save_pretrained(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    adapt(folder / "llama", "tape+lora").save_adapter(folder / "adapter")
    (folder / "text.txt").write_text("All good text is much alike. " * 40)
    return folder


def refused(*words, code=2):
    """The output of a command that refuses its input."""
    # wide enough for every message: the box around an error breaks long lines anywhere
    return in_one_line(call(*words, code=code, env={"COLUMNS": "2000"}).output)


def copy(home, tmp_path, name):
    return Path(shutil.copytree(home / name, tmp_path / name))


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("model", ["tape", "llama"])
@pytest.mark.parametrize(
    "text", ["null", "3", "[]", "", "{}", '{"model_type": "equi', DEEP, '{"a":' * 20_000, "\x00\x01"]
)
def test_unreadable_config(model, text, home, tmp_path):
    folder = copy(home, tmp_path, model)
    (folder / "config.json").write_text(text)
    said = refused("check", folder, "--dtype", "float32")
    assert f"Cannot read the model '{folder}'" in said
    assert "Error:" not in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be a whole number"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be 1 or more"),
        ({"num_hidden_layers": 10**30}, f"num_hidden_layers is {10**30}; it must be at most 100,000"),
        ({"hidden_size": 10**30}, f"hidden_size is {10**30}; it must be at most 2,147,483,647"),
        ({"intermediate_size": -4}, "intermediate_size is -4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "relux"}, "Unknown hidden_act 'relux'. Did you mean 'relu'?"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu']; it must be text"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a finite number"),
        ({"pad_token_id": 1000}, "pad_token_id is 1000, but the ids are 0 to 257"),
        ({"trained_length": -1}, "trained_length is -1"),
        ({"attention_dropout": 7}, "attention_dropout is 7"),
        ({"sliding_layers": 3, "sliding_window": 4}, "sliding_layers is 3; it must be a list, for example [1, 2]"),
        ({"dtype": "floaty"}, "no attribute 'floaty'"),
        ({"encoding": 3}, "Encoding 3 has no kind"),
        ({"encoding": ["tape"]}, "Encoding ['tape'] has no kind"),
        ({"encoding": {"kind": ["tape"]}}, "Unknown encoding ['tape']"),
        ({"encoding": {"kind": "tapes"}}, "Unknown encoding 'tapes'. Did you mean 'tape'?"),
        ({"encoding": {"kind": "tape", "scaling": {"kind": {}}}}, "scaling.kind is {}"),
        ({"encoding": {"kind": "tape", "theta": float("inf")}}, "theta is inf; it must be a finite number"),
        ({"intermediate_size": 64}, "has shape [32, 48]; its configuration requires [32, 64]"),
        ({"num_hidden_layers": 3}, "The checkpoint lacks"),
    ],
)
def test_configuration_with_a_wrong_value(given, message, home, tmp_path):
    folder = copy(home, tmp_path, "tape")
    edit(folder / "config.json", lambda content: content.update(given))
    assert message in refused("check", folder, "--dtype", "float32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": "big"}, "expected int, got str (value: 'big')"),
        ({"hidden_act": "relux"}, "relux"),
        ({"num_attention_heads": 0}, "Cannot read the model"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"intermediate_size": 64}, "has shape [32, 48]; its configuration requires [32, 64]"),
    ],
)
@pytest.mark.parametrize("command", ["check", "inspect", "adapt"])
def test_configuration_of_another_class_with_a_wrong_value(command, given, message, home, tmp_path):
    folder, out = copy(home, tmp_path, "llama"), tmp_path / "out"
    edit(folder / "config.json", lambda content: content.update(given))
    options = {"check": ["--dtype", "float32"], "inspect": ["--ids", "1 2 3", "--out", out], "adapt": ["--out", out]}
    assert message in refused(command, folder, *options[command])
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Cannot read the model"),
        (b"xyz" * 100, "Cannot read the model"),
        (struct.pack("<Q", 2**62) + b"{}", "Cannot read the model"),
        (pickle.dumps({"a": 1}), "Cannot read the model"),
        (None, "Cannot read the model"),
    ],
)
def test_unreadable_weights(content, message, home, tmp_path):
    folder = copy(home, tmp_path, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(content) if content is not None else weights.unlink()
    assert message in refused("check", folder, "--dtype", "float32")


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.parametrize("given", ["</s>", [2, "</s>"], True])
def test_special_tokens_that_are_no_ids(command, given, home, tmp_path):
    folder = copy(home, tmp_path, "llama")
    edit(folder / "generation_config.json", lambda content: content.update(eos_token_id=given))
    words = {"generate": [folder, "All"], "eval": [folder, "--task", "passkey"]}[command]
    message = refused(command, *words)
    assert "Cannot read the model" in message
    assert "eos_token_id of generation_config.json is" in message


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_executed(home, tmp_path):
    folder = copy(home, tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    assert "Cannot read the model" in refused("adapt", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("command", ["check", "inspect", "adapt", "generate", "eval"])
def test_a_missing_weight_is_named(command, home, tmp_path):
    folder, out = copy(home, tmp_path, "llama"), tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"inspect": ["--ids", "1 2 3"], "generate": ["hello"], "eval": ["--task", "passkey"]}.get(command, [])
    place = ["--out", out] if command in ("inspect", "adapt", "eval") else []
    assert "lacks 1 of the model's weights: 'model.norm.weight'" in refused(command, folder, *options, *place)
    assert not out.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(settings=None),
        lambda content: content.update(settings=[]),
        lambda content: content.update(settings={"lora_rank": "x"}),
        lambda content: content.update(base={}),
        lambda content: content.update(base=3),
        lambda content: content.update(tensors={}),
        lambda content: content.update(tensors=[]),
        lambda content: content.update(method=["tape"]),
        lambda content: content.update(training=None),
        lambda content: content["base"]["architecture"].update(encoding={}),
        lambda content: content["base"]["architecture"].update(encoding=[]),
        lambda content: content["base"].update(architecture=None),
        lambda content: content["base"].pop("weights"),
        lambda content: content.pop("format"),
    ],
)
def test_adapter_with_empty_parts(change, home, tmp_path):
    folder = copy(home, tmp_path, "adapter")
    edit(folder / "adapter.json", change)
    assert "adapter.json" in refused("check", folder, "--base", home / "llama").replace(" ", "")


@pytest.mark.parametrize("text", ["null", "[]", "", DEEP, "3"])
def test_unreadable_adapter_description(text, home, tmp_path):
    folder = copy(home, tmp_path, "adapter")
    (folder / "adapter.json").write_text(text)
    assert "is damaged" in refused("check", folder, "--base", home / "llama")


def test_adapter_of_the_wrong_shape(home, tmp_path):
    folder = copy(home, tmp_path, "adapter")
    tensors = load_file(folder / "adapter.safetensors")
    tensors[sorted(tensors)[0]] = torch.zeros(3, 3)
    save_file(tensors, folder / "adapter.safetensors")
    digest = hashlib.sha256((folder / "adapter.safetensors").read_bytes()).hexdigest()
    edit(folder / "adapter.json", lambda content: content["tensors"].update(sha256=digest))
    assert "of shape [3, 3]; the model's is" in refused("check", folder, "--base", home / "llama")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["null", "{", DEEP])
def test_unreadable_tokenizer(name, text, home, tmp_path):
    folder = copy(home, tmp_path, "llama")
    (folder / name).write_text(text)
    assert "tokenizer" in refused("generate", folder, "hello")


def archive(size):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number in range(3):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = size
            tar.addfile(entry, io.BytesIO(b"x" * size))
    return made.getvalue()


DATA = {
    "empty.txt": b"",
    "letters.txt": b"\xff\xfe" * 50,
    "damaged.txt.gz": gzip.compress(b"text" * 1000)[:-20],
    # the second header
    "damaged.tar": archive(600)[:1600] + b"\x01" * 9 + archive(600)[1609:],
    "deep.jsonl": DEEP.encode() + b"\n",
    "numbers.jsonl": b"3\n4\n",
    "no-text.jsonl": b'{"text": 3}\n',
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("command", ["eval", "adapt"])
def test_data_that_cannot_be_read(name, command, home, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(DATA[name])
    options = {
        "eval": ["--task", "perplexity", f"data={path}", "lengths=[16]"],
        "adapt": ["--data", path, "--steps", 1, "--context", 32],
    }
    assert path.name in refused(command, home / "llama", *options[command], "--out", out).replace(" ", "")
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapt", "LLAMA", "--theta", "nan"], "theta"),
        (["adapt", "LLAMA", "--lora-alpha", "inf"], "alpha"),
        (["adapt", "LLAMA", "--scaling", "factor=nan"], "factor"),
        (["adapt", "LLAMA", "--lora-rank", "0"], "rank"),
        (["adapt", "LLAMA", "--method", "magic"], "magic"),
        (["check", "LLAMA", "--dtype", "int8"], "int8"),
        (["check", "NOWHERE"], "There is no model at"),
        (["generate", "LLAMA", ""], "prompt is empty"),
        (["generate", "LLAMA", "x", "--temperature", "nan"], "temperature"),
        (["inspect", "LLAMA", "--ids", "1 x"], "token ids are whole numbers"),
        (["inspect", "LLAMA", "--ids", "1 999"], "not in the model's vocabulary"),
        (["eval", "LLAMA", "--task", "passkey", "samples=-1"], "samples"),
        (["eval", "LLAMA", "--task", "passkey", "depths=[2]"], "depths"),
        (["eval", "LLAMA", "--task", "nothing"], "nothing"),
        (["compare", "demo", "train.learning_rate=nan"], "learning_rate"),
        (["compare", "demo", "encodings=[{kind: fire, initial_c: .nan}]"], "initial_c"),
        (["compare", "demo", "encodings=[{kind: tape, init_scale: .inf}]"], "init_scale"),
        (["compare", "demo", "model.hidden_size=x"], "hidden_size"),
        (["compare", "demo", "task=3"], "task"),
        (["compare", "demo", "steps"], "steps"),
        (["train", "nowhere"], "nowhere"),
        (["report", "NOWHERE"], "NOWHERE"),
    ],
)
def test_arguments_that_make_no_sense(words, message, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [str(home / "llama") if word == "LLAMA" else word for word in words]
    assert message in refused(*given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "Recipe 'small' must be a dictionary of settings"),
        ("[]", "Recipe 'small' must be a dictionary of settings"),
        ("3", "Recipe 'small' must be a dictionary of settings"),
        ("{", "Recipe 'small', line 1 is not valid YAML"),
        # YAML is read slowly
        (DEEP[:5000], "Recipe 'small' is nested too deeply to parse as YAML"),
        ("a: &a [*a]", "Recipe 'small' has no option 'a'"),
        ("\x00", "Recipe 'small' is not valid YAML"),
        ("task: {name: [addition]}", "The recipe has no task; set task.name"),
    ],
)
def test_unreadable_recipe(text, message, tmp_path):
    (tmp_path / "small.yaml").write_text(text)
    assert message in refused("compare", tmp_path / "small.yaml", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def evaluation(home, tmp_path_factory):
    """A finished evaluation and the command that made it, without --out."""
    folder = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUITAPE_CACHE", str(folder / "cache"))
        text = f"data={home / 'text.txt'}"
        words = ["eval", str(home / "llama"), "--task", "perplexity", text, "lengths=[16]", "short=8"]
        call(*words, "--out", folder / "out")
        yield folder / "out", words


@pytest.mark.parametrize("name", ["settings.json", "results.jsonl", "report.json", "cost.json"])
@pytest.mark.parametrize("text", ["null\n", "{\n", "[]\n", '{"a": 1}\n'])
def test_damaged_file_of_an_evaluation(name, text, evaluation, tmp_path, no_drawing):
    out, words = evaluation
    out = Path(shutil.copytree(out, tmp_path / "out"))
    (out / name).write_text(text)
    result = call(*words, "--out", out, "--resume", code=None, env={"COLUMNS": "2000"})
    if name in ("settings.json", "results.jsonl"):
        assert result.exit_code == 2
        assert str(out) in result.output
    else:
        assert result.exit_code == 0, result.output
        assert json.loads((out / "report.json").read_text())["metrics"]


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps(3)])
@pytest.mark.parametrize("command", ["check", "generate"])
def test_unreadable_gguf(content, command, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "model.gguf" in refused(command, path, *["hello"] * (command == "generate"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "demo", "--dry-run", "model.hidden_size=1e30"), "hidden_size is 10000"),
        (
            ("train", "demo", "--dry-run", "model.num_hidden_layers=1e9"),
            "num_hidden_layers is 1000000000; it must be at",
        ),
        (("plan", "7b", "--length", 4096, "--gpus", "1e30"), "plan.gpus is 1e+30; it must be a whole number from 1 to"),
        (
            ("plan", "7b", "--length", "1e30"),
            "plan.length is 1e+30; it must be a whole number from 2 to 1,000,000,000,000",
        ),
        (("bench", "--length", "1e30"), "each a whole number from 2 to 2,147,483,647"),
        (("bench", "--layers", "1e30"), "bench.layers is 1e+30; it must be a whole number from 1 to 2,147,483,647"),
        (("adapt", "nothing", "--lora-rank", "1e30"), "lora_rank is 1e+30; it must be a whole number from 1 to 65,536"),
        (("eval", "nothing", "--task", "passkey", "lengths=1e30"), "each a whole number from 1 to 100,000,000"),
        (("eval", "nothing", "--task", "needles", "samples=1e30"), "it must be a whole number from 1 to 1,000,000"),
        (("extend", "nothing", "--to", "1e30"), "extend.to is 1e+30; it must be a whole number from 2 to 100,000,000"),
        (("check", "nothing", "--seed", 10**30), "it must be a whole number from 0 to below 4,294,967,296"),
        (("check", "nothing", "--tokens", 10**10), "it must be a whole number from 8 to 65,536"),
    ],
)
def test_numbers_far_beyond_any_use(arguments, message):
    assert message in refused(*arguments)
