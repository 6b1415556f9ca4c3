"""What clients talk to: HTTP/1.1 with the OpenAI API, gRPC, metrics. Nothing below this package knows it."""
