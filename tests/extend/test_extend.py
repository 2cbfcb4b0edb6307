"""Extensions end to end on a tiny model: files, verdicts, what a kill costs, and what is refused."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaForCausalLM

import equitape
from cases import draw_tokens, gap
from command_line import call, in_one_line, invoke
from equitape.adapt import finetune as finetuning
from equitape.commands.extend import FILES, PLAN, PROOF
from equitape.data.tokenizers import byte_tokenizer
from equitape.extend import prepare as preparation
from equitape.extend import run as stages
from equitape.extend.columns import comparator_settings, list_comparators
from equitape.extend.prepare import PAGES_BYTES, bytes_on_disk, prepare
from equitape.extend.proof import describe_success
from equitape.extend.settings import BUDGETS, COMPARATORS, ExtendSettings
from equitape.report.extension import better_columns, damage_table, extension_card, try_command
from equitape.runs.extension import Extension
from equitape.runs.files import plain
from families import make_source

pytestmark = pytest.mark.usefixtures("no_drawing")

CONTEXT = 32
MEASURED = ["perplexity", "passkey", "needles", "agreement"]
"""All but lm-eval, which takes long to import."""


def options_of(room, **changes):
    common = {"steps": 6, "batch_size": 2, "learning_rate": 2e-3, "measure": MEASURED}
    return {**common, "data": [str(room / "data")], "eval_data": [str(room / "test")], **changes}


def extend(room, out, to=128, resume=False, **changes):
    return equitape.extend(room / "base", to, out=out, resume=resume, **options_of(room, **changes))


def run(room, *arguments, code=0, data=None, eval_data=None):
    texts = ("--data", data or room / "data", "--eval-data", eval_data or room / "test")
    measured = [word for name in MEASURED for word in ("--measure", name)]
    common = (*texts, "--batch-size", 2, "--steps", 6, *measured)
    return call("extend", room / "base", *common, *arguments, code=code)


@pytest.fixture(scope="module")
def done(room):
    """One extension to 640 tokens, which hold a passkey in bytes; with the whole model."""
    out = room / "done"
    return out, extend(room, out, to=640, save="model", eval_lengths=[CONTEXT, 128, 640])


def test_a_success_writes_everything(room, done):
    out, extension = done
    assert extension.verdict.success, extension.verdict
    assert extension.verdict.sentence.startswith("Success: the model now reads 640 tokens instead of 32")
    assert re.search(r"Passkey at 640 tokens: \d+\.\d % before, \d+\.\d % after\.$", extension.verdict.sentence)
    assert all(check.passed for check in extension.verdict.checks)
    assert {check.name.split(":")[0] for check in extension.verdict.checks} == {"short", "long", "passkey", "needles"}
    names = {path.name for path in out.iterdir()}
    assert {"adapter.safetensors", "adapter.json", "README.md", "report.html", "report.md", "results.json"} <= names
    page, card = (out / "report.html").read_text(), (out / "README.md").read_text()
    for text in (page, card, (out / "report.md").read_text()):
        assert "Success: the model now reads 640 tokens" in text
        assert "perplexity of test at 640" in text
        assert "equitape generate" in text
    assert page.count("<svg") == 3  # perplexity, passkey, needles
    assert "## Before and after" in card
    # sentences begin on the left, figures end on the right
    assert "|  | choice | reason |\n| --- | --- | --- |" in (out / "report.md").read_text()
    assert "|  | original | extended |\n| --- | ---: | ---: |" in card
    assert '<th scope="col" class="words">reason</th>' in page
    assert '<th scope="col">extended</th>' in page
    title = card.partition("\n# ")[2].splitlines()
    assert title[:3] == ["base, theta+lora", "", extension.verdict.sentence]
    assert card.count(extension.verdict.sentence) == 1
    assert Extension.read(out / "results.json").to_dict() == extension.to_dict()


def test_figures_are_measured_on_both_models(done):
    _, extension = done
    perplexity = {model: tasks["perplexity"].metrics for model, tasks in extension.reports.items()}
    assert set(perplexity) == {"original", "extended"}
    for length in (16, 32, 128, 640):
        key = f"perplexity_{length}"
        assert perplexity["extended"][key] < perplexity["original"][key]
    agreement = extension.agreements["extended"]
    assert agreement.length == CONTEXT
    assert agreement.tokens == 2 * CONTEXT
    assert 0 <= agreement.agreement < 100
    assert agreement.kl > 0


def test_agreement_has_rows_only_where_it_was_measured(done):
    extension = done[1]
    names = [row[0].text for row in damage_table(extension).rows]
    assert [name for name in names if "agreement" in name or "KL" in name] == names[-2:]
    without = damage_table(replace(extension, agreements={}))
    assert [row[0].text for row in without.rows] == names[:-2]
    assert without.notes == []


def test_a_better_column_is_named(done):
    """One that found more and read no worse; not one that lost something, nor one with fewer figures."""

    def changed(**metrics):
        reports = {}
        for task, report in extended.items():
            unknown = metrics.keys() - report.metrics.keys()
            mine = {name: value for name, value in metrics.items() if name not in unknown}
            reports[task] = replace(report, metrics={**report.metrics, **mine})
        return reports

    extension = done[1]
    extended = extension.reports["extended"]
    key, was = "perplexity_640", extended["perplexity"].metrics["perplexity_640"]
    found = f"{extended['passkey'].headline}_640"
    columns = {
        "equal": changed(),
        "hardly": changed(**{key: was / 1.001}),
        "reads": changed(**{key: was / 2}),
        "finds": changed(**{found: 100.0}),
        "mixed": changed(perplexity_16=1e6, **{key: was / 2}),
        "less": {"perplexity": changed(**{key: was / 2})["perplexity"]},
    }
    sentences = better_columns(replace(extension, reports={**extension.reports, **columns}))
    assert sentences == ["Better than the extended model in some figures, and worse in none: reads, finds."]
    assert better_columns(extension) == []


def test_a_success_claims_no_length_beyond_the_measured_ones(done):
    """640 tokens were measured. With a longer context, or with perplexity alone at fewer, the sentence says so."""
    _, extension = done

    def sentence(to, reports=extension.reports):
        return describe_success(to, CONTEXT, 7, reports)

    assert sentence(640) == extension.verdict.sentence.replace(f"all {len(extension.verdict.checks)} ", "all 7 ")
    assert sentence(100_000) == (
        "Success up to 640 tokens instead of 32: all 7 checks passed. Nothing between there and the new context, "
        "100,000, was measured."
    )
    extended = extension.reports["extended"]
    examples = {**extended["perplexity"].examples, "lengths": [16, 32, 128]}
    shorter = {**extended, "perplexity": replace(extended["perplexity"], examples=examples)}
    found = sentence(640, {**extension.reports, "extended": shorter})
    assert "the model now reads 640 tokens" in found
    assert " Perplexity was measured up to 128 tokens. Passkey at 640 tokens: " in found


def test_the_result_loads(room, done):
    out, _ = done
    adapted = equitape.load_adapter(room / "base", out)
    assert adapted.config.context == 640
    whole = AutoModelForCausalLM.from_pretrained(out / "model")
    tokens = torch.randint(0, 250, (1, 100))
    with torch.no_grad():
        assert gap(whole(tokens).logits, adapted(tokens).logits) < 1e-5
    card = (out / "model" / "README.md").read_text()
    assert "## Before and after" in card
    assert f"\nequitape generate {out / 'model'} 'The story so far:'\n" in card
    assert "[report.md](../report.md)" in card
    command = (out / "README.md").read_text().partition("equitape generate ")[2].splitlines()[0]
    assert str(room / "base") in command


def test_a_native_model_needs_no_other_package(room, tmp_path):
    out = tmp_path / "out"
    extension = extend(room, out, save="native", measure=["perplexity"])
    loaded = AutoModelForCausalLM.from_pretrained(out / "native")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config.max_position_embeddings == 128
    model = equitape.load_adapter(room / "base", out)
    # queries do not grow, as that architecture has it
    assert model.config.query_growth == 0
    tokens = draw_tokens(1, 100)
    with torch.no_grad():
        assert gap(loaded(tokens).logits, model(tokens).logits) < 1e-5
    card = (out / "native" / "README.md").read_text()
    assert extension.verdict.sentence in card
    assert "all weights of a `LlamaForCausalLM`" in card
    # a card that is gone is made again, the weights are not
    before = (out / "native" / "model.safetensors").stat().st_mtime_ns
    (out / "native" / "README.md").unlink()
    extend(room, out, save="native", measure=["perplexity"], resume=True)
    assert (out / "native" / "README.md").read_text() == card
    assert (out / "native" / "model.safetensors").stat().st_mtime_ns == before


def test_cards_follow_the_verdict(room, done, tmp_path):
    """Also that of a whole model that was written before, and cards that a kill or a damage took away."""
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    cards = [out / "README.md", out / "model" / "README.md"]
    whole = [path.read_text() for path in cards]
    options = {"to": 640, "save": "model", "eval_lengths": [CONTEXT, 128, 640], "resume": True}
    worse = replace(done[1].verdict, success=False, sentence="Not a success: it rose.")
    changed = replace(done[1], folder=str(out), verdict=worse)
    for path, text, inside in zip(cards, whole, ("", "model"), strict=True):
        path.write_text(extension_card(changed, text, inside))
        assert path.read_text().replace(worse.sentence, done[1].verdict.sentence) == text.replace(
            str(done[0]), str(out)
        )
    extend(room, out, **options)
    expected = [text.replace(str(done[0]), str(out)) for text in whole]
    assert [path.read_text() for path in cards] == expected
    (out / "training" / "README.md").write_text("damaged")
    (out / "model" / "README.md").unlink()
    extend(room, out, **options)
    assert [path.read_text() for path in cards] == expected


def test_the_command_to_try_suits_the_tokenizer(done):
    out, extension = done
    own = {**extension.settings, "tokenizer": "my words"}
    chats = replace(extension, chats=True, settings=own)
    assert try_command(chats) == f"equitape chat {out} --base {extension.base_path} --tokenizer 'my words'"
    assert try_command(chats, "model") == f"equitape chat {out / 'model'}"
    assert not extension.chats


def test_a_chat_template_is_noticed(room, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(room / "base")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "words")
    extension = extend(room, tmp_path / "out", tokenizer=str(tmp_path / "words"), steps=1, measure=["perplexity"])
    assert "\nequitape chat " in (tmp_path / "out" / "README.md").read_text()
    assert Extension.read(tmp_path / "out" / "results.json").chats == extension.chats


def test_rows_are_short_and_ids_jump(done):
    out, extension = done
    train = json.loads((out / "training" / "run.json").read_text())["train"]
    expected = {"rate": 2 / 32, "size": 19.0, "total": 19.0, "shape": "log", "stretch": 1, "after": [], "restart": []}
    assert train["jumps"] == expected
    assert extension.training["run"]["tokens"] == 6 * 2 * CONTEXT
    assert extension.training["adapt"]["theta"] == pytest.approx(10000 * 20 ** (8 / 6))


def test_a_ruined_model_is_no_success(room, tmp_path):
    """Trained on digits with a huge learning rate, it forgets how to write words."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "a.txt").write_text("0123456789 " * 200)
    options = ("--to", 128, "--method", "full", "--learning-rate", 0.1, "--out", tmp_path / "out")
    result = run(room, *options, data=tmp_path / "digits", code=1)
    printed = result.stdout.splitlines()
    assert printed[0].startswith("Not a success: perplexity of test at 16 tokens rose above 1.01 times the original's")
    assert "Not a success" in (tmp_path / "out" / "report.html").read_text()
    assert not Extension.read(tmp_path / "out" / "results.json").verdict.success


