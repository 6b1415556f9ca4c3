"""One request from its bytes to its stream: legs, the handoff between them, and who cleans up after both."""
