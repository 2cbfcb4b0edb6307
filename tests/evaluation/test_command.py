"""`equitape eval` as it is typed: what it takes, what it refuses."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from small import bpe_tokenizer, contract, llama, our_model, save, write_lines

import equitape
from command_line import call, in_one_line
from equitape.evaluation import EVALUATIONS, available_evaluations
from equitape.tasks import needles
from gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("no_drawing")

PASSKEY = ["--task", "passkey", "lengths=[300]", "short=300", "samples=1", "depths=[0.5]", "--device", "cpu"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return save(our_model(dtype=torch.float32), tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(llama(dtype=torch.float32), tmp_path_factory.mktemp("base"))


def invoke(*arguments, code=0):
    return in_one_line(call("eval", *arguments, code=code).output)


def test_one_task_and_its_report(ours, tmp_path):
    printed = invoke(ours, *PASSKEY, "--out", tmp_path / "out", "--name", "tiny")
    for words in (
        "passkey: tiny",
        "exact match",
        "short: exact match 300",
        "exactly the stated number of tokens",
        "report.md",
    ):
        assert words in printed
    assert (tmp_path / "out/report.md").read_text().startswith("# passkey: tiny")
    assert "<h1>passkey: tiny</h1>" in (tmp_path / "out/report.html").read_text()
    again = invoke(ours, *PASSKEY, "--out", tmp_path / "out", code=2)
    assert "--resume" in again
    invoke(ours, *PASSKEY, "--out", tmp_path / "out", "--resume")
    assert "exact match" in invoke(tmp_path / "out", "--rescore")


def test_several_tasks_with_different_options(ours, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 20)
    options = ["lengths=[300]", "samples=1", "short=300", "passkey.depths=[0]", f"perplexity.data={text}"]
    options += ["perplexity.lengths=[64]", "perplexity.short=32"]
    printed = invoke(
        ours,
        "--task",
        "passkey",
        "--task",
        "perplexity",
        *options,
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
        "--json",
    )
    assert (tmp_path / "out/passkey/report.json").exists()
    assert json.loads((tmp_path / "out/perplexity/settings.json").read_text())["options"]["lengths"] == [64]
    assert '"perplexity_32"' in printed


def test_the_folder_is_chosen_by_model_and_task(ours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke(ours, *PASSKEY, "--name", "tiny")
    assert (tmp_path / "runs/eval/tiny/passkey/report.md").exists()


def test_originals_adapters_and_runs(base, tmp_path):
    """By the same code; an untrained adapter answers as its base does, a trained one does not."""
    adapted = equitape.adapt(base, "tape")
    adapted.save_adapter(tmp_path / "fresh")
    torch.manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.5)
    adapted.save_adapter(tmp_path / "trained")
    (tmp_path / "run").mkdir()
    save(our_model(dtype=torch.float32), tmp_path / "run/model")

    def answers(*arguments, name):
        invoke(*arguments, *PASSKEY, "samples=3", "--out", tmp_path / name)
        lines = (tmp_path / name / "results.jsonl").read_text().splitlines()
        settings = json.loads((tmp_path / name / "settings.json").read_text())
        return settings["model"]["class"], [json.loads(line)["record"]["answer"] for line in lines]

    original = answers(base, name="original")
    assert original[0] == "LlamaForCausalLM"
    fresh = answers(tmp_path / "fresh", "--base", base, name="of-fresh")
    assert fresh == ("EquitapeForCausalLM", original[1])
    assert answers(tmp_path / "trained", "--base", base, name="of-trained")[1] != original[1]
    assert answers(tmp_path / "run", name="of-run")[0] == "EquitapeForCausalLM"
    printed = invoke(tmp_path / "fresh", *PASSKEY, code=2)
    assert "is an adapter; give the model it was trained on with --base" in printed


def test_what_cannot_be_compared_is_refused_before_any_work(ours, tmp_path):
    invoke(ours, *PASSKEY, "--out", tmp_path / "a", "--name", "a")
    other = [word if word != "samples=1" else "samples=2" for word in PASSKEY]
    for words, message in (
        ([*PASSKEY, "--beside", tmp_path / "none"], "There is no report to compare with"),
        ([*other, "--beside", tmp_path / "a"], "options.samples was 1, now 2"),
        ([*PASSKEY, "--beside", tmp_path / "a", "--name", "a"], "Two models are called 'a'"),
        ([*PASSKEY, "--beside", tmp_path / "a", "--no-score"], "--beside has no effect with --no-score"),
    ):
        assert message in invoke(ours, *words, "--out", tmp_path / "b", code=2)
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "option", ["--name=x", "--out=x", "--base=x", "--dtype=float32", "--batch-tokens=1", "--resume", "--no-score"]
)
def test_options_without_effect_on_a_new_score_are_refused(option, ours):
    assert f"{option.partition('=')[0]} has no effect with --rescore" in invoke(ours, "--rescore", option, code=2)


def test_beside(ours, base, tmp_path):
    invoke(base, *PASSKEY, "--out", tmp_path / "a", "--name", "llama")
    invoke(ours, *PASSKEY, "--out", tmp_path / "b", "--name", "tape", "--beside", f"original={tmp_path / 'a'}")
    assert "| metric | tape | original |" in (tmp_path / "b/report.md").read_text()
    assert "has two evaluations called 'a'" in invoke(
        tmp_path / "b", "--rescore", "--beside", tmp_path / "a", "--beside", tmp_path / "a", code=2
    )


def test_answers_now_and_scores_later(ours, tmp_path):
    data = write_lines(tmp_path / "scrolls/contract_nli.jsonl", contract("valid", 3))
    options = [f"data={data}", "length=300", "new_tokens=4", "short=16"]
    printed = invoke(ours, "--task", "scrolls:contract_nli", *options, "--no-score", "--out", tmp_path / "out")
    assert "--rescore" in printed
    assert not (tmp_path / "out/report.json").exists()
    printed = invoke(tmp_path / "out", "--rescore")
    assert "6 of 6 prompts were longer than 300 tokens" in printed


def test_gguf_files(tmp_path):
    """The original as transformers reads it, with a tokenizer from elsewhere."""
    pytest.importorskip("gguf")
    source = llama(dtype=torch.float32, bos_token_id=0)
    write_gguf(source, tmp_path / "tiny.gguf")
    folder = save(source, tmp_path / "whole")
    for place, name in ((tmp_path / "tiny.gguf", "a"), (folder, "b")):
        invoke(place, *PASSKEY, "--tokenizer", "bytes", "--out", tmp_path / name, "--dtype", "float32")
    first, second = ((tmp_path / name / "results.jsonl").read_text() for name in "ab")
    assert first == second
    assert "There is no model" in invoke(tmp_path / "none.gguf", *PASSKEY, code=2)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF no")
    assert "Cannot read" in invoke(tmp_path / "bad.gguf", *PASSKEY, "--tokenizer", "bytes", code=2)


def test_what_is_refused(ours, base, tmp_path):
    bare = save(our_model(dtype=torch.float32), tmp_path / "bare", tokenizer=False)
    small = save(bpe_tokenizer() and our_model(dtype=torch.float32), tmp_path / "small", tokenizer=bpe_tokenizer())
    large = tmp_path / "large"
    save(our_model("rope", dtype=torch.float32), large)
    wide = our_model(dtype=torch.float32)
    wide.resize_token_embeddings(5000)
    save(wide, tmp_path / "wide")
    cases = [
        ([ours, "--task", "pass-key"], "Unknown evaluation task 'pass-key'. Did you mean 'passkey'?"),
        ([ours, "--task", "scrolls:qasper2"], "no part 'qasper2'. Did you mean 'qasper'?"),
        ([ours], "Nothing to evaluate; give --task."),
        ([ours, "--task", "passkey", "--task", "passkey"], "given twice"),
        ([ours, "--task", "passkey", "lenghts=[3]"], "No task here has an option 'lenghts'. Did you mean 'lengths'?"),
        ([ours, "--task", "passkey", "needles.samples=3"], "there is no task 'needles' here"),
        ([ours, "--task", "passkey", "samples"], "Cannot parse 'samples'; write key=value"),
        ([ours, "--task", "passkey", "lengths=[40]"], "A prompt of 40 tokens cannot be made"),
        ([ours, "--task", "perplexity"], "Task 'perplexity' has no text"),
        ([ours, "--task", "scrolls:qasper", f"data={tmp_path}"], "The data of scrolls:qasper is missing"),
        ([bare, "--task", "passkey"], "There is no tokenizer in"),
        ([bare, "--task", "passkey"], "with --tokenizer FOLDER"),
        ([small, "--task", "passkey"], "some tokens would be unknown to it"),
        ([tmp_path / "wide", "--task", "passkey"], "it was trained with a different one"),
        ([tmp_path / "nothing", "--task", "passkey"], "There is no model at"),
        (["nothing", "--task", "passkey"], "a name on the Hub"),
        (["runs/mistyped", "--task", "passkey"], "There is no folder 'runs/mistyped' (relative to"),
        ([ours, "--task", "passkey", "lengths=40"], "A prompt of 40 tokens cannot be made"),
        ([ours, "--task", "passkey", "lengths=0"], "lengths is 0; it must be a list, for example [1, 2]"),
        ([ours, "--task", "passkey", "--base", base], "is not an adapter, so --base"),
        ([ours, "--task", "passkey", "--dtype", "float8"], "Unknown dtype 'float8'"),
        ([ours, "--task", "passkey", "--device", "cuda:77"], "Cannot use the device 'cuda:77'"),
        ([ours, "--rescore", "--task", "passkey"], "--rescore reads task and options from the evaluation's folder"),
        ([ours, "--rescore"], "has no readable evaluation"),
    ]
    for arguments, message in cases:
        assert message in invoke(*arguments, code=2), arguments
    # transformers' own words are of no help where no file is
    assert "nstantiate" not in invoke(bare, "--task", "passkey", code=2)
    # but where one is damaged they say how
    (tmp_path / "bare/tokenizer.json").write_text("{")
    assert "There is no tokenizer in" in (printed := invoke(bare, "--task", "passkey", code=2))
    assert "(" in printed
    (tmp_path / "bare/tokenizer.json").unlink()
    invoke(bare, *PASSKEY, "--tokenizer", "bytes", "--out", tmp_path / "out")


def test_settings_that_changed_are_refused(ours, base, tmp_path):
    invoke(ours, *PASSKEY, "--out", tmp_path / "out")
    printed = invoke(ours, *PASSKEY, "seed=5", "--out", tmp_path / "out", "--resume", code=2)
    assert "already holds a different evaluation (options.seed was 0, now 5)" in printed
    printed = invoke(base, *PASSKEY, "--out", tmp_path / "out", "--resume", code=2)
    assert "already holds a different evaluation (model" in printed


def test_all_tasks_are_prepared_before_the_first_runs(ours, tmp_path):
    invoke(ours, *PASSKEY, "--task", "perplexity", "data=nowhere.txt", "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_every_task_and_option_is_documented():
    page = (Path(__file__).parents[2] / "docs/how-to/evaluation.md").read_text()
    for name in available_evaluations():
        part = page[page.index(f"\n## {name}\n") :].split("\n## ")[1]
        for option in EVALUATIONS[name].options_class.__dataclass_fields__:
            assert f"| `{option}` |" in part, f"docs/how-to/evaluation.md says nothing of {name}'s {option}"
        assert EVALUATIONS[name].idea


@pytest.mark.parametrize(
    "wrong", ["full folder", "evaluation there", "no text", "no filler", "no examples", "no rouge"]
)
def test_refusals_come_before_the_model_is_loaded(wrong, ours, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = {
        "no text": ["--task", "perplexity", "data=nowhere.txt"],
        "no filler": ["--task", "needles", "filler=nowhere.txt"],
        "no examples": ["--task", "scrolls:qasper", "data=nowhere.jsonl"],
        "no rouge": ["--task", "scrolls:qmsum"],
    }.get(wrong, PASSKEY)
    if wrong == "evaluation there":
        invoke(ours, *PASSKEY, "--out", out)
    if wrong == "full folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if wrong == "no rouge":
        monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setattr("equitape.tasks.evaluated_model.load_evaluated_model", lambda *_, **__: pytest.fail("loaded"))
    printed = invoke(ours, *arguments, "--out", out, code=2)
    expected = {
        "full folder": "is not empty and has no evaluation",
        "evaluation there": "--resume",
        "no rouge": "rouge-score",
    }
    assert expected.get(wrong, "nowhere") in printed


def test_an_interruption_says_what_is_kept_and_how_to_continue(ours, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = ["eval", ours, *PASSKEY, "samples=3", "--batch-tokens", "400", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["equitape", *command])
    write, calls = needles.write_answers, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(needles, "write_answers", interrupted)
    result = call(*command, code=130)
    assert "Kept 1 of 3 units" in result.output
    line = result.output.partition("Continue with: ")[2].strip()
    assert shlex.split(line) == ["equitape", *command, "--resume"]
    done = (out / "results.jsonl").read_text()
    call(*shlex.split(line)[1:])
    assert (out / "results.jsonl").read_text().startswith(done)
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