def test_a_loss_that_is_not_a_number_is_no_success(room, tmp_path):
    # large enough to overflow on every processor
    extension = extend(room, tmp_path / "out", learning_rate=1e30)
    assert extension.verdict.sentence.startswith("Not a success: The loss or its gradient was NaN or infinite at step")
    assert list(extension.reports) == ["original"]
    assert not (tmp_path / "out" / "adapter.json").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Not a success" in page
    # there is nothing to try
    assert "equitape generate" not in page + (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("stage", ["finetune", "agree", "write_extension"])
def test_a_kill_costs_nothing_that_is_done(room, done, tmp_path, monkeypatch, stage):
    """Stopped in the middle, resumed: the same model and figures, and finished stages do not run again."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(stages, stage, stop)
        with pytest.raises(KeyboardInterrupt):
            extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640])
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("report.json")}
    with pytest.raises(ValueError, match=r"a different extension \(settings.seed was 0, now 1\). Use its settings, or"):
        extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640], resume=True, seed=1)
    assert len(kept) == (3 if stage == "finetune" else 6)
    again = extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640], resume=True)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again.verdict == done[1].verdict
    assert again.agreements == done[1].agreements
    assert (out / "adapter.safetensors").read_bytes() == (done[0] / "adapter.safetensors").read_bytes()


def test_a_finished_extension_needs_no_model_again(room, done, monkeypatch):
    out, extension = done
    monkeypatch.setattr(stages, "load_evaluated_model", None)
    monkeypatch.setattr(finetuning, "build", None)
    # as after a kill between the results and the end of the checkpoints
    checkpoint = out / "training" / "checkpoints" / "checkpoint-6"
    checkpoint.mkdir(parents=True)
    options = {"to": 640, "eval_lengths": [CONTEXT, 128, 640], "resume": True}
    assert extend(room, out, **options).verdict == extension.verdict
    assert not checkpoint.exists()
    # the tolerance changes the verdict alone
    strict = extend(room, out, **options, tolerance=1.0)
    assert strict.verdict.success
    # and how a training is compiled, nothing once it ended
    assert extend(room, out, **options, compile=True).verdict == extension.verdict
    with pytest.raises(ValueError, match=r"already holds this extension; continue it with --resume"):
        extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640])
    with pytest.raises(ValueError, match=r"holds a different extension \(settings.learning_rate was 0.002, now 0.1\)"):
        extend(room, out, **options, learning_rate=0.1)


def test_what_is_trained_again_is_measured_again(room, done, tmp_path):
    """Minutes of training give another model every time; figures and the whole model must be of the new one."""
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (out / "training" / "results.json").unlink()
    old = out / "extended" / "perplexity" / "report.json"
    report = json.loads(old.read_text())
    old.write_text(json.dumps({**report, "metrics": {**report["metrics"], "perplexity_640": 1.0}}))
    (out / "model" / "model.safetensors").write_bytes(b"of the old one")
    again = extend(room, out, to=640, save="model", eval_lengths=[CONTEXT, 128, 640], resume=True)
    assert again.verdict == done[1].verdict
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (out, done[0])]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["adapter.safetensors", "adapter.json"])
@pytest.mark.parametrize("content", [None, b"{"])
def test_a_success_needs_its_adapter(room, done, tmp_path, name, content):
    """A finished extension whose adapter is missing or damaged is refused, and repeated as the sentence says."""
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (out / name).unlink()
    if content is not None:
        (out / name).write_bytes(content)
    options = {"to": 640, "eval_lengths": [CONTEXT, 128, 640], "resume": True}
    with pytest.raises(ValueError, match=rf"weights are lost: .*{name}.*\. Delete {out / 'training'}; then --resume"):
        extend(room, out, **options)
    if content is not None:
        shutil.rmtree(out / "training")
        assert extend(room, out, **options).verdict == done[1].verdict
        assert (out / name).read_bytes() == (done[0] / name).read_bytes()


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '"'])
@pytest.mark.parametrize("name", ["original/perplexity/report.json", "extended/agreement.json", "results.json"])
def test_damaged_figures_are_made_again(room, done, tmp_path, name, content):
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (out / name).write_text(content)
    again = extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640], resume=True)
    assert (again.verdict, again.agreements) == (done[1].verdict, done[1].agreements)
    assert Extension.read(out / "results.json").verdict == done[1].verdict


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("extend.json", "{", "extend.json is damaged; choose another directory"),
        ("extend.json", '{"settings": 3}', "extend.json is damaged; choose another directory"),
        ("original/passkey/settings.json", "{", "is missing or damaged; delete .*passkey, and --resume measures that"),
        ("training/results.json", "{", "results.json is damaged; delete it to repeat the run"),
        ("training/results.json", '{"status": "done"}', "results.json is damaged; delete it to repeat the run"),
    ],
)
def test_damaged_files_are_named(room, done, tmp_path, name, content, words):
    """With what to do, and without losing anything else."""
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (out / name).write_text(content)
    kept = sorted(out.rglob("*"))
    with pytest.raises(ValueError, match=words):
        extend(room, out, to=640, eval_lengths=[CONTEXT, 128, 640], resume=True)
    assert sorted(out.rglob("*")) == kept


def test_comparators_share_the_tables(room, tmp_path):
    extension = extend(room, tmp_path / "out", compare=["yarn", "lora-plain", "tape"], steps=2)
    assert list(extension.reports) == ["original", "extended", "yarn", "lora-plain", "tape"]
    assert set(extension.agreements) == {"extended", "yarn", "lora-plain", "tape"}
    runs = {
        name: json.loads((tmp_path / "out" / name / "training" / "run.json").read_text())
        for name in ("lora-plain", "tape")
    }
    assert "jumps" not in runs["lora-plain"]["train"]
    assert runs["tape"]["train"]["jumps"]["size"] == 3.0
    assert not (tmp_path / "out" / "yarn" / "training").exists()
    table = (tmp_path / "out" / "report.md").read_text()
    assert "|  | original | extended | yarn | lora-plain | tape |" in table


def test_processes_share_the_columns_of_one_report(room, tmp_path):
    """Each column by a separate command, in any order, then the report: the same figures as in one go."""
    arguments = ("--to", 128, "--compare", "drope", "--compare", "linear")
    once, shared = tmp_path / "once", tmp_path / "shared"
    shown = run(room, *arguments, "--out", once, code=None).output
    # known once a model with and one without training are done
    assert re.search(r"About [\d.]+ (s|min|h) left for 2 more models", shown), shown
    assert re.search(r"About [\d.]+ (s|min|h) left for 1 more model\.", shown), shown
    for name in ("drope", "extended", "linear"):
        run(room, *arguments, "--out", shared, "--only", name)
        assert not (shared / "results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in shared.rglob("report.json")}
    assert {path.relative_to(shared).parts[0] for path in kept} == {"drope", "extended", "linear"}
    run(room, *arguments, "--out", shared, "--resume", code=None)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    one, other = (Extension.read(folder / "results.json") for folder in (once, shared))
    assert list(other.reports) == ["original", "extended", "drope", "linear"]
    for name, tasks in one.reports.items():
        assert tasks["perplexity"].metrics == other.reports[name]["perplexity"].metrics
    assert one.agreements == other.agreements
    assert one.verdict == other.verdict
    assert "jumps" not in json.loads((shared / "drope" / "training" / "run.json").read_text())["train"]
    refused = run(room, *arguments, "--out", shared, "--only", "yarn", code=2)
    assert "There is no column 'yarn'." in in_one_line(refused.output)


def test_every_comparator_by_one_name():
    """All but the extension's own way, each once."""
    names = list_comparators(ExtendSettings(to=64, compare=("linear", "all")))
    assert len(names) == len(set(names))
    assert {"linear", "yarn", "theta", "lora-plain", "longlora", "drope", "tape", "tape+lora-plain"} <= set(names)
    assert "theta+lora" not in names
    assert "tape" not in list_comparators(ExtendSettings(to=64, compare=("all",), method="tape"))
    with pytest.raises(ValueError, match=r"There is no comparator 'drop'\. Did you mean 'drope'"):
        ExtendSettings(to=64, compare=("drop",))


def test_comparators_that_the_base_does_not_allow(room, tmp_path):
    """Refused by name before any work; left out of "all" with a reason."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    base = tmp_path / "base"
    sizes = {"vocab_size": 258, "max_position_embeddings": CONTEXT, "eos_token_id": 256, "pad_token_id": 257}
    make_source("llama", rope_parameters=scaling, **sizes).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    refused = "yarn cannot be compared: The source already scales its positions by 'llama3'"
    with pytest.raises(ValueError, match=refused):
        prepare(base, ExtendSettings.parse({"to": 128, **options_of(room, compare=["lora", "yarn"])}, "extend"))
    with pytest.raises(ValueError, match=r"^The source already scales its positions by 'llama3'"):
        prepare(base, ExtendSettings.parse({"to": 128, **options_of(room, scaling="yarn")}, "extend"))
    prepared = prepare(base, ExtendSettings.parse({"to": 128, **options_of(room, compare=["all"])}, "extend"))
    allowed = set(COMPARATORS) - {"theta+lora"}
    left_out = {name for name in allowed if name.startswith(("yarn", "linear", "longlora"))}
    assert set(prepared.comparators) == allowed - left_out
    notes = [note for note in prepared.notes if note.startswith("Not compared: ")]
    named = {name for note in notes for name in note.removeprefix("Not compared: ").partition(". ")[0].split(", ")}
    assert named == left_out
    assert all("already scales its positions by 'llama3'" in note for note in notes)


def test_a_comparator_has_its_own_settings():
    """What follows @ holds for one column; a learning rate and LoRA's options for columns of the same kind."""
    settings = ExtendSettings(to=64, learning_rate=3e-3, lora_rank=4, minutes=2.0, theta=5e5)
    own = comparator_settings("yarn+lora-plain@theta=4e6,scaling_factor=16,recall=0.5,steps=7,seed=2", settings)
    assert (own.method, own.theta, own.scaling_factor, own.recall) == ("yarn+lora", 4e6, 16, 0.5)
    assert (own.minutes, own.steps, own.seed, own.lora_rank, own.learning_rate) == (None, 7, 2, 4, 3e-3)
    assert own.to_dict()["jumps"]["rate"] == 0
    assert comparator_settings("lora@scaling=linear", settings).scaling == "linear"
    assert comparator_settings("linear", ExtendSettings(to=64, query_growth=0.3)).query_growth == 0
    assert comparator_settings("lora", ExtendSettings(to=64, query_growth=0.3)).query_growth == 0.3
    assert comparator_settings("lora@query_growth=0", ExtendSettings(to=64)).query_growth == 0
    every = comparator_settings("theta", settings)
    assert (every.lora_rank, every.learning_rate, every.theta, every.minutes) == (None, None, None, 2)


def test_the_blocks_of_tape_are_kept_and_hold_on_resuming(room, tmp_path):
    """The adapter names them; a folder of other blocks is refused, the extended model's as well as a column's."""
    out, few = tmp_path / "out", {"measure": ["passkey"], "steps": 1, "samples": 1, "eval_lengths": [640]}
    options = {**few, "to": 640, "method": "tape+lora", "compare": ["tape"]}
    first = extend(room, out, **options)
    assert "updates of TAPE" in {choice["name"] for choice in first.plan}
    for folder in (out, out / "tape" / "training"):
        assert json.loads((folder / "adapter.json").read_text())["settings"]["tape"] == {"layers": [0]}
        assert equitape.load_adapter(room / "base", folder).config.encoding["layers"] == (0,)
    assert extend(room, out, resume=True, **options).reports == first.reports
    with pytest.raises(ValueError, match="tape"):
        extend(room, out, resume=True, tape={"layers": "all"}, **options)
    # as a version left it in which TAPE updated in all blocks
    for name in ("run.json", "results.json"):
        path = out / "tape" / "training" / name
        kept = json.loads(path.read_text())
        kept["adapt"]["tape"] = {}
        path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"adapt\.tape"):
        extend(room, out, resume=True, **options)
    path = out / "extend.json"
    kept = json.loads(path.read_text())
    kept["plan"]["adapt"]["tape"] = {}
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"plan\.adapt\.tape"):
        extend(room, out, resume=True, **options)


