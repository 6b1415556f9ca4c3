"""trio_router: a structured-concurrency router for disaggregated LLM inference."""
