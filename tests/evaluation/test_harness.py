"""lm-evaluation-harness both ways, and our perplexity against its own."""

import json
import math
import sys

import pytest
import torch
from small import evaluated, llama, our_model, save

from command_line import call, in_one_line
from equitape.evaluation import build_evaluation, evaluate, load_evaluated_model
from equitape.evaluation.harness import main, register_with_harness
from equitape.report.evaluation import report_folder
from equitape.runs.progress import Phase
from equitape.runs.results import EvaluationReport
from equitape.tasks import harness_model
from equitape.tasks.perplexity import perplexity

pytestmark = pytest.mark.usefixtures("no_drawing")

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.tasks")

CHOICES = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: [" red", " green", " blue"]
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
TEXTS = ["the quick brown fox jumps over the lazy dog " * 4, "sphinx of black quartz, judge my vow " * 3]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of tasks; the harness then reads no others, of which it has thousands."""
    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: manager(**{**given, "include_defaults": False}))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"What colour is number {n}?", "label": n % 3, "text": TEXTS[n % 2]} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in {"colours": CHOICES, "letters": ROLLING}.items():
        text = content.replace("FILE", str(folder / "rows.jsonl"))
        if name == "letters":
            (folder / "two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
            text = text.replace("rows.jsonl", "two.jsonl")
        (folder / f"{name}.yaml").write_text(text)
    return folder


def by_harness(tmp_path, monkeypatch, *arguments):
    """Our door to the harness's own command line."""
    out = tmp_path / "harness"
    command = ["lm_eval", *arguments, "--output_path", str(out), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    newest = max(out.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["results"]


def by_class(tasks, model, arguments, task, device="cpu"):
    """The harness without its command line."""
    register_with_harness()
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=manager, device=device, bootstrap_iters=0
    )
    return found["results"][task]


@pytest.mark.parametrize("make", [our_model, llama], ids=["ours", "original"])
def test_both_ways_give_the_same_number(make, tasks, tmp_path, monkeypatch):
    """To the last digit: a model of ours by the harness's command line, a plain Llama by its own class `hf`."""
    folder = save(make(dtype=torch.float32, max_position_embeddings=128), tmp_path / "model")
    options = {"include_path": str(tasks)}
    ours = evaluate(
        load_evaluated_model(folder, device="cpu"), build_evaluation("lm-eval:colours", options), tmp_path / "out"
    )
    if make is our_model:
        arguments = ["--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "colours"]
        theirs = by_harness(tmp_path, monkeypatch, *arguments, "--include_path", str(tasks))["colours"]
    else:
        theirs = by_class(tasks, "hf", f"pretrained={folder}", "colours")
    for metric in ("acc", "acc_norm"):
        assert ours["metrics"][f"colours {metric}"] == theirs[f"{metric},none"]
    assert 0 < theirs["acc,none"] + theirs["acc_norm,none"] < 2
    assert ours["metrics"]["score"] == theirs["acc,none"]
    assert "colours 12" in ours["protocol"][0]
    first = ours["bars"][0]
    assert (first["rows"], first["values"], first["most"]) == (["colours"], [theirs["acc,none"]], 1)
    report_folder(tmp_path / "out")
    for name in ("bars-lm-evaluation-harness-acc.png", "bars-lm-evaluation-harness-acc-norm.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (tmp_path / "out/report.md").read_text()


def test_the_harness_falls_back_to_the_cpu(tasks, tmp_path, monkeypatch):
    """Its own default device is cuda:0, whatever the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save(our_model(dtype=torch.float32, max_position_embeddings=128), tmp_path / "model")
    found = by_class(tasks, "equitape", f"pretrained={folder}", "colours", device="cuda:0")
    assert found == by_class(tasks, "equitape", f"pretrained={folder}", "colours")


def test_figures_of_the_harness_are_not_in_per_cent(tasks, tmp_path):
    folder = save(our_model(dtype=torch.float32, max_position_embeddings=128), tmp_path / "model")
    task = build_evaluation("lm-eval:colours", {"include_path": str(tasks)})
    evaluate(load_evaluated_model(folder, device="cpu"), task, tmp_path / "out")
    report = EvaluationReport.read(tmp_path / "out/report.json")
    assert [report.metric(name).unit for name in report.metrics] == [""] * len(report.metrics)


def test_questions_that_changed_are_another_evaluation(tasks, tmp_path):
    folder = save(our_model(dtype=torch.float32, max_position_embeddings=128), tmp_path / "model")

    def run(**given):
        task = build_evaluation("lm-eval:colours", {"include_path": str(tasks)})
        return evaluate(load_evaluated_model(folder, device="cpu"), task, tmp_path / "out", **given)

    first = run()
    assert run(resume=True)["metrics"] == first["metrics"]
    for path, old, new in (
        (tasks / "rows.jsonl", "number 3", "number 33"),
        (tasks / "colours.yaml", "{{question", "Q: {{question"),
    ):
        kept = path.read_text()
        path.write_text(kept.replace(old, new))
        with pytest.raises(ValueError, match=r"already holds a different evaluation \(digest was"):
            run(resume=True)
        path.write_text(kept)


GENERATED = """
task: numbers
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
generation_kwargs: {until: ["!"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
"""


def test_what_the_harness_cuts_is_counted(tasks, tmp_path):
    rows = [{"question": "a" * size, "label": 0} for size in (10, 40, 60)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "numbers.yaml").write_text(GENERATED.replace("FILE", str(tasks / "rows.jsonl")))

    def notes(max_length):
        options = {"include_path": str(tasks), "max_length": max_length, "batch_size": 2}
        who = evaluated(llama(dtype=torch.float32, max_position_embeddings=128))
        task = build_evaluation("lm-eval:colours,numbers", options)
        return evaluate(who, task, tmp_path / f"out{max_length}")["notes"]

    assert "No request was longer than 66 tokens with its answer; nothing was cut." in notes(66)
    # "  red", "  green" and "  blue" after 40 and 60 letters, the last of each not read; and 5 tokens to write
    cut = sum(max(0, size + word - 1 - 42) for size in (40, 60) for word in (5, 7, 6)) + (40 - 37) + (60 - 37)
    assert notes(42)[-1] == (
        f"8 of 12 requests were longer than 42 tokens with their answer, and the harness cut their beginning: {cut} "
        f"tokens in all."
    )


def test_rolling_likelihood_agrees_with_our_perplexity(tasks, tmp_path):
    """The harness reads windows that do not overlap, the end token before the first: so can we."""
    model = llama(dtype=torch.float32, max_position_embeddings=32)
    folder = save(model, tmp_path / "model")
    found = by_class(tasks, "hf", f"pretrained={folder}", "letters")
    documents = [[256, *text.encode()] for text in TEXTS]
    mine = perplexity(model, documents, 32)
    assert mine.tokens == sum(map(len, TEXTS))
    assert math.exp(mine.loss) == pytest.approx(found["byte_perplexity,none"], rel=1e-6)
    # and by the command, which knows bytes
    ours = evaluate(
        load_evaluated_model(folder, device="cpu"),
        build_evaluation("lm-eval:letters", {"include_path": str(tasks)}),
        tmp_path / "out",
    )
    assert ours["metrics"]["letters byte_perplexity"] == found["byte_perplexity,none"]


def test_everything_equitape_loads_runs_under_the_harness(tasks, tmp_path):
    """Adapters too, by --model equitape."""
    import equitape

    base = save(llama(dtype=torch.float32, max_position_embeddings=128), tmp_path / "base")
    adapted = equitape.adapt(base, "tape")
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    adapted.save_adapter(tmp_path / "adapter")
    who = load_evaluated_model(str(tmp_path / "adapter"), base=base, device="cpu")
    ours = evaluate(who, build_evaluation("lm-eval:letters", {"include_path": str(tasks)}), tmp_path / "out")
    theirs = by_class(tasks, "equitape", f"pretrained={tmp_path / 'adapter'},base={base}", "letters")
    assert ours["metrics"]["letters byte_perplexity"] == theirs["byte_perplexity,none"]
    plain = evaluate(
        load_evaluated_model(base, device="cpu"),
        build_evaluation("lm-eval:letters", {"include_path": str(tasks)}),
        tmp_path / "b",
    )
    assert plain["metrics"]["score"] != ours["metrics"]["score"]


GROUP = """
group: both
task: [colours, letters]
aggregate_metric_list: [{metric: acc}]
"""


def test_a_group_runs_all_its_tasks(tasks, tmp_path):
    (tasks / "both.yaml").write_text(GROUP)
    task = build_evaluation("lm-eval:both", {"include_path": str(tasks)})
    who = evaluated(llama(dtype=torch.float32, max_position_embeddings=128))
    metrics = evaluate(who, task, tmp_path / "out")["metrics"]
    assert {"colours acc", "letters byte_perplexity"} <= set(metrics)


def test_data_that_cannot_be_loaded_raises_one_sentence(tasks, tmp_path, monkeypatch):
    """Before anything is written; a real failure of the Hub ends the same way, once it has tried again a few times."""
    folder = save(our_model(dtype=torch.float32), tmp_path / "model")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub (LocalEntryNotFoundError).\nMore of it.")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    arguments = ["eval", folder, f"include_path={tasks}", "limit=2", "--task", "lm-eval:colours"]
    result = call(*arguments, "--out", tmp_path / "out", code=2)
    message = in_one_line(result.stderr)
    assert (
        "lm-evaluation-harness cannot load its task 'colours' (Couldn't reach 'Rowan/hellaswag' on the Hub "
        "(LocalEntryNotFoundError)). It takes data from the Hugging Face Hub: run it once where there is a network, or "
        "name a folder of tasks in YAML that have local data by include_path=FOLDER."
    ) in message
    assert "More of it" not in message
    assert not (tmp_path / "out").exists()


def test_unknown_tasks_and_a_missing_package(tasks, monkeypatch):
    who = evaluated(our_model())
    with pytest.raises(ValueError, match=r"has no task 'colors'. Did you mean 'colours'"):
        build_evaluation("lm-eval:colors", {"include_path": str(tasks)}).prepare(who)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r'need the package lm-eval; install it with pip install "equitape\[eval\]"'):
        build_evaluation("lm-eval:colours").check_scoring()
    with pytest.raises(SystemExit, match="need the package lm-eval"):
        main()


@pytest.mark.parametrize("name", ["colours", "letters"])
def test_an_interrupted_task_asks_no_question_twice(name, tasks, tmp_path, monkeypatch):
    """Answers inside a unit are kept; progress counts requests."""
    monkeypatch.setattr(harness_model, "DOCUMENTS", 1)
    asked, advanced, limit = [], [], [math.inf]
    wrap = harness_model.wrap

    def counting(*arguments):
        model = wrap(*arguments)
        call = model._model_call

        def count(*given, **named):
            if len(asked) == limit[0]:
                raise KeyboardInterrupt
            asked.append(1)
            return call(*given, **named)

        model._model_call = count
        return model

    def run(out, resume=False):
        asked.clear()
        who = evaluated(llama(dtype=torch.float32, max_position_embeddings=128))
        task = build_evaluation(f"lm-eval:{name}", {"include_path": str(tasks)})
        return evaluate(who, task, tmp_path / out, resume=resume)

    monkeypatch.setattr("equitape.tasks.harness.wrap", counting)
    monkeypatch.setattr(Phase, "advance", lambda self, amount: advanced.append(amount))
    expected, every = run("whole"), len(asked)
    assert len(advanced) >= {"colours": 36, "letters": 2}[name]
    assert sum(advanced) == pytest.approx(128, rel=0.01)
    limit[0] = every - 1
    with pytest.raises(KeyboardInterrupt):
        run("out")
    limit[0] = math.inf
    found = run("out", resume=True)
    assert len(asked) == 1
    assert found["metrics"] == expected["metrics"]
    assert "before the last interruption are not counted" in found["notes"][-1]
    assert not (tmp_path / "out/unfinished").exists()


def test_the_score_is_a_metric_that_is_better_if_higher(tasks, tmp_path):
    (tasks / "letters.yaml").write_text((tasks / "letters.yaml").read_text().replace("letters", "b_letters"))
    who = evaluated(llama(dtype=torch.float32, max_position_embeddings=128))

    def report(name):
        evaluate(who, build_evaluation(f"lm-eval:{name}", {"include_path": str(tasks)}), tmp_path / name)
        return EvaluationReport.read(tmp_path / name / "report.json")

    both = report("b_letters,colours")
    assert both.metrics["score"] == both.metrics["colours acc"]
    assert both.metric("score").higher_is_better is True
    assert both.metric("b_letters byte_perplexity").higher_is_better is False
    alone = report("b_letters")
    assert alone.metrics["score"] == alone.metrics["b_letters byte_perplexity"]
    assert alone.metric("score").higher_is_better is False
    assert "'score' is b_letters byte_perplexity" in alone.protocol[1]


def test_a_command_prints_nothing_of_the_harness(tasks, tmp_path, monkeypatch, capfd):
    """Neither bars nor hints nor batch sizes, nor git's complaint about a folder without a repository."""
    folder = save(our_model(dtype=torch.float32, max_position_embeddings=128), tmp_path / "model")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = [folder, "--task", "lm-eval:colours", f"include_path={tasks}", "batch_size=auto", "--out", "out"]
    result = call("eval", *arguments, "--json")
    assert json.loads(result.stdout)[0]["task"] == "lm-eval:colours"
    assert result.stderr.splitlines()[0].strip() == "lm-eval:colours: model"
    assert "%|" not in result.stderr
    assert capfd.readouterr() == ("", "")
