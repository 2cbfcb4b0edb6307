"""Rows that are split over processes: outputs, gradients and losses of one process."""

import os
import re

import pytest
import torch
from torch import distributed as dist

from cases import build, draw_tokens, gap
from equitape.model.context_parallel import context_parallel
from equitape.nn.ring import load_engine
from equitape.scale.costs import ModelCosts
from processes import run_processes

LENGTH = 48
SLACK, FEW = 1e-6, 1e-4
"""Relative errors of gradients that are always allowed, and for tensors of at most 16 numbers in all layers."""
CASES = {2: ["rope", "tape", "tape-clock"], 4: ["tape2"]}
STEPS = {2: 8, 4: 3}
"""By number of processes."""
if os.environ.get("EQUITAPE_LONG_TESTS"):
    every = ["nope", "learned", "sinusoidal", "xpos", "alibi", "fox", "rope", "rope-learned", "rope-clock", "tape"]
    every += ["tape-options", "tape-inside", "tape-clock", "tape2", "tensor_tape"]
    CASES, STEPS = dict.fromkeys(CASES, every), dict.fromkeys(STEPS, 20)
GATED = ("fox", "rope-clock", "tape-clock", "tape-inside")
"""Forget gates add to scores along the row, and parts of the row are merged by float32 sums of these scores."""
BOUNDED = ("learned", "nope")
"""Encodings without ids beyond the row."""


def shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


def tokens_of(step=0):
    return draw_tokens(2, LENGTH, seed=step)


def extra_inputs(case):
    """Ids from somewhere else, which jump ahead."""
    if case in BOUNDED:
        return {}
    jumps = torch.zeros(2, LENGTH, dtype=torch.long)
    jumps[0, 5], jumps[0, 30], jumps[1, 17] = 3, 100, 40
    return {"position_ids": torch.arange(LENGTH)[None].expand(2, -1) + 1000, "position_jumps": jumps}


def alone(model, tokens, **extra):
    """Logits, loss and gradients of one process."""
    model.zero_grad()
    found = model(tokens, labels=tokens, **extra)
    found.loss.backward()
    return found.logits.detach(), found.loss.detach(), gradients(model)


def gradients(model):
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def by_kind(gradients):
    """Gradients of the same parameter in all layers, as one vector in float64."""
    kinds = {}
    for name, gradient in gradients.items():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(gradient.double().flatten())
    return {kind: torch.cat(each) for kind, each in kinds.items()}


def together(model, tokens, **extra):
    """The same of all processes, each with its part of the rows."""
    model.zero_grad()
    with context_parallel(model) as shards:
        part, later = shards.split(tokens), shards.split(shifted(tokens))
        given = {name: shards.split(each) for name, each in extra.items()}
        count = tokens[:, 1:].numel()
        found = model(part, labels=part, shift_labels=later, num_items_in_batch=count, **given)
        found.loss.backward()
        for each in model.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad)
        loss = found.loss.detach().clone()
        dist.all_reduce(loss)
        return shards.join(found.logits.detach()), loss, gradients(model)


def measure(folder):
    """In each process: everything that one process is compared with."""
    results = {}
    for case in CASES[dist.get_world_size()]:
        results[case] = together(build(case, dtype=torch.float32), tokens_of(), **extra_inputs(case))
    results["bytes"] = count_bytes()
    results["steps"] = train(together, STEPS[dist.get_world_size()])
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")


def count_bytes():
    """What this process sends in a forward and a backward pass."""
    engine, sent = load_engine(), []
    create = engine._create_rotater

    def watched(*given, **options):
        rotater = create(*given, **options)
        exchange, gathers = rotater.exchange_buffers, isinstance(rotater, engine._AllGatherRotater)

        def count(buffer):
            # gathering sends once, to all others
            if not gathers or rotater._aggregated_buffer is None:
                sent.append(buffer.nbytes * (dist.get_world_size() - 1 if gathers else 1))
            exchange(buffer)

        rotater.exchange_buffers = count
        return rotater

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_create_rotater", watched)
        together(build("tape2", dtype=torch.float32), tokens_of())
    return sum(sent)


