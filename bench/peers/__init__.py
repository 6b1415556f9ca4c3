"""Other relays, to run beside ours; each is a process that takes its own port and its worker's."""
