"""PEFT and Trainer use the model as any other."""

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from cases import VOCAB, build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.data.tokenizers import byte_tokenizer
from equitape.encodings.base import ENCODINGS

TOKENS = draw_tokens(2, 7)


def test_lora_on_top(tmp_path):
    base = build("tape", dtype=torch.float32)
    expected = base(TOKENS).logits
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    adapted = model.eval()(input_ids=TOKENS).logits
    assert gap(adapted, expected) > 1e-3
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("tape", dtype=torch.float32), tmp_path).eval()
    assert gap(loaded(input_ids=TOKENS).logits, adapted) < 1e-6
    assert gap(model.merge_and_unload()(TOKENS).logits, adapted) < 1e-4


@pytest.mark.parametrize("kind", sorted(ENCODINGS))
def test_trainer_trains(kind, tmp_path):
    """A repeating sequence is learnt in a few steps, and every parameter moves."""
    torch.manual_seed(0)
    model = EquitapeForCausalLM(tiny_config(kind, initializer_range=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    row = torch.arange(1, 13).repeat(2)
    data = [{"input_ids": row, "labels": row} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, gradient_checkpointing=kind == "tape",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(float(VOCAB))).item(), abs=1.0)
    unmoved = [name for name, p in model.named_parameters() if torch.equal(p.detach(), before[name])]
    # the row of the padding token is the only thing nothing asks for
    assert unmoved == []


@pytest.mark.parametrize("kind", ["rope", "alibi", "tape", "tape2"])
def test_sft_of_trl_with_packing_and_lora(kind, tmp_path):
    """Packed rows of TRL keep their sequences apart, and only LoRA's weights move."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    sizes = {"vocab_size": 258, "pad_token_id": 257, "eos_token_id": 256}
    model = build(kind, dtype=torch.float32, **sizes)
    rows = [{"input_ids": draw_tokens(1, length, seed=length)[0].tolist()} for length in (5, 9, 7, 12, 6, 9)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_length=24, packing=True, max_steps=3, per_device_train_batch_size=1, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch}
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    assert len(starts) > 2
    trained = trainer.model.eval()
    with torch.no_grad():
        packed = trained(**inputs).logits[0]
        for first, end in pairwise(starts):
            assert gap(packed[first:end], trained(input_ids=batch["input_ids"][:, first:end]).logits[0]) < 1e-4
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    trainer.train()
    moved = {name for name, p in trained.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora" in name}
