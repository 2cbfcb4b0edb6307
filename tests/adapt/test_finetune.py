"""Fine-tuning runs: what they write, that a kill costs nothing, that gradients arrive, and what is refused."""

import copy
import importlib
import json
import multiprocessing
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from finetuning import CONTEXT, losses, make_room, run, settings_of

from cases import gap
from command_line import call, in_one_line
from equitape import load_adapter
from equitape.adapt import METHODS, AdaptSettings
from equitape.adapt.finetune import differences, finetune, only_trained_in_checkpoints
from equitape.data.tokenizers import byte_tokenizer
from equitape.pretrained import adapting
from equitape.pretrained.weights import load_source
from equitape.training import callbacks
from families import make_source

pytestmark = pytest.mark.usefixtures("no_drawing")

# the name equitape.adapt is that of the function too
planning, training = (importlib.import_module(f"equitape.adapt.{name}") for name in ("dry_run", "finetune"))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A base with a byte tokenizer, text to train on, and text to score."""
    return make_room(tmp_path_factory.mktemp("finetune"))


def test_short_rows_with_jumps_reach_the_context(room, tmp_path):
    """Rows of half the context, whose ids jump ahead: fewer tokens per row, other losses than without jumps."""
    plain = run(room, tmp_path / "plain", "lora", row_length=CONTEXT // 2)
    assert plain["run"]["tokens"] == 6 * 2 * CONTEXT // 2
    assert plain["context"] == CONTEXT
    run(room, tmp_path / "jumping", "lora", row_length=CONTEXT // 2, jumps={"rate": 0.2, "size": 2.0})
    before, after = ([line["loss"] for line in losses(tmp_path / name)] for name in ("plain", "jumping"))
    assert len(before) == len(after) == 6
    assert before != after


def test_jumps_by_the_command_line(room, tmp_path):
    out = tmp_path / "out"
    arguments = ["adapt", str(room / "base"), "--method", "lora", "--context", str(CONTEXT), "--steps", "2",
                 "--batch-size", "2", "--data", str(room / "data"), "--cache", str(room / "cache"), "--row-length", "32",
                 "--jumps", "rate=0.1", "--jumps", "shape=log", "--out", str(out)]  # fmt: skip
    call(*arguments)
    assert '"rate": 0.1' in (out / "run.json").read_text()
    wrong = call(*arguments[:-1], tmp_path / "other", "--jumps", "rat=0.1", code=2)
    assert "'rat'" in wrong.output


@pytest.mark.parametrize("method", ["tape", "tape+lora", "longlora", "theta"])
def test_a_run_learns_and_writes(room, tmp_path, method):
    evaluation = {"data": {"books": str(room / "test")}, "lengths": [16, 64], "windows": 4}
    rate = 1e-3 if METHODS[method].everything else 3e-2
    report = run(room, tmp_path, method, steps=12, learning_rate=rate, evaluation=evaluation)
    assert report["status"] == "done"
    assert report["run"]["steps"] == 12
    assert report["run"]["tokens"] == 12 * 2 * CONTEXT
    assert [(entry["data"], entry["length"]) for entry in report["perplexity"]] == [("books", 16), ("books", 64)]
    for entry in report["perplexity"]:
        assert entry["perplexity_after"] < 0.98 * entry["perplexity_before"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"tensorboard"} == {
        "README.md", "adapter.json", "adapter.safetensors", "before.json", "log.jsonl", "results.json",
        "run.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(report))
    card = (tmp_path / "README.md").read_text()
    assert "| data | data |" in card
    assert "perplexity of books at 64" in card
    # the adapter is the model that was scored
    from equitape.data.tokens import build_tokens
    from equitape.tasks.perplexity import perplexity, spread_over_documents

    model = load_adapter(room / "base", tmp_path)
    store = build_tokens(str(room / "test"), byte_tokenizer(), room / "cache")
    documents = [store.document(index) for index in range(len(store))]
    pieces = spread_over_documents([len(document) for document in documents], 64, 4)
    assert perplexity(model, documents, 64, spans=pieces).perplexity == pytest.approx(
        report["perplexity"][1]["perplexity_after"], rel=1e-6
    )
    # lengths differ in context alone
    assert [entry["tokens"] for entry in report["perplexity"]] == [4 * 64, 4 * 64]
    assert [entry["windows"] for entry in report["perplexity"]] == [16, 4]


def test_scores_of_an_older_version_are_made_again(room, tmp_path):
    """An interrupted run may hold scores of other tokens; those after training would not compare with them."""
    report = run(room, tmp_path, steps=1)
    (tmp_path / "results.json").unlink()
    older = [{**entry, "perplexity": 1.0} for entry in json.loads((tmp_path / "before.json").read_text())]
    for entry in older:
        del entry["piece"]
    (tmp_path / "before.json").write_text(json.dumps(older))
    again = run(room, tmp_path, steps=1, resume=True)
    assert again["perplexity"][0]["perplexity_before"] == report["perplexity"][0]["perplexity_before"]


def test_text_that_is_trained_on_and_scored_is_warned_of(room, tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "copy.txt").write_text((room / "data" / "0.txt").read_text())
    (tmp_path / "mixed" / "other.txt").write_text("".join(chr(97 + (index * index) % 23) for index in range(900)))
    result = command(
        room / "base", "--context", CONTEXT, "--data", room / "data", "--out", tmp_path / "run", "--steps", 1,
        "--batch-size", 2, "--cache", room / "cache", "--eval-data", f"books={tmp_path / 'mixed'}",
    )  # fmt: skip
    printed = " ".join(result.output.split())
    assert "Training data: 4 documents, " in printed
    assert "% of books also occurs in the training data (1 document)" in printed
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(written["warnings"]) == 1
    # the card has the scores, so it has the warning too
    assert f"| warning | {written['warnings'][0]} |" in (tmp_path / "run" / "README.md").read_text()
    assert written["adapt"]["method"] == "tape+lora"
    assert written["train"]["learning_rate"] == 1e-3


def test_training_data_is_scored_when_no_other_is_named(room, tmp_path):
    report = run(room, tmp_path, steps=1)
    assert [(entry["data"], entry["length"]) for entry in report["perplexity"]] == [("training data", CONTEXT)]
    assert "perplexity is that of the training data" in report["warnings"][0]


@pytest.mark.parametrize("method", ["tape", "longlora"])
def test_half_precision_holds_what_trains_in_full(room, tmp_path, method):
    report = run(room, tmp_path, method, steps=12, learning_rate=3e-2, precision="bf16")
    entry = report["perplexity"][0]
    assert entry["perplexity_after"] < 0.98 * entry["perplexity_before"]
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "adapter.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    wide = load_adapter(room / "base", tmp_path, dtype="float32")
    assert all(torch.equal(tensors[name], dict(wide.named_parameters())[name]) for name in tensors)


@pytest.mark.parametrize("method", ["tape", "longlora"])
def test_checkpointed_activations_change_nothing(room, tmp_path, method):
    """The frozen base starts with inputs that take no gradient, which some ways of checkpointing do not survive."""
    plain = run(room, tmp_path / "plain", method)
    saved = run(room, tmp_path / "saved", method, gradient_checkpointing=True)
    for ours, theirs in zip(losses(tmp_path / "plain"), losses(tmp_path / "saved"), strict=True):
        assert ours["grad_norm"] > 0
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert plain["run"]["loss"] < losses(tmp_path / "plain")[0]["loss"]
    assert saved["status"] == "done"


def test_accumulation_changes_nothing(room, tmp_path):
    run(room, tmp_path / "one", batch_size=4)
    run(room, tmp_path / "four", batch_size=4, gradient_accumulation_steps=4)
    for ours, theirs in zip(losses(tmp_path / "one"), losses(tmp_path / "four"), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["tokens"] == ours["tokens"]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_schedules(room, tmp_path, schedule):
    run(room, tmp_path, steps=8, schedule=schedule, warmup_ratio=0.25)
    rates = [line["learning_rate"] for line in losses(tmp_path)]
    assert rates[0] < rates[1] < 1e-2 + 1e-9
    assert (rates[-1] < 0.1 * max(rates)) == (schedule == "cosine")
    assert (rates[-1] == 1e-2) == (schedule == "constant")


def run_slowly(room, out, course):
    """A run that waits after every step, so that it can be killed between two."""
    end_step = callbacks.Bookkeeper.on_step_end

    def waiting(self, *args, **kwargs):
        time.sleep(0.1)
        return end_step(self, *args, **kwargs)

    callbacks.Bookkeeper.on_step_end = waiting
    run(room, out, resume=True, **course)


def test_a_kill_costs_nothing(room, tmp_path):
    """Killed without warning between two checkpoints, resumed: the same log, byte for byte, and the same adapter."""
    adapt = {"lora_dropout": 0.2, "lora_targets": ("q_proj",), "train_embeddings": True}
    course = {"method": "tape+lora", "steps": 12, "adapt": adapt, "save_steps": 2, "logging_steps": 1}
    run(room, tmp_path / "whole", **course)
    out = tmp_path / "killed"
    process = multiprocessing.get_context("fork").Process(target=run_slowly, args=(room, out, course))
    process.start()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        if (out / "log.jsonl").exists() and len((out / "log.jsonl").read_text().splitlines()) >= 5:
            break
        time.sleep(0.01)
    assert process.is_alive(), "the run ended before it could be killed"
    process.kill()
    process.join()
    done = len(losses(out))
    assert 5 <= done < 12
    before = (out / "before.json").read_bytes()
    run(room, out, resume=True, **course)
    assert (out / "before.json").read_bytes() == before
    assert (out / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()
    first, second = ((folder / "adapter.safetensors").read_bytes() for folder in (tmp_path / "whole", out))
    assert first == second


def test_checkpoints_hold_only_what_trains(room, tmp_path):
    model = load_source(room / "base")
    from equitape import adapt

    model = adapt(model, "lora")
    with only_trained_in_checkpoints(model):
        model.save_pretrained(tmp_path / "checkpoint")
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "checkpoint" / "model.safetensors")) == set(model.adaptation.trained)
    model.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "config.json").exists()


def test_resuming(room, tmp_path):
    report = run(room, tmp_path, steps=2)
    assert run(room, tmp_path, steps=2, resume=True) == report
    with pytest.raises(ValueError, match="already holds this run; continue it with --resume"):
        run(room, tmp_path, steps=2)
    # finished or not
    with pytest.raises(ValueError, match=r"already holds a different run \(train.learning_rate was 0.01, now 0.02"):
        run(room, tmp_path, steps=2, resume=True, learning_rate=2e-2)
    with pytest.raises(ValueError, match=r"already holds a different run \(adapt.method was tape, now lora"):
        run(room, tmp_path, "lora", steps=2, resume=True)


def test_figures_before_and_after_are_of_the_same_text(room, tmp_path):
    """Other texts or lengths to score are refused, finished or not; damaged figures are made again."""
    scored = {"data": {"test": str(room / "test")}, "lengths": [16, 64], "windows": 4}
    report = run(room, tmp_path, steps=2, evaluation=scored)
    (tmp_path / "results.json").unlink()
    for finished in (False, True):
        for change, name in (
            ({"lengths": [32, 64]}, "lengths"),
            ({"lengths": [64]}, "lengths"),
            ({"stride": 8}, "stride"),
            ({"windows": 3}, "windows"),
            ({"data": {"test": str(room / "data")}}, "data.test"),
        ):
            with pytest.raises(ValueError, match=rf"already holds a different run \(evaluation.{name} was"):
                run(room, tmp_path, steps=2, evaluation={**scored, **change}, resume=True)
        if not finished:
            (tmp_path / "before.json").write_text('[{"piece": 64}, 1]')
            again = run(room, tmp_path, steps=2, evaluation=scored, resume=True)
            assert again["perplexity"] == report["perplexity"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", "null"])
def test_a_finished_run_with_damaged_results_is_not_trained_again(content, room, tmp_path):
    run(room, tmp_path, steps=2)
    (tmp_path / "results.json").write_text(content)
    before = (tmp_path / "adapter.safetensors").read_bytes(), (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"results\.json is damaged; delete it to repeat the run"):
        run(room, tmp_path, steps=2, resume=True)
    assert ((tmp_path / "adapter.safetensors").read_bytes(), (tmp_path / "log.jsonl").read_bytes()) == before


@pytest.mark.parametrize("name", ["adapter.safetensors", "adapter.json"])
def test_a_finished_run_without_its_adapter_is_refused(name, room, tmp_path):
    run(room, tmp_path, steps=1)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"is finished, but {name} is gone; delete results.json to train again"):
        run(room, tmp_path, steps=1, resume=True)


def test_a_nan_loss(room, tmp_path):
    report = run(room, tmp_path, learning_rate=1e18, max_grad_norm=0.0, steps=8)
    assert report["status"] == "nan"
    assert "was NaN or infinite at step" in report["note"]
    assert not (tmp_path / "adapter.json").exists()
    assert report["perplexity"][0]["perplexity_after"] is None


def test_refusals_before_training(room, tmp_path):
    def attempt(message, method="tape", adapt=None, **changes):
        with pytest.raises(ValueError, match=message):
            run(room, tmp_path / "out", method, adapt=adapt, **changes)
        assert not (tmp_path / "out" / "log.jsonl").exists()

    empty, blank, binary, short = (tmp_path / name for name in ("empty", "blank", "binary", "short"))
    for folder in (empty, blank, binary, short):
        folder.mkdir()
    (blank / "a.txt").write_text("")
    (binary / "a.bin").write_bytes(bytes(range(256)))
    (short / "a.txt").write_text("too short")
    attempt("has no files", data=[str(empty)])
    attempt("has no text", data=[str(blank)])
    attempt("is binary", data=[str(binary)])
    attempt("There is no file or folder", data=[str(tmp_path / "nowhere")])
    attempt(r"The data has 10 tokens, too few for one row of 64; give more text", data=[str(short)])
    attempt("row_length is 65; it must be at most the context, 64 tokens", row_length=65)
    attempt("Rows have 64 tokens and min_tokens is 65: no document fits", min_tokens=65)
    attempt("No document has 64 tokens; the longest has 10", data=[str(short)], whole_rows=True)
    lengths = {"data": {"notes": str(short)}, "lengths": [8, 16]}
    attempt("Perplexity at length 16 needs a document of 17 tokens; in 'notes', the longest has 10", evaluation=lengths)
    attempt("There is no file or folder", evaluation={"data": {"x": str(tmp_path / "none")}})
    attempt("each a whole number of 1 or more", evaluation={"lengths": [0]})
    attempt("stride is 9, more than the shortest length, 8", evaluation={"lengths": [8], "stride": 9})


def test_a_batch_that_cannot_be_split_is_refused_before_the_model_is_loaded(room, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "build", None)
    monkeypatch.setattr(training, "PartialState", lambda **_: SimpleNamespace(num_processes=2, is_main_process=True))
    with pytest.raises(ValueError, match="batch_size 1 cannot be split over 2 processes"):
        run(room, tmp_path / "out", batch_size=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("entries", "message"), [(200, "258 entries, but the model has only 200"), (4000, "trained with a different one")]
)
def test_a_tokenizer_of_another_model(room, tmp_path, entries, message):
    make_source(vocab_size=entries).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"There is no tokenizer in .* Give the matching one with --tokenizer"):
        finetune(tmp_path / "base", AdaptSettings(context=CONTEXT), settings_of(room), tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        finetune(
            tmp_path / "base", AdaptSettings(context=CONTEXT), settings_of(room, tokenizer=str(room / "base")),
            tmp_path / "out",
        )  # fmt: skip


def command(*words, code=0):
    return call("adapt", *words, code=code)


def test_the_command_trains(room, tmp_path):
    out = tmp_path / "run"
    result = command(
        room / "base", "--method", "tape+lora", "--context", CONTEXT, "--scaling", "yarn", "--data", room / "data", "--out",
        out, "--steps", 2, "--batch-size", 2, "--eval-data", f"books={room / 'test'}", "--eval-lengths", "16,32",
        "--eval-windows", 0, "--cache", room / "cache", "--lora-rank", 2, "--tape", "mixer_size=3", "--save", "model",
        "--json")  # fmt: skip
    report = json.loads(result.stdout)
    assert report["adapt"]["lora_rank"] == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report["adapt"]["tape"] == {"mixer_size": 3}
    assert [entry["length"] for entry in report["perplexity"]] == [16, 32]
    assert report["perplexity"][0]["windows"] > 32
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(out / "model")
    assert AutoTokenizer.from_pretrained(out / "model").model_max_length == CONTEXT
    tokens = torch.randint(0, 250, (1, 40))
    with torch.no_grad():
        assert gap(whole(tokens).logits, load_adapter(room / "base", out)(tokens).logits) < 1e-5
    # and the same from the adapter alone
    command(room / "base", "--adapter", out, "--out", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), merged.parameters(), strict=True))


def test_a_dry_run_measures_and_writes_nothing(room, tmp_path):
    words = [
        room / "base", "--context", CONTEXT, "--data", room / "data", "--steps", 50, "--batch-size", 4, "--accumulation", 2,
        "--eval-data", f"books={room / 'test'}", "--cache", room / "cache", "--dry-run",
    ]  # fmt: skip
    result = command(*words, "--out", tmp_path / "run", "--json")
    plan = json.loads(result.stdout)
    assert plan["data"]["documents"] == 4
    assert plan["tokens"] == 50 * 4 * CONTEXT
    assert plan["training_seconds"] > 0
    assert plan["scoring_seconds"] > 0
    assert plan["peak_mib"] > 0
    assert list(tmp_path.iterdir()) == []
    printed = " ".join(command(*words).output.split())
    assert "50 steps, 12,800 tokens" in printed
    assert "nothing was trained or written" in printed


def test_a_dry_run_that_does_not_fit_says_so(room, tmp_path, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(planning, "measure_step", fail)
    plan = planning.dry_run(room / "base", AdaptSettings(context=CONTEXT), settings_of(room))
    assert plan["training_seconds"] is None
    assert "One step runs out of memory" in plan["note"]


def test_an_interrupt_ends_with_the_command_that_continues(room, tmp_path, monkeypatch):
    words = [
        str(word) for word in (
            room / "base", "--context", CONTEXT, "--data", room / "data", "--steps", 2, "--batch-size", 2, "--save-every", 1,
            "--cache", room / "cache", "--out", tmp_path / "run",
        )
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["equitape", "adapt", *words])

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "write_run", interrupt)
    result = command(*words, code=130)
    printed = " ".join(result.output.split())
    assert f"Interrupted. Kept the checkpoint of step 2 in {tmp_path / 'run'}." in printed
    assert f"Continue with: equitape adapt {' '.join(words)} --resume" in printed
    assert "Traceback" not in printed


def test_an_interrupt_after_training_says_that_it_is_finished(room, tmp_path, monkeypatch):
    # brackets in names are not markup
    out = tmp_path / "run[/red]"
    words = (
        room / "base", "--context", CONTEXT, "--data", room / "data", "--steps", 1, "--batch-size", 2, "--save", "model",
        "--cache", room / "cache", "--out", out,
    )  # fmt: skip

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("equitape.pretrained.adapting.save_whole", interrupt)
        printed = " ".join(command(*words, code=130).output.split())
    assert f"Interrupted. Training is finished, and the adapter is in {out}. Continue with:" in printed
    assert "--resume" in printed
    written = (out / "log.jsonl").read_bytes()
    printed = "".join(command(*words, "--resume").output.split())
    assert "run[/red]isalreadyfinished." in printed
    assert (out / "model" / "config.json").exists()
    # the whole model stays when the run is continued without --save model
    command(*(word for word in words if word not in ("--save", "model")), "--resume")
    assert (out / "model" / "config.json").exists()
    assert (out / "log.jsonl").read_bytes() == written
    command(room / "base", "--adapter", out, "--out", tmp_path / "merged[/red]")


def test_the_command_converts(room, tmp_path):
    result = command(room / "base", "--out", tmp_path / "model")
    assert "of the model" in result.output
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.encoding["kind"] == "tape"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 258
    result = command(room / "base", "--method", "lora", "--save", "adapter", "--out", tmp_path / "adapter")
    assert load_adapter(room / "base", tmp_path / "adapter").adaptation.settings.method == "lora"
    before = set(tmp_path.iterdir())
    assert "tape+lora: TAPE instead of RoPE, and low-rank updates" in command(room / "base").output
    shown = json.loads(command(room / "base", "--method", "full", "--json").stdout)
    assert shown["trained"]["share"] == 1.0
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "tpae"], "Did you mean 'tape'"),
        (["--save", "modle"], "Did you mean 'model'"),
        (["--save", "native", "--out", "OUT"], "has no 'tape', so it cannot hold this model"),
        (["--data", "DATA", "--out", "OUT", "--steps", "1", "--save", "native"], "has no 'tape', so it cannot hold"),
        (["--steps", "3"], "--steps only applies to training, which needs --data"),
        (["--eval-windows", "3"], "--eval-windows only applies to training, which needs --data"),
        (["--resume"], "--resume only applies to training"),
        (["--data", "DATA"], "Training needs --out"),
        (["--data", "DATA", "--out", "OUT"], "Training needs a budget; give --steps or --tokens"),
        (["--data", "DATA", "--out", "OUT", "--steps", "1", "--dtype", "float32"], "for training, use --precision"),
        (["--data", "DATA", "--out", "OUT", "--steps", "0"], "train.steps is 0; it must be a whole number from 1"),
        (["--data", "DATA", "--out", "OUT", "--steps", "1", "--adapter", "x"], "cannot be combined with --data"),
        (["--eval-lengths", "1k"], "--eval-lengths only applies to training"),
        (["--eval-data", "books"], "write key=value, for example --eval-data name=path"),
        (["--eval-data", "a=b", "--eval-data", "a=c"], "sets 'a' twice"),
        (["--adapter", "x", "--method", "lora"], "--method was fixed when the adapter was trained"),
        (["--adapter", "x"], "There is no adapter in"),
        (["--tokenizer", "x", "--out", "OUT"], "There is no tokenizer in"),
        (["--save", "model"], "--save only applies to what is written, which needs --out"),
        (["--dtype", "bfloat16"], "--dtype only applies to what is written, which needs --out"),
        (["--tokenizer", "x"], "--tokenizer only applies to what is written, which needs --out"),
        (["--save", "adapter", "--dtype", "bfloat16", "--out", "OUT"], "--dtype only applies to a full model"),
        (["--save", "adapter", "--tokenizer", "x", "--out", "OUT"], "--tokenizer only applies to a full model"),
    ],
)
def test_wrong_options(room, tmp_path, options, message):
    places = {"DATA": str(room / "data"), "OUT": str(tmp_path / "out")}
    result = command(room / "base", *(places.get(option, option) for option in options), code=2)
    # the message is wrapped in a box
    assert message in in_one_line(result.output)


def test_a_folder_that_holds_something_is_left_alone(room, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for out, words in (
        (tmp_path, "is not an empty folder; choose a new folder"),
        (tmp_path / "config.json", "is a file; choose a directory"),
    ):
        result = command(room / "base", "--method", "tape", "--out", out, code=2)
        assert words in in_one_line(result.output)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_full_disk_ends_the_command(room, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapting, "model_card", fail)
    result = command(room / "base", "--out", tmp_path / "model", code=1)
    assert "The disk is full; free some space, then run the command again." in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["null", '{"base": null}', '{"base": {"architecture": {}}}'])
def test_a_damaged_description_of_a_run_is_refused(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"Cannot read .*run\.json; choose another folder"):
        differences(tmp_path, {})


def test_a_run_begun_before_an_encoding_had_all_its_options_resumes(tmp_path):
    base = adapting.adapt(make_source(), "tape").adaptation.base
    older = copy.deepcopy(base)
    del older["architecture"]["encoding"]["theta"]
    (tmp_path / "run.json").write_text(json.dumps({"base": older}))
    assert differences(tmp_path, {"base": base}) == []
    del older["architecture"]["query_growth"], older["architecture"]["query_growth_start"]
    (tmp_path / "run.json").write_text(json.dumps({"base": older}))
    assert differences(tmp_path, {"base": base}) == []
    older["architecture"]["encoding"]["theta"] = 5000.0
    (tmp_path / "run.json").write_text(json.dumps({"base": older}))
    assert [each.name for each in differences(tmp_path, {"base": base})] == ["base.architecture.encoding.theta"]
