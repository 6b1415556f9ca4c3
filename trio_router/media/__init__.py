"""Media of a request: what it carries, who may process it, and whether it may be forwarded. Pure."""
