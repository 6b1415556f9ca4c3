"""What must hold for any bytes at all: targets, a corpus of what was found, and a command that goes on searching."""
