"""The timed workloads, built so that a reference has exactly the same weights and inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from ..cuda_graph import CaptureError, capture
from ..encodings import LayerEncoding
from ..model import EquitapeForCausalLM
from .others import FlaPart, as_llama
from .paper_layout import PaperLayout, join_gradient, join_state, split_state
from .parts import AttentionPart, StandalonePart
from .shapes import Shape
from .subjects import FLA, LLAMA, PAPER, PARTS, STANDALONE, Subject, parse_subject

BACKWARD = "+backward"
MEASURES = {
    "attention": ("attention", f"attention{BACKWARD}"),
    "core": ("core", f"core{BACKWARD}"),
    "train": ("train",),
    "prefill": ("prefill",),
    "decode": ("decode",),
}
"""What is measured for a workload, each in separate rows."""

Outputs = dict[str, list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case to measure. Weights and inputs are drawn from `seed` and rounded to `dtype`."""

    measure: str
    encoding: str
    """Text that `parse_subject` understands."""
    shape: Shape
    batch: int
    length: int
    """Tokens per sequence; for "decode", the tokens attended to."""
    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    input_sets: int = 4

    @property
    def subject(self) -> Subject:
        return parse_subject(self.encoding)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a case is computed."""

    attention: str = "sdpa"
    dtype: torch.dtype
    compiled: bool = False
    graphs: bool = False
    """Run compiled training steps and prefills as CUDA graphs; compiled decoding always does."""


@dataclass(kw_only=True)
class PreparedRun:
    """A case ready to run."""

    call: Callable[[int], Any]
    """One timed run on a set of inputs."""
    outputs: Callable[[], Outputs]
    """The outputs of a run by name, for comparison."""
    num_parameters: int
    before: Callable[[int], Any] = lambda index: None
    """Untimed preparation of a run."""
    is_part: bool = False
    """A part of a layer; in a model, the device would be busy and its launches queued."""
    graphs: bool = False
    """Uses the compiler's CUDA graphs, whose memory torch does not attribute to them."""
    note: str = ""


def build(case: Case, variant: Variant) -> PreparedRun:
    """Prepare a case."""
    workload = case.measure.removesuffix(BACKWARD)
    if workload in PARTS:
        with torch.device(case.device):
            return _part(case, variant, workload == "attention")
    return {"train": _train, "prefill": _prefill, "decode": _decode}[workload](case, variant)


@torch.no_grad()
def randomise_encoding(module: nn.Module) -> None:
    """Perturb every parameter of the encoding: many start at zero, where wrong code may compute the right result.

    Deeper models get smaller perturbations; otherwise updates add up to a field so large that rounding dominates the
    gradients.
    """
    depth = max(1, sum(isinstance(part, LayerEncoding) for part in module.modules()))
    for name, parameter in module.named_parameters():
        if "encoding" in name:
            spread = 0.3 / (depth * parameter.shape[-1]) ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(spread * torch.randn_like(parameter))


def _cast(module: nn.Module, case: Case, variant: Variant) -> None:
    randomise_encoding(module)
    module.to(case.dtype).to(variant.dtype)


def _draw(case: Case, variant: Variant, *shape: int) -> Tensor:
    return torch.randn(*shape).to(case.dtype).to(variant.dtype)


def _compile(
    function: Callable[..., Any], variant: Variant, graphs: bool = False, whole: bool = True
) -> Callable[..., Any]:
    """whole: in one graph, or an error."""
    if not variant.compiled:
        return function
    return torch.compile(function, fullgraph=whole, dynamic=False, mode="reduce-overhead" if graphs else None)


def _by_owner(names: list[str], gradients: list[Tensor]) -> Outputs:
    """Gradients with those of the encoding separate: among all others, their errors would be invisible."""
    groups: Outputs = {}
    for name, gradient in zip(names, gradients, strict=True):
        owner = "gradients of the encoding" if "encoding" in name else "gradients"
        groups.setdefault(owner, []).append(gradient)
    return groups


