"""gRPC on trio: transports, links, calls, channels and servers. Knows nothing of workers, legs or tokens."""