def test_scaling_and_theta_under_lora(room, tmp_path):
    """The trained models have the positions that the names of their columns say, and only what is asked is measured."""
    names = ["yarn+tape2+lora@scaling_factor=8,lora_rank=2", "theta+lora@theta=4e6"]
    options = {"method": "yarn+lora", "measure": ["passkey"], "compare": names, "steps": 1, "eval_lengths": [640]}
    extension = extend(room, tmp_path / "out", to=640, recall=0.0, samples=1, theta=3e5, **options)
    assert {tuple(reports) for reports in extension.reports.values()} == {("passkey",)}
    assert not extension.verdict.success
    assert "perplexity was not measured" in extension.verdict.sentence
    folders = [tmp_path / "out", *(tmp_path / "out" / name / "training" for name in names)]
    configs = [equitape.load_adapter(room / "base", folder).config for folder in folders]
    # YaRN makes scores larger itself
    assert [config.query_growth for config in configs] == [0, 0, 0.05]
    assert configs[2].query_growth_start == CONTEXT
    first, second, third = (config.encoding for config in configs)
    assert (first["kind"], first["theta"], first["scaling"]["kind"]) == ("rope", 3e5, "yarn")
    assert first["scaling"]["factor"] == 640 / CONTEXT
    assert (second["kind"], second["scaling"]["factor"]) == ("tape2", 8)
    assert (third["theta"], third["scaling"]["kind"]) == (4e6, "default")
    assert json.loads((folders[1] / "adapter.json").read_text())["settings"]["lora_rank"] == 2


