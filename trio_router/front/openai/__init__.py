"""The OpenAI API over HTTP: requests to GenerateRequests, token streams to chat and text completions."""
