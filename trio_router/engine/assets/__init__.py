"""The files of the reference worker's model: a tokenizer, its configuration, and the English it speaks."""