def test_facts_and_memory_on_request(room, tmp_path):
    extension = extend(room, tmp_path / "out", to=640, steps=1, row_length=160, recall=0.5, memory=1e-6, samples=1)
    chosen = {choice["name"]: choice for choice in extension.plan}
    assert chosen["planted facts"]["value"] == "in 50 % of the rows"
    assert "1 at a time, activations recomputed" in chosen["rows"]["value"]
    assert "is more than" in chosen["rows"]["reason"]
    run = json.loads((tmp_path / "out" / "training" / "run.json").read_text())
    assert run["recall"] == 0.5


def test_lengths_of_needles_and_of_text(room, tmp_path):
    options = {"eval_lengths": [CONTEXT, 700], "needle_lengths": [600], "text_lengths": [CONTEXT, 64], "steps": 1}
    extension = extend(room, tmp_path / "out", to=700, batch_tokens=800, **options)
    lengths = {task: report.examples["lengths"] for task, report in extension.reports["original"].items()}
    assert lengths == {"perplexity": [16, 32, 64], "passkey": [700], "needles": [600]}


def test_a_dry_run_writes_nothing(room, tmp_path):
    result = run(room, "--to", 128, "--out", tmp_path / "out", "--dry-run")
    for word in ("theta+lora", "NTK", "jumps", "An estimate", "GiB", "prompts"):
        assert word in in_one_line(result.output)
    assert not (tmp_path / "out").exists()
    choices = json.loads(run(room, "--to", 128, "--out", tmp_path / "out", "--dry-run", "--json").stdout)
    assert {"method", "positions", "rows", "jumps", "budget", "learning rate"} <= {each["name"] for each in choices}


