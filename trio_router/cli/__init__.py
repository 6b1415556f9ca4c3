"""The command line: words to settings, settings to a command, errors to one line. Flags and help follow from tables.

The environment and the arguments are read here and in `config`, and nowhere else.
"""

from .main import main

__all__ = ["main"]