def _part(case: Case, variant: Variant, projections: bool) -> PreparedRun:
    subject = case.subject
    # the reference of the paper's layout is our TAPE
    in_layout = subject.kind == PAPER and variant.attention != "eager"
    # the reference of a standalone layer is the decoder's
    standalone = subject.kind in STANDALONE and variant.attention != "eager"
    backward = case.measure.endswith(BACKWARD)
    torch.manual_seed(case.seed)
    part: AttentionPart | FlaPart
    if subject.kind in FLA:
        part = FlaPart(case.shape, subject.kind, plain=variant.attention == "eager")
    else:
        make = StandalonePart if standalone else AttentionPart
        part = make(case.shape, subject.encoding, variant.attention, case.length, projections)
    _cast(part, case, variant)
    part.train(backward)
    torch.manual_seed(case.seed + 1)
    hiddens = [_draw(case, variant, case.batch, case.length, part.input_size) for _ in range(case.input_sets)]
    start = part.initial_state(hiddens[0])
    inputs: list[tuple[Tensor | None, ...]] = []
    grad_outputs: list[list[Tensor]] = []
    for hidden in hiddens:
        grad_outputs.append([_draw(case, variant, case.batch, case.length, case.shape.hidden_size)])
        if not part.updates:
            inputs.append((hidden.requires_grad_(backward), start))
            continue
        assert start is not None
        # as in the middle of a model: a different state per token, with gradients
        full = (case.batch, *start.shape[1:])
        state = (start + 0.3 * torch.randn(full)).to(case.dtype).to(variant.dtype)
        grad_output = _draw(case, variant, *full)
        states = split_state(state) if in_layout else (state,)
        inputs.append(tuple(each.requires_grad_(backward) for each in (hidden, *states)))
        # the paper's layout holds every number twice, so each copy gets half the gradient
        grad_outputs[-1] += [each / 2 for each in split_state(grad_output)] if in_layout else [grad_output]
    layer = PaperLayout(part) if in_layout and isinstance(part, AttentionPart) else part
    # kernels of flash-linear-attention end a graph
    function = _compile(layer, variant, whole=subject.kind not in FLA)
    num_parameters = len(list(part.parameters()))

    def forward(index: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return function(*inputs[index])

    def both(index: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        results = function(*inputs[index])
        torch.autograd.backward(results, grad_outputs[index])
        leaves = (inputs[index][0], *part.parameters(), *inputs[index][1:])
        gradients = [each.grad for each in leaves if each is not None and each.grad is not None]
        for each in leaves:
            if each is not None:
                each.grad = None
        return results, gradients

    def outputs() -> Outputs:
        results, gradients = both(0) if backward else (forward(0), [])
        found = {"attended": [results[0].detach()]}
        if part.updates:
            found["state"] = [(join_state(*results[1:]) if in_layout else results[1]).detach()]
        if backward:
            found["gradient of the input"] = [gradients[0]]
            found |= _by_owner([name for name, _ in part.named_parameters()], gradients[1 : 1 + num_parameters])
            if part.updates:
                of_state = gradients[1 + num_parameters :]
                found["gradient of the state"] = [join_gradient(*of_state) if in_layout else of_state[0]]
        return found

    return PreparedRun(
        call=both if backward else forward,
        outputs=outputs,
        num_parameters=sum(parameter.numel() for parameter in part.parameters()),
        is_part=True,
    )


def _model(case: Case, variant: Variant) -> tuple[PreTrainedModel, list[Tensor]]:
    """A model and its sets of tokens [B, N], or [B, 1] for decoding."""
    columns = 1 if case.measure == "decode" else case.length
    model: PreTrainedModel
    with torch.device(case.device):
        torch.manual_seed(case.seed)
        model = EquitapeForCausalLM(case.shape.config(case.subject.encoding, variant.attention, case.length))
        _cast(model, case, variant)
        # the reference of transformers' Llama is our RoPE
        if case.subject.kind == LLAMA and variant.attention != "eager":
            model = as_llama(model, variant.attention)
        torch.manual_seed(case.seed + 1)
        tokens = [torch.randint(case.shape.vocab_size, (case.batch, columns)) for _ in range(case.input_sets)]
    return model.eval(), tokens


def _train(case: Case, variant: Variant) -> PreparedRun:
    model, tokens = _model(case, variant)
    model.train()
    if variant.attention == "eager" and case.device.type != "meta":
        # only used as a reference, which may be slow but must save memory
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=case.device.type == "cuda")
    loss_of = _compile(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, variant, variant.graphs)

    def call(index: int) -> None:
        # the output of a graph may be overwritten from here on
        torch.compiler.cudagraph_mark_step_begin()
        loss_of(tokens[index]).backward()
        if case.device.type != "meta":
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def outputs() -> Outputs:
        # the second run records a graph, the third replays it
        for _ in range(3 if variant.graphs else 1):
            optimizer.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            loss_of(tokens[0]).backward()
        # gradients reveal mistakes that leave the loss unchanged
        trained = sorted((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)
        optimizer.zero_grad(set_to_none=True)
        return _by_owner([name for name, _ in trained], [gradient for _, gradient in trained])

    return PreparedRun(call=call, outputs=outputs, num_parameters=model.num_parameters(), graphs=variant.graphs)


def _prefill(case: Case, variant: Variant) -> PreparedRun:
    model, tokens = _model(case, variant)
    function = _compile(
        lambda ids: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits, variant, variant.graphs
    )

    def call(index: int) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return function(tokens[index])

    def outputs() -> Outputs:
        return {"logits": [call(index).clone() for index in range(len(tokens))]}

    return PreparedRun(call=call, outputs=outputs, num_parameters=model.num_parameters(), graphs=variant.graphs)


def _decode(case: Case, variant: Variant) -> PreparedRun:
    """Decode one token with a cache that is then full, so that all steps are equal."""
    model, tokens = _model(case, variant)
    cache = StaticCache(config=model.config, max_cache_len=case.length)
    token = tokens[0].clone()
    with torch.no_grad():
        # the first step allocates buffers as wide as the encoding's values
        model(input_ids=token, past_key_values=cache)
        for layer in cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer.copy_(0.5 * torch.randn(buffer.shape, device=case.device).to(case.dtype))

    def before(index: int) -> None:
        token.copy_(tokens[index])
        for layer in cache.layers:
            layer.cumulative_length.fill_(case.length - 1)

    function = _compile(lambda: model(input_ids=token, past_key_values=cache).logits, variant)
    note = ""
    if variant.compiled and case.device.type == "cuda":
        with torch.no_grad():
            function, note = _capture(function, lambda: before(0), case.device)

    def call(index: int) -> Tensor:
        with torch.no_grad():
            return function()

    def outputs() -> Outputs:
        found = []
        for index in range(len(tokens)):
            before(index)
            found.append(call(index).clone())
        return {"logits": found}

    return PreparedRun(call=call, outputs=outputs, num_parameters=model.num_parameters(), before=before, note=note)


def _capture(
    step: Callable[[], Tensor], before: Callable[[], None], device: torch.device
) -> tuple[Callable[[], Tensor], str]:
    """A decoding step as a CUDA graph; if it cannot be captured, the plain step with a note."""
    for _ in range(3):
        before()
        step()
    before()
    try:
        return capture(step, device), ""
    except CaptureError:
        return step, "no CUDA graph"