def test_refusals_before_any_work(room, tmp_path, monkeypatch):
    def attempt(words, *arguments, to=128, **texts):
        result = run(room, "--to", to, "--out", tmp_path / "out", *arguments, **texts, code=2)
        assert words in in_one_line(result.output)
        assert not (tmp_path / "out").exists()

    attempt("The base reads 32 tokens already; give a length above that for --to, not 32.", to=32)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("too short")
    attempt("The data has 10 tokens, too few for one row of 32", data=tmp_path / "short")
    attempt("The held-out text reaches 10 tokens, and showing more", eval_data=tmp_path / "short")
    attempt("There is no file or folder", data=tmp_path / "nowhere")
    attempt("is in data and in eval_data", data=room / "test")
    attempt("is in data and in eval_data", data=room / "data" / ".." / "test")
    attempt("is in data and in eval_data", data=next((room / "test").iterdir()))
    attempt("minutes and steps are given", "--minutes", 1)
    attempt("There is no comparator 'lora+yarn'", "--compare", "lora+yarn@recall=0.5")
    attempt("cannot set 'minutes' for itself", "--compare", "lora@minutes=3")
    attempt("lora@recall=2: recall", "--compare", "lora@recall=2")
    attempt("has no 'tape', so it cannot hold this model", "--method", "tape", "--save", "native")
    attempt("cannot let queries grow", "--query-growth", 0.1, "--save", "native")
    attempt("has 'foo' after @; write key=value, for example recall=0.5", "--compare", "lora@foo")
    attempt("'all@recall=0.5' names all columns", "--compare", "all@recall=0.5")
    attempt("row_length is 129; it must be at most the context, 128", "--row-length", 129)
    attempt("lora@row_length=129 cannot be compared: row_length is 129; it", "--compare", "lora@row_length=129")
    attempt("too few for one row of 100,000", "--compare", "lora@row_length=100000", to=100000)
    attempt("Did you mean 'theta+lora'", "--method", "theta-lora")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 90, 10))
    attempt("has 0.0 GiB left; free some space, or choose another folder with --out.")


