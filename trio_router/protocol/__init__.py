"""The wire protocol: generated message classes (see `protos/`), a codec for them, and edits on message bytes.

Pure: no I/O, no clock. It must not know what a request is for, only how messages are written.
"""