def train(run, steps):
    """Losses of a short training run."""
    model = build("tape2", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        losses.append(run(model, tokens_of(step))[1].item())
        optimizer.step()
    return losses


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    run_processes(request.param, measure, folder)
    return {**torch.load(folder / "results.pt"), "processes": request.param}


def test_logits_and_gradients_are_those_of_one_process(results):
    for case in [case for case in results if case not in ("steps", "bytes", "processes")]:
        logits, loss, grads = results[case]
        extra = extra_inputs(case)
        exact = alone(build(case), tokens_of(), **extra)
        plain = alone(build(case, dtype=torch.float32), tokens_of(), **extra)
        assert gap(logits, plain[0]) < 1e-5 * plain[0].abs().max().item(), case
        assert (logits - exact[0]).norm() <= 2 * (plain[0] - exact[0]).norm(), case
        assert loss.item() == pytest.approx(exact[1].item(), rel=1e-6), case
        # the twice-rule, for the tensors of all layers together: a few numbers of one process may be right by chance
        assert grads.keys() == exact[2].keys()
        times = 4 if case in GATED else 2
        found, expected, usual = (by_kind(each) for each in (grads, exact[2], plain[2]))
        for name, truth in expected.items():
            error, plain_error = (found[name] - truth).norm(), (usual[name] - truth).norm()
            slack = (SLACK if truth.numel() > 16 else FEW) * truth.norm()
            assert error <= times * plain_error + slack, f"{case}, {name}: {error}, alone {plain_error}"


def test_the_ring_sends_what_plans_say(results):
    """Keys and widened values of grouped heads once, and their gradients."""
    costs, processes = ModelCosts(build("tape2").config), results["processes"]
    ahead, back = costs.ring(LENGTH, processes, 4), costs.ring_backward(LENGTH, processes, 4)
    assert results["bytes"] == 2 * (ahead + back)


def test_losses_are_those_of_one_process(results):
    assert results["steps"] == pytest.approx(train(alone, len(results["steps"])), rel=1e-5)


def refuse():
    """In each process: what cannot be split."""
    tokens = tokens_of()
    model = build("tape2", dtype=torch.float32)
    with context_parallel(model) as shards:
        with pytest.raises(ValueError, match="Rows of 42 tokens cannot be split over 2 processes"):
            shards.split(tokens[:, :42])
        with pytest.raises(ValueError, match="Rows of 42 tokens cannot be split over 2 processes"):
            model(tokens[:, :21])
        part = shards.split(tokens)
        with pytest.raises(ValueError, match="need shift_labels"):
            model(part, labels=part)
        with pytest.raises(ValueError, match="segment_ids marks packed rows"):
            model(part, segment_ids=torch.zeros_like(part))
        with pytest.raises(ValueError, match="take no attention_mask"):
            model(part, attention_mask=torch.ones_like(part))
        # a new sequence begins inside a piece, and where one process's piece ends and the other's begins
        for begins in (5, LENGTH // 4):
            ids = torch.arange(LENGTH)[None].expand(2, -1).clone()
            ids[1, begins:] -= begins
            with pytest.raises(ValueError, match="cannot be packed"):
                model(part, position_ids=shards.split(ids))
        assert model(part).past_key_values is None
    assert model(tokens).past_key_values is not None
    for case, changes, words in (
        ("t5", {}, "adds a bias"),
        ("randpe", {}, "draws or scales ids"),
        ("rope-dynamic", {}, "draws or scales ids"),
        ("rope", {"sliding_window": 5}, "no sliding window"),
        ("rope", {"attention_dropout": 0.1}, "no dropout"),
        ("rope", {"attn_implementation": "eager"}, "replaces 'sdpa'"),
    ):
        with pytest.raises(ValueError, match=words), context_parallel(build(case, **changes)):
            pass


def test_what_cannot_be_split_is_refused():
    run_processes(2, refuse)


def show_engine_error():
    """In each process: torch's own context parallelism has no kernel on the CPU, and our models refuse it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query = torch.randn(1, 2, 8, 16)
    with (
        torch_context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]),
        pytest.raises((NotImplementedError, RuntimeError)),
    ):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    model, tokens = build("rope"), tokens_of()
    with (
        torch_context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]),
        pytest.raises(ValueError, match="Rows are split by torch's context_parallel"),
    ):
        model(tokens)
    model(tokens)


def test_torchs_own_switch_has_no_kernel_on_the_cpu():
    """If this fails, torch has learned it, and nn/ring.py may be shorter."""
    run_processes(2, show_engine_error)