def test_room_on_the_disk_for_every_column(room):
    """Checkpoints of the largest training, and the adapters of all; columns without training need none."""

    def needed(*compare, **changes):
        settings = ExtendSettings.parse({"to": 128, **options_of(room, compare=compare, **changes)}, "extend")
        return prepare(room / "base", settings)

    own, untrained, more = needed(), needed("yarn"), needed("lora-plain", "theta")
    lora, whole = own.plan.trained, own.plan.parameters
    assert bytes_on_disk(own) == bytes_on_disk(untrained) == 4 * 10 * lora + PAGES_BYTES
    assert bytes_on_disk(more) == 4 * (9 * whole + whole + 2 * lora) + PAGES_BYTES
    assert bytes_on_disk(needed(save="model")) == bytes_on_disk(own) + 4 * whole


def test_bases_that_do_not_fit(room, tmp_path):
    def attempt(base, words, *arguments):
        assert words in invoke("extend", base, "--to", "128", *arguments, code=2)

    BertConfig().save_pretrained(tmp_path / "bert")
    attempt(tmp_path / "bert", "Architecture 'bert' cannot be adapted. Supported: llama")
    attempt(tmp_path / "none", "There is no model at")
    make_source(vocab_size=4000, max_position_embeddings=CONTEXT).save_pretrained(tmp_path / "other")
    attempt(tmp_path / "other", "There is no tokenizer in")
    attempt(tmp_path / "other", "it was trained with a different", "--tokenizer", room / "base")


