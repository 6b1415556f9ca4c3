"""Pure choices between workers. Knows candidates as records; no I/O, no clock, no randomness of its own."""
