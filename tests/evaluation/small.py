"""Small models and texts to evaluate, and a reader that knows how to answer."""

import json
import re
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cases import build, randomise
from equitape.data.text import Document
from equitape.data.tokenizers import byte_tokenizer, train_bpe
from equitape.evaluation import EvaluatedModel

BYTES = 258
SENTENCES = "A man went to the river and saw 12 birds. They flew away. The key was on the table.\n"


def our_model(case="tape", dtype=torch.float64, **changes):
    return build(
        case, dtype=dtype, vocab_size=BYTES, num_hidden_layers=2, pad_token_id=257, eos_token_id=256, **changes
    )


def llama(dtype=torch.float64, **changes):
    sizes = {
        "vocab_size": BYTES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 257, "bos_token_id": None,
        "eos_token_id": 256,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    randomise(model)
    return model.to(dtype).eval()


def evaluated(model, tokenizer=None, name="small"):
    return EvaluatedModel(model=model, tokenizer=tokenizer or byte_tokenizer(), name=name)


def save(model, folder, tokenizer=None):
    """A model as `equitape eval` finds it; without a tokenizer when it is False."""
    model.save_pretrained(folder)
    if tokenizer is not False:
        (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


def bpe_tokenizer():
    """Tokens of several letters, so that pieces of text have not one token a letter."""
    return train_bpe([Document("text", SENTENCES * 20)], 320)


def tokenizer_with_start():
    """Words, and a mark in front of every text."""
    words = {"<s>": 0, "<unk>": 1, "</s>": 2}
    for word in re.findall(r"\w+|[^\w\s]", SENTENCES):
        words.setdefault(word, len(words))
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class Reader(torch.nn.Module):
    """Stands in for a model that finds what a pattern says, in the last `sight` tokens of a prompt."""

    def __init__(self, pattern, answer=r" \1.", sight=10**9, context=400, vocab_size=BYTES):
        super().__init__()
        self.embedding = torch.nn.Embedding.from_pretrained(torch.zeros(vocab_size, 1), freeze=False)
        self.config = SimpleNamespace(max_position_embeddings=context)
        self.tokenizer = byte_tokenizer()
        self.pattern, self.reply, self.sight = re.compile(pattern), answer, sight
        self.seen = []

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, use_cache=False, past_key_values=None):
        logits = torch.zeros(*input_ids.shape, self.embedding.num_embeddings)
        return SimpleNamespace(past_key_values=None, logits=logits)

    def generate(self, tokens, attention_mask, generation_config, **kwargs):
        assert bool(attention_mask.all())
        self.seen.append(tuple(tokens.shape))
        rows = []
        for row in tokens.tolist():
            found = self.pattern.search(self.tokenizer.decode(row[-self.sight :]))
            text = found.expand(self.reply) if found else " nothing"
            rows.append([*text.encode(), 256][: generation_config.max_new_tokens])
        longest = max(map(len, rows))
        written = torch.tensor([row + [257] * (longest - len(row)) for row in rows])
        return torch.cat((tokens, written), dim=1)


def contract(split, documents, words=60):
    """SCROLLS files of contracts whose text says the answer."""
    choices = ["Entailment", "Contradiction", "Not mentioned"]
    rows = []
    for number in range(documents):
        answer = choices[number % 3]
        items = [
            {"id": f"{split}{number}_{which}", "question": f"Clause {which}.", "choices": choices, "answers": [answer]}
            for which in range(2)
        ]
        text = f"It is {answer} here. " + "All parties agree. " * (words + 7 * number)
        rows.append({"task": "contract_nli", "split": split, "doc_id": str(number), "document": text, "items": items})
    return rows


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