@pytest.mark.parametrize(
    ("damage", "words"),
    [("no file", "no file named"), ("no tensor", "lacks 1 of"), ("nan", "NaN or infinity in 1 weight, for example")],
)
def test_a_base_with_damaged_weights_leaves_nothing(room, tmp_path, damage, words):
    """The same command works once the base is whole, without --resume."""
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(room / "base", base)
    weights = load_file(base / "model.safetensors")
    if damage == "nan":
        weights["model.norm.weight"][0] = float("nan")
    else:
        del weights["model.norm.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    if damage == "no file":
        (base / "model.safetensors").unlink()
    options = options_of(room, steps=1)
    with pytest.raises(ValueError, match=words):
        equitape.extend(base, 128, out=out, **options)
    assert not out.exists()
    settings = ExtendSettings.parse({"to": 128, **options}, "extend")
    with pytest.raises(ValueError, match=words):
        stages.run_columns(prepare(base, settings), out, ["extended"])
    assert not out.exists()


def test_another_folder_is_left_alone(room, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = run(room, "--to", 128, "--out", tmp_path, "--resume", code=2)
    assert "is not empty and has no extension to continue" in in_one_line(result.output)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_in_use_is_refused_before_texts_are_read(room, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "read_data", None)
    settings = ExtendSettings(to=128, data=[str(room / "data")])
    (tmp_path / "extend.json").write_text(json.dumps({"settings": plain(settings.to_dict())}))
    base = ["extend", room / "base", "--out", tmp_path, "--data", room / "data", "--to"]
    for to, words in ((128, "already holds this extension"), (256, "settings.to was 128, now 256")):
        assert words in invoke(*base, to, code=2)


def test_a_length_is_needed(room):
    assert "Missing option '--to'" in invoke("extend", room / "base", code=2)


def test_every_setting_is_an_option():
    listed = [*PLAN, *BUDGETS, *PROOF, *FILES]
    assert sorted(listed) == sorted(ExtendSettings.__dataclass_fields__)


def test_settings_have_one_budget():
    with pytest.raises(ValueError, match="tokens and steps are given; a budget is one of"):
        ExtendSettings(to=64, tokens=10, steps=10)


def test_held_out_text_that_is_trained_on_is_named(room, tmp_path):
    """By content: its folder has another name, and it is the second of two."""
    shutil.copytree(room / "data", tmp_path / "copied")
    (tmp_path / "new.txt").write_text(" ".join(str(7919 * number) for number in range(800)))
    texts = (str(tmp_path / "new.txt"), str(tmp_path / "copied"))
    settings = ExtendSettings(to=128, **{**options_of(room), "data": (str(room / "data"),), "eval_data": texts})
    found = [note for note in prepare(room / "base", settings).notes if "in the training data" in note]
    assert len(found) == 1
    assert found[0].startswith("100.0% of copied")
