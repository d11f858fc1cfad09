"""Data: sources of documents, the tokenizer, and the loader that packs them into batches."""
