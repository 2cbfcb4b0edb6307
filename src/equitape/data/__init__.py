"""From text to rows of tokens: documents, tokenizers, the token cache, packing."""
