"""PEFT and Trainer use the model as any other."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from cases import VOCAB, build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
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
