"""From text to token rows: documents, tokenizers, token cache, packing."""
