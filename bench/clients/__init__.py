"""Load clients, each in a process of its own."""
