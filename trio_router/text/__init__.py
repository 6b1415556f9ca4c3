"""From messages to prompt tokens, and from output tokens to text: tokenizer files, templates, detokenizing, stops.

Plain objects throughout: no tasks, sockets, clocks or logs. What takes long (unpacking, loading, encoding, rendering)
blocks, and is for the caller to move off its event loop; what runs per token (detokenizing, stop matching) is cheap.
"""
